"""Addressing a message to a shard: the shard's name as a blind copy, which the broker removes.

The broker routes by BCC as by the routing key, so that what is delivered and returned carries the
exchange, the routing key and the headers that the application sent.
"""

from __future__ import annotations

import copy
from typing import Any

import pika

from sharding.errors import InvalidInput


def addressed(properties: pika.BasicProperties | None, shard: str) -> pika.BasicProperties:
    """The properties with the shard's name added as a blind copy; the caller's are left alone.

    The broker routes by BCC as by the routing key and removes it, so that what is delivered and
    returned carries the exchange, the routing key and the headers that the application sent.
    """
    sent = pika.BasicProperties()
    if properties is None:
        sent.headers = {"BCC": [shard]}
        return sent
    sent.__dict__.update(properties.__dict__)
    headers: dict[str, Any] = dict(properties.headers or {})
    headers["BCC"] = [*headers.get("BCC", ()), shard]
    sent.headers = headers
    return sent


class Encoded(pika.BasicProperties):
    """Properties that are encoded once, when they are published, with the shard in BCC."""

    def __init__(self, plain: pika.BasicProperties, shard: str | None) -> None:
        self.plain = copy.copy(plain)
        self.shard = shard
        addressed = self.plain
        headers = dict(plain.headers or {})
        if plain.headers is not None:
            self.plain.headers = headers
        if shard is not None:
            own = headers.get("BCC", [])
            if not isinstance(own, list):
                raise InvalidInput("headers['BCC']", "must be a list of routing keys", own)
            addressed = copy.copy(plain)
            addressed.headers = {**headers, "BCC": [*own, shard]}
        try:
            self._bytes = b"".join(addressed.encode())
        except Exception as error:
            # pika raises whatever comes: AssertionError, struct.error, AttributeError, its own.
            rule = f"must be properties that AMQP can express ({type(error).__name__})"
            raise InvalidInput("properties", rule, plain.headers) from error

    def encode(self) -> list[bytes]:
        return [self._bytes]
