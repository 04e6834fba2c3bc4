"""The properties of a message as AMQP 0-9-1 has them in bytes: taken apart and put together again.

A flag for each property that is there, then the properties in the order of the flags. RabbitMQ
reads 14 flags and ignores the last two bits, also the one that the specification calls "more flags
follow" (`rabbit_framing_amqp_0_9_1`), so that what follows the flags is always the first property.
What is not changed stays to the byte, those two bits too.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sharding.amqp.field_table import Malformed, read_table, read_text

PROPERTIES = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
"""In the order of their flags, from the highest bit down."""
_FLAGS = {name: 1 << (15 - place) for place, name in enumerate(PROPERTIES)}
_SIZES = {"delivery_mode": 1, "priority": 1, "timestamp": 8}
_FRAME_OVERHEAD = 8
_BEFORE_PROPERTIES = 12
"""Class, weight and the size of the body."""


def room_in_frame(frame_max: int) -> int:
    """How many bytes the properties of a message may have: its header must fit into one frame."""
    return frame_max - _FRAME_OVERHEAD - _BEFORE_PROPERTIES


@dataclass(frozen=True, slots=True)
class PropertyList:
    """Each property as it is encoded; `encoded` of what was `parse`d is the same bytes."""

    present: Mapping[str, bytes]
    unknown_flags: int = 0

    @classmethod
    def parse(cls, encoded: bytes) -> PropertyList:
        if len(encoded) < 2:
            raise Malformed("properties without their flags")
        flags: int = struct.unpack_from(">H", encoded)[0]
        present = {}
        offset = 2
        for name, flag in _FLAGS.items():
            if flags & flag:
                end = _end_of_property(encoded, offset, name)
                present[name] = encoded[offset:end]
                offset = end
        if offset != len(encoded):
            raise Malformed("something follows the last property")
        return cls(present, flags & 0b11)

    @property
    def encoded(self) -> bytes:
        names = [name for name in PROPERTIES if name in self.present]
        flags = sum(_FLAGS[name] for name in names) | self.unknown_flags
        return struct.pack(">H", flags) + b"".join(self.present[name] for name in names)

    @property
    def table(self) -> bytes:
        """The headers without their size; empty if there are none."""
        return self.present.get("headers", b"")[4:]

    def short_string(self, name: str) -> bytes | None:
        """The text of a property that is one, in its own bytes."""
        return self.present[name][1:] if name in self.present else None

    def without(self, *names: str) -> PropertyList:
        kept = {name: value for name, value in self.present.items() if name not in names}
        return replace(self, present=kept)

    def with_table(self, table: bytes) -> PropertyList:
        sized = struct.pack(">I", len(table)) + table
        return replace(self, present={**self.present, "headers": sized})

    def read(self) -> dict[str, Any]:
        """Every property as people read it, None where it is not there."""
        values: dict[str, Any] = dict.fromkeys(PROPERTIES)
        for name, encoded in self.present.items():
            if name == "headers":
                values[name] = read_table(encoded[4:])
            elif name in _SIZES:
                values[name] = int.from_bytes(encoded, "big")
            else:
                values[name] = read_text(encoded[1:])
        return values


def _end_of_property(encoded: bytes, offset: int, name: str) -> int:
    size = _SIZES.get(name)
    if size is None:
        length = 4 if name == "headers" else 1
        size = length + int.from_bytes(encoded[offset : offset + length], "big")
        if len(encoded) < offset + length:
            raise Malformed(f"{name} without its size")
    if offset + size > len(encoded):
        raise Malformed(f"{name} ends behind the properties")
    return offset + size
