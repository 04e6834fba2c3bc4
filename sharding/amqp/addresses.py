"""URLs, checked, and the parameters made of them. No error shows what may be a password."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

import pika
import pika.channel
import pika.exceptions

from sharding.errors import InvalidInput


def amqp_parameters(url: str) -> pika.URLParameters:
    parts = checked_parts("urls", url, ("amqp", "amqps"))
    try:
        return pika.URLParameters(url)
    except ValueError:
        raise InvalidInput("urls", "must be an AMQP URL", f"{parts.scheme}://…") from None


def of_one_cluster(urls: Sequence[str]) -> list[pika.URLParameters]:
    """The parameters of each; URLs that differ in more than the address have different maps."""
    parameters = [amqp_parameters(url) for url in urls]
    said: dict[str, set[str | None]] = {
        "virtual host": {each.virtual_host for each in parameters},
        "user": {getattr(each.credentials, "username", None) for each in parameters},
        "scheme": {urlsplit(url).scheme for url in urls},
    }
    for what, values in said.items():
        if len(values) > 1:
            found = " and ".join(sorted(str(value) for value in values))
            raise InvalidInput("urls", f"must all have the same {what}", found)
    return parameters


def checked_parts(field: str, url: str, schemes: tuple[str, ...]) -> SplitResult:
    rule = f"must begin with {' or '.join(schemes)}, with / # ? in a password as %2F %23 %3F"
    scheme, separator, _ = url.partition("://")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in schemes and not parts.fragment and parts.hostname
        _ = parts.port
    except ValueError:
        usable = None
    if not usable:
        raise InvalidInput(field, rule, f"{scheme}://…" if separator else "…")
    return parts


def connection_parameters(url: str) -> pika.ConnectionParameters:
    """The parameters of an AMQP URL, with the control plane's own habits."""
    given = pika.URLParameters(url)
    return pika.ConnectionParameters(
        host=given.host,
        port=given.port,
        virtual_host=given.virtual_host,
        credentials=given.credentials,
        ssl_options=given.ssl_options,
        heartbeat=10,
        connection_attempts=1,
        client_properties={"connection_name": "warren control plane"},
    )


def same_but_at(
    parameters: pika.ConnectionParameters, host: str, port: int
) -> pika.ConnectionParameters:
    """The same credentials and habits at another address."""
    moved = copy.copy(parameters)
    moved.host, moved.port = host, port
    return moved
