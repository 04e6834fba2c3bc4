"""Writes AMQP 1.0 values in their shortest form."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from sharding.errors import InvalidInput
from sharding.stream.formats.amqp_decimals import write_decimal
from sharding.stream.formats.amqp_reader import MAX_DEPTH
from sharding.stream.formats.amqp_types import AmqpValue, Described, Symbol, Timestamp

NULL = b"\x40"
_BINARY, _STRING, _SYMBOL, _LIST, _MAP = 0xA0, 0xA1, 0xA3, 0xC0, 0xC1
_WIDE = 0x10  # set in a constructor: sizes of four bytes instead of one
_MAX_SIZE = 2**32 - 1


def write_value(value: AmqpValue, depth: int = 0) -> bytes:
    """`value` with its constructor; `InvalidInput` if AMQP has no such value."""
    if depth > MAX_DEPTH:
        raise InvalidInput("value", f"may not be nested deeper than {MAX_DEPTH}", value)
    match value:
        case None:
            return NULL
        case bool():
            return b"\x41" if value else b"\x42"
        case str():
            return write_sized(_SYMBOL if isinstance(value, Symbol) else _STRING, _utf8(value))
        case bytes() | bytearray() | memoryview():
            return write_sized(_BINARY, bytes(value))
        case Timestamp():
            return b"\x83" + _packed(">q", value)
        case int():
            return _integer(value)
        case float():
            return b"\x82" + struct.pack(">d", value)
        case datetime():
            return write_value(_timestamp(value))
        case UUID():
            return b"\x98" + value.bytes
        case Decimal():
            return b"\x94" + _decimal(value)
        case Described():
            return (
                b"\x00"
                + write_value(value.descriptor, depth + 1)
                + write_value(value.value, depth + 1)
            )
        case Mapping():
            return write_map(value, depth)
        case Sequence():
            return write_list([write_value(element, depth + 1) for element in value])
        case _:
            raise InvalidInput("value", "has to be of a type that AMQP knows", value)


def write_list(elements: Sequence[bytes]) -> bytes:
    """A list of elements that are written already."""
    return _compound(_LIST, elements) if elements else b"\x45"


def write_map(entries: Mapping[AmqpValue, AmqpValue], depth: int = 0) -> bytes:
    written: list[bytes] = []
    for key, value in entries.items():
        written += (write_value(key, depth + 1), write_value(value, depth + 1))
    return _compound(_MAP, written)


def write_sized(constructor: int, content: bytes) -> bytes:
    """A string, symbol or binary; `constructor` is the one for sizes of one byte."""
    size = len(content)
    if size < 256:
        return bytes((constructor, size)) + content
    if size > _MAX_SIZE:
        raise InvalidInput("value", "may have 4 GiB at most", size)
    return struct.pack(">BI", constructor | _WIDE, size) + content


def write_uint(value: int) -> bytes:
    if value == 0:
        return b"\x43"
    return bytes((0x52, value)) if 0 < value < 256 else b"\x70" + _packed(">I", value)


def write_ulong(value: int) -> bytes:
    if value == 0:
        return b"\x44"
    return bytes((0x53, value)) if 0 < value < 256 else b"\x80" + _packed(">Q", value)


def _compound(constructor: int, elements: Sequence[bytes]) -> bytes:
    content = b"".join(elements)
    if len(content) < 255 and len(elements) < 256:
        return bytes((constructor, len(content) + 1, len(elements))) + content
    if len(content) > _MAX_SIZE - 4:
        raise InvalidInput("value", "may have 4 GiB at most", len(content))
    return struct.pack(">BII", constructor | _WIDE, len(content) + 4, len(elements)) + content


def _integer(value: int) -> bytes:
    if -128 <= value < 128:
        return struct.pack(">Bb", 0x55, value)
    if value >= 2**63:
        return write_ulong(value)
    return b"\x81" + _packed(">q", value)


def _packed(form: str, value: int) -> bytes:
    try:
        return struct.pack(form, value)
    except struct.error:
        raise InvalidInput("value", "has to fit into its AMQP type", value) from None


def _decimal(value: Decimal) -> bytes:
    try:
        return write_decimal(value)
    except ValueError as error:
        raise InvalidInput("value", str(error), value) from None


def _timestamp(value: datetime) -> Timestamp:
    if value.tzinfo is None:
        raise InvalidInput("value", "a datetime has to know its time zone", value)
    return Timestamp.of(value)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidInput("value", "text has to be writable as UTF-8", text) from None
