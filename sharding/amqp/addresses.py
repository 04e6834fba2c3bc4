"""URLs, checked, and the parameters made of them. No error shows what may be a password."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

import pika
import pika.channel
import pika.exceptions

from sharding.errors import InvalidInput

_KNOWN_SCHEMES = ("amqp", "amqps", "http", "https", "rabbitmq-stream", "rabbitmq-stream+tls")


def amqp_parameters(url: str, field: str = "urls") -> pika.URLParameters:
    parts = checked_parts(field, url, ("amqp", "amqps"))
    # Raised outside of `except`: pika's own error, which may hold anything, goes with no other.
    with suppress(ValueError, TypeError, KeyError):
        return pika.URLParameters(url)
    raise InvalidInput(field, "must be an AMQP URL", f"{parts.scheme}://…")


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
    """The parts of a URL, if it can be read in one way only. Every URL that Warren is given
    passes through here.

    In one that is wrongly escaped the password may be anywhere: a / ? # in it ends the address
    before the host, so that what is left of it is taken for host and port, and the rest for a
    virtual host or a query. So a URL with an @ after the address, or a % in its host, is refused,
    and an error shows no more of it than its scheme.
    """
    try:
        parts = urlsplit(url)
        after = f"{parts.path}{parts.query}{parts.fragment}"
        readable = parts.port != 0 and not parts.fragment and "@" not in after
        readable = readable and bool(parts.hostname) and "%" not in (parts.hostname or "")
    except ValueError:
        parts, readable = None, False
    if parts is None or not readable or parts.scheme not in schemes:
        raise InvalidInput(field, _rule(schemes), f"{_scheme_of(url, schemes)}…")
    return parts


def _rule(schemes: tuple[str, ...]) -> str:
    return (
        f"must begin with {' or '.join(f'{each}://' for each in schemes)}, then user:password@ if "
        "need be, then host:port; in user and password @ : / ? # % as %40 %3A %2F %3F %23 %25"
    )


def _scheme_of(url: str, schemes: tuple[str, ...]) -> str:
    """What may be shown of a URL that can't be read."""
    begins = url.partition("://")[0].lower()
    return f"{begins}://" if begins in (*schemes, *_KNOWN_SCHEMES) else ""


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
