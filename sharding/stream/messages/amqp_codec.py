"""Reads AMQP 1.0 values from bytes that are not trusted.

A value is one byte that says its type and how it is written (the constructor), then its bytes.
Rules kept for every value, so that nothing but a `ProtocolError` comes of bad bytes and no memory
is taken for what is not there:

* A size is checked against what is left before anything is read or kept.
* A list, map or array must end exactly where its size says. As each element takes a byte at
  least, a count above the bytes left is refused. Only an array of elements of no bytes (nulls,
  trues, zeros) may count more than it has bytes; a reader grants `_EMPTY_ELEMENTS` of those.
* Values nest to `MAX_DEPTH`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Final
from uuid import UUID

from sharding.errors import InvalidInput
from sharding.stream.errors import ProtocolError
from sharding.stream.messages.amqp_values import (
    AmqpValue,
    Described,
    Symbol,
    Timestamp,
    read_decimal,
    write_decimal,
)

MAX_DEPTH: Final = 32
_EMPTY_ELEMENTS: Final = 1024

_DESCRIBED: Final = 0x00
_EMPTY: Final[dict[int, AmqpValue]] = {
    0x40: None,
    0x41: True,
    0x42: False,
    0x43: 0,  # uint
    0x44: 0,  # ulong
    0x45: (),
}
_FIXED: Final[dict[int, struct.Struct]] = {
    0x50: struct.Struct(">B"),  # ubyte
    0x51: struct.Struct(">b"),  # byte
    0x52: struct.Struct(">B"),  # uint
    0x53: struct.Struct(">B"),  # ulong
    0x54: struct.Struct(">b"),  # int
    0x55: struct.Struct(">b"),  # long
    0x60: struct.Struct(">H"),  # ushort
    0x61: struct.Struct(">h"),  # short
    0x70: struct.Struct(">I"),  # uint
    0x71: struct.Struct(">i"),  # int
    0x72: struct.Struct(">f"),  # float
    0x80: struct.Struct(">Q"),  # ulong
    0x81: struct.Struct(">q"),  # long
    0x82: struct.Struct(">d"),  # double
}


def _boolean(data: bytes) -> bool:
    if data not in (b"\x00", b"\x01"):
        raise ProtocolError(f"a boolean is {data.hex()}")
    return data == b"\x01"


def _char(data: bytes) -> str:
    try:
        return data.decode("utf-32-be")
    except UnicodeDecodeError:
        raise ProtocolError(f"a char is the impossible code point {data.hex()}") from None


def _string(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ProtocolError("a string is not UTF-8") from None


def _symbol(data: bytes) -> Symbol:
    # ASCII by the standard; who sends UTF-8 is understood all the same.
    return Symbol(_string(data))


def _read_timestamp(data: bytes) -> Timestamp:
    return Timestamp(int.from_bytes(data, signed=True))


_SIZED: Final[dict[int, tuple[int, Callable[[bytes], AmqpValue]]]] = {
    0x56: (1, _boolean),
    0x73: (4, _char),
    0x74: (4, read_decimal),
    0x83: (8, _read_timestamp),
    0x84: (8, read_decimal),
    0x94: (16, read_decimal),
    0x98: (16, lambda data: UUID(bytes=data)),
}
_VARIABLE: Final[dict[int, Callable[[bytes], AmqpValue]]] = {
    0xA0: bytes,
    0xA1: _string,
    0xA3: _symbol,
    0xB0: bytes,
    0xB1: _string,
    0xB3: _symbol,
}
_SHORT: Final = {code: read for code, read in _VARIABLE.items() if code < 0xB0}
_LISTS: Final = (0xC0, 0xD0)
_MAPS: Final = (0xC1, 0xD1)
_ARRAYS: Final = (0xE0, 0xF0)
_COMPOUND: Final = frozenset((*_LISTS, *_MAPS, *_ARRAYS))


class AmqpReader:
    """Reads one value after the other; `position` is where the next one begins."""

    __slots__ = ("_data", "_empty_elements_left", "position")

    def __init__(self, data: bytes, position: int = 0) -> None:
        self._data = data
        self.position = position
        self._empty_elements_left = _EMPTY_ELEMENTS

    @property
    def at_end(self) -> bool:
        return self.position == len(self._data)

    def value(self, depth: int = 0) -> AmqpValue:
        """The next value."""
        data, position = self._data, self.position
        # Most values are short texts or bytes, and read here without another call: a message of
        # a dozen values is read in half the time.
        if position + 1 < len(data) and (convert := _SHORT.get(data[position])):
            end = position + 2 + data[position + 1]
            if end <= len(data):
                self.position = end
                return convert(data[position + 2 : end])
        constructor = self._byte()
        if constructor == _DESCRIBED:
            return self._described(depth)
        return self._value_of(constructor, depth)

    def descriptor(self) -> AmqpValue:
        """The name of the described value that begins here; the value itself is read next."""
        data, position = self._data, self.position
        if position + 2 < len(data) and data[position : position + 2] == b"\x00\x53":
            self.position = position + 3
            return data[position + 2]
        if self._byte() != _DESCRIBED:
            raise ProtocolError("a described value was expected")
        return self.value(1)

    def _described(self, depth: int) -> Described:
        if depth >= MAX_DEPTH:
            raise ProtocolError(f"values are nested deeper than {MAX_DEPTH}")
        return Described(_hashable(self.value(depth + 1)), self.value(depth + 1))

    def _value_of(self, constructor: int, depth: int) -> AmqpValue:
        if constructor in _EMPTY:
            return _EMPTY[constructor]
        if constructor in _COMPOUND:
            return self._compound(constructor, depth)
        if fixed := _FIXED.get(constructor):
            number: int | float = fixed.unpack(self._take(fixed.size))[0]
            return number
        if convert := _VARIABLE.get(constructor):
            return convert(self._take(self._size_of_width(constructor)))
        if sized := _SIZED.get(constructor):
            return sized[1](self._take(sized[0]))
        raise ProtocolError(f"a value has the unknown type {constructor:#04x}")

    def _compound(self, constructor: int, depth: int) -> AmqpValue:
        if depth >= MAX_DEPTH:
            raise ProtocolError(f"values are nested deeper than {MAX_DEPTH}")
        size = self._size_of_width(constructor)
        end = self.position + size
        if end > len(self._data):
            raise ProtocolError(f"{size} bytes were declared where fewer are left")
        count = self._size_of_width(constructor)
        value: AmqpValue
        if constructor in _ARRAYS:
            value = self._array(count, end, depth + 1)
        elif count > end - self.position:
            raise ProtocolError(f"{count} elements were declared where there are fewer bytes")
        elif constructor in _LISTS:
            value = tuple([self.value(depth + 1) for _ in range(count)])
        else:
            value = self._map(count, depth + 1)
        if self.position != end:
            raise ProtocolError("a list, map or array does not end where its size says")
        return value

    def _map(self, count: int, depth: int) -> dict[AmqpValue, AmqpValue]:
        if count % 2:
            raise ProtocolError("a map has a key without a value")
        return {_hashable(self.value(depth)): self.value(depth) for _ in range(count // 2)}

    def _array(self, count: int, end: int, depth: int) -> tuple[AmqpValue, ...]:
        constructor = self._byte()
        descriptors = []
        while constructor == _DESCRIBED:
            if depth >= MAX_DEPTH:
                raise ProtocolError(f"values are nested deeper than {MAX_DEPTH}")
            depth += 1
            descriptors.append(_hashable(self.value(depth)))
            constructor = self._byte()
        if constructor in _EMPTY:
            self._empty_elements_left -= count
            if self._empty_elements_left < 0:
                raise ProtocolError(f"more than {_EMPTY_ELEMENTS} array elements have no bytes")
        elif count > end - self.position:
            raise ProtocolError(f"{count} elements were declared where there are fewer bytes")
        values = [self._value_of(constructor, depth) for _ in range(count)]
        for descriptor in reversed(descriptors):
            values = [Described(descriptor, value) for value in values]
        return tuple(values)

    def _size_of_width(self, constructor: int) -> int:
        # The first digit of the constructor says how wide a size is: odd ones (B, D, F) 4 bytes.
        return int.from_bytes(self._take(4)) if constructor & 0x10 else self._byte()

    def _byte(self) -> int:
        if self.position >= len(self._data):
            raise ProtocolError("the bytes end within a value")
        self.position += 1
        return self._data[self.position - 1]

    def _take(self, size: int) -> bytes:
        start, end = self.position, self.position + size
        if end > len(self._data):
            raise ProtocolError(
                f"{size} bytes were declared where {len(self._data) - start} are left"
            )
        self.position = end
        return self._data[start:end]


def _hashable(value: AmqpValue) -> AmqpValue:
    """`value` as the key of a dict: a map, which can't be one, becomes a tuple of pairs."""
    if isinstance(value, dict):
        return tuple((key, _hashable(held)) for key, held in value.items())
    if isinstance(value, tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, Described):
        return Described(value.descriptor, _hashable(value.value))
    return value


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
            return write_value(_timestamp_of(value))
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


def _timestamp_of(value: datetime) -> Timestamp:
    if value.tzinfo is None:
        raise InvalidInput("value", "a datetime has to know its time zone", value)
    return Timestamp.of(value)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidInput("value", "text has to be writable as UTF-8", text) from None
