"""Addressing a message to a shard: by two keys as blind copies, which the broker removes.

The broker routes by BCC as by the routing key, so that what is delivered and returned carries the
exchange, the routing key and the headers that the application sent. One key leads to the exchange
of the shards, the other from there to the shard. A message that has the first and finds no shard is
returned; one that does not have it is kept, as somebody else's.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping
from typing import Any

import pika

from sharding.amqp.content_header import PropertyList, room_in_frame
from sharding.amqp.field_table import Field, long_string, write_name
from sharding.amqp.received import EncodedProperties
from sharding.errors import InvalidInput
from sharding.maps.naming import SHARDS_KEY

COPIES = ("CC", "BCC")

LARGEST_FRAME = 131_072
"""RabbitMQ's own frame_max, and the most that pika agrees to."""


def headers_to(headers: Mapping[str, Any] | None, shard: str) -> dict[str, Any]:
    """The headers with the way to the shard added: the one place that writes BCC.

    Copies of the application's own are refused: one that another queue takes would hide from the
    broker, and so from everybody, that no shard took the message.
    """
    for name in COPIES:
        if headers and name in headers:
            rule = "must not be set for a sharded name, as a copy could hide that no shard took it"
            raise InvalidInput(f"headers[{name!r}]", rule, headers[name])
    return {**(headers or {}), "BCC": [SHARDS_KEY, shard]}


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

    __slots__ = ("frame_max",)  # not among the properties themselves
    frame_max: int

    def encode(self) -> list[bytes]:
        encoded = super().encode()
        check_room(sum(map(len, encoded)), self.frame_max)
        return encoded


def addressed(
    properties: pika.BasicProperties | None, shard: str, frame_max: int = LARGEST_FRAME
) -> pika.BasicProperties:
    """The properties with the way to the shard added; the caller's are left alone.

    `frame_max` is what the connection has agreed on.
    """
    sent = _Checked()
    sent.frame_max = frame_max
    if properties is not None:
        sent.__dict__.update(properties.__dict__)
    sent.headers = headers_to(sent.headers, shard)
    return sent


def appearance(properties: pika.BasicProperties) -> dict[str, object]:
    """Properties as they look after the wire, without what the broker removes: by them, a message
    that comes back is told from others with the same key and body."""
    seen = pika.BasicProperties()
    seen.decode(b"".join(properties.encode()))
    headers = {name: value for name, value in (seen.headers or {}).items() if name != "BCC"}
    return {**vars(seen), "headers": headers}


def forwarded(raw: bytes, shard: str, frame_max: int = LARGEST_FRAME) -> pika.BasicProperties:
    """The properties of a message that was published without the way to its shard, to the byte.

    It was kept because its own copies led nowhere, so they may stay, unless they name a shard; a
    BCC the broker has removed.
    The user id goes into a header, as the broker takes it from its owner only.
    """
    given = PropertyList.parse(raw)
    user = given.short_string("user_id")
    given = given.without("user_id")
    if user is not None:
        moved = Field(b"x-warren-user-id", long_string(user))
        given = given.with_table(given.table + moved.encoded)
    keys = b"".join(long_string(write_name(key)) for key in (SHARDS_KEY, shard))
    way = Field(b"BCC", b"A" + struct.pack(">I", len(keys)) + keys)
    sent = given.with_table(given.table + way.encoded).encoded
    check_room(len(sent), frame_max)
    return EncodedProperties(sent)


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
