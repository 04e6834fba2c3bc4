"""URLs of brokers and of the management API, checked. No error shows what may be a password."""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import pika

from sharding.errors import InvalidInput
from sharding.management import Management


def amqp_parameters(url: str) -> pika.URLParameters:
    parts = _checked_parts("urls", url, ("amqp", "amqps"))
    try:
        return pika.URLParameters(url)
    except ValueError:
        raise InvalidInput("urls", "must be an AMQP URL", f"{parts.scheme}://…") from None


def management_api(url: str, amqp: pika.URLParameters | None = None) -> Management:
    """User and password are those in the URL, else those of the AMQP connection, else guest's."""
    parts = _checked_parts("management_urls", url, ("http", "https"))
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    port = f":{parts.port}" if parts.port else ""
    address = f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"
    credentials: Any = pika.PlainCredentials("guest", "guest") if amqp is None else amqp.credentials
    return Management(
        address,
        unquote(parts.username) if parts.username else credentials.username,
        unquote(parts.password) if parts.password else credentials.password,
    )


def _checked_parts(field: str, url: str, schemes: tuple[str, ...]) -> SplitResult:
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
