"""Addresses of brokers as people write them: `rabbitmq-stream://user:password@host:5552/vhost`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from sharding.amqp.addresses import checked_parts
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
        parts = checked_parts("url", text, tuple(_PORTS))
        if parts.query:
            rule = "must have no query: what it would say are options"
            raise InvalidInput("url", rule, f"{parts.scheme}://…?…")
        return cls(
            Broker(parts.hostname or "", parts.port or _PORTS[parts.scheme]),
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
