"""Addressing a message to a shard: the shard's name as a blind copy, which the broker removes.

The broker routes by BCC as by the routing key, so that what is delivered and returned carries the
exchange, the routing key and the headers that the application sent.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pika

from sharding.amqp.content_header import room_in_frame
from sharding.errors import InvalidInput

LARGEST_FRAME = 131_072
"""RabbitMQ's own frame_max, and the most that pika agrees to."""


def headers_to(headers: Mapping[str, Any] | None, shard: str) -> dict[str, Any]:
    """The headers with the shard's name added as a blind copy: the one place that writes BCC.

    The application's own copies stay. A BCC that is no list is refused, as the broker would: taken
    apart, a text would be a copy by each of its letters.
    """
    sent = dict(headers) if headers else {}
    copies = sent.get("BCC", [])
    if not isinstance(copies, list):
        raise InvalidInput("headers['BCC']", "must be a list of routing keys", copies)
    sent["BCC"] = [*copies, shard]
    return sent


def check_room(size: int, frame_max: int) -> None:
    """Refuse properties that do not fit into a frame: the broker would end the connection (501),
    and the outcome of all that is in flight on it would be unknown.
    """
    room = room_in_frame(frame_max)
    if size > room:
        rule = f"must be at most {room} bytes with the shard's name: AMQP has one frame for them"
        raise InvalidInput("properties", rule, size)


class _Checked(pika.BasicProperties):
    """Properties that refuse to be sent where they do not fit into a frame."""

    def encode(self) -> list[bytes]:
        encoded = super().encode()
        check_room(sum(map(len, encoded)), LARGEST_FRAME)
        return encoded


def addressed(properties: pika.BasicProperties | None, shard: str) -> pika.BasicProperties:
    """The properties with the shard's name added as a blind copy; the caller's are left alone."""
    sent = _Checked()
    if properties is not None:
        sent.__dict__.update(properties.__dict__)
    sent.headers = headers_to(sent.headers, shard)
    return sent


class Encoded(pika.BasicProperties):
    """Properties that are encoded once, when they are published, with the shard in BCC."""

    def __init__(self, plain: pika.BasicProperties, shard: str | None) -> None:
        self.plain = copy.copy(plain)
        self.shard = shard
        if plain.headers is not None:
            self.plain.headers = dict(plain.headers)
        sent = self.plain if shard is None else addressed(self.plain, shard)
        try:
            self._bytes = b"".join(sent.encode())
        except InvalidInput:
            raise
        except Exception as error:
            # pika raises whatever comes: AssertionError, struct.error, AttributeError, its own.
            rule = f"must be properties that AMQP can express ({type(error).__name__})"
            raise InvalidInput("properties", rule, plain.headers) from error
        check_room(len(self._bytes), LARGEST_FRAME)

    @property
    def size(self) -> int:
        return len(self._bytes)

    def encode(self) -> list[bytes]:
        return [self._bytes]
