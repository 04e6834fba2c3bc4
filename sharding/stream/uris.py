"""Addresses of brokers as people write them: `rabbitmq-stream://user:password@host:5552/vhost`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from sharding.errors import InvalidInput
from sharding.stream.protocol.constants import Broker

PLAIN_PORT, TLS_PORT = 5552, 5551
_PORTS = {"rabbitmq-stream": PLAIN_PORT, "rabbitmq-stream+tls": TLS_PORT}


@dataclass(frozen=True)
class StreamUri:
    """
    >>> StreamUri.parse("rabbitmq-stream+tls://ann:secret@rmq0/orders")
    StreamUri(address=Broker(host='rmq0', port=5551), tls=True, user='ann', vhost='orders')
    """

    address: Broker
    tls: bool = False
    user: str = "guest"
    password: str = field(default="guest", repr=False)
    vhost: str = "/"

    @classmethod
    def parse(cls, text: str) -> StreamUri:
        parts = _split(text)
        if parts.scheme not in _PORTS:
            raise _invalid(f"a scheme of {' or '.join(_PORTS)}", parts.scheme)
        try:
            port = parts.port
        except ValueError:
            raise _invalid("a port between 1 and 65535", parts.netloc.rpartition("@")[2]) from None
        if not parts.hostname:
            raise _invalid("a host name", parts.netloc.rpartition("@")[2])
        if parts.query or parts.fragment:
            raise _invalid("no query: what it would say are options", parts.query or parts.fragment)
        return cls(
            Broker(parts.hostname, port or _PORTS[parts.scheme]),
            tls=parts.scheme.endswith("+tls"),
            user=unquote(parts.username) if parts.username is not None else "guest",
            password=unquote(parts.password) if parts.password is not None else "guest",
            vhost=unquote(parts.path[1:]) or "/",
        )


def parse_all(texts: Sequence[str]) -> list[StreamUri]:
    """Several addresses of one cluster: all of them lead to the same user and virtual host."""
    if not texts:
        raise InvalidInput("urls", "must name at least one broker", texts)
    uris = [StreamUri.parse(text) for text in texts]
    logins = {(uri.tls, uri.user, uri.password, uri.vhost) for uri in uris}
    if len(logins) > 1:
        # What differs may be the password, so nothing is shown.
        raise InvalidInput(
            "urls", "must agree on TLS, user, password and virtual host", [u.address for u in uris]
        )
    return uris


def _split(text: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError:  # half an IPv6 address; its text may hold a password
        raise _invalid("an address of the form host:port", "…") from None


def _invalid(rule: str, found: object) -> InvalidInput:
    return InvalidInput("url", f"must have {rule}", found)
