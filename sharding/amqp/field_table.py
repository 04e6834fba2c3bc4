"""AMQP 0-9-1 field tables as bytes: read for people, taken apart and put together without decoding.

A table is names and values, one after the other; a value is a letter for its type and what the type
wants. The types are RabbitMQ's (`rabbit_binary_parser`, 3.10 to 4.3), which differ from the
specification's: it knows no `U`, and both `l` and `L` are signed. A broker stores nothing that it
can't read itself, so every table that it delivers can be taken apart here.

Not all of it can be shown as a value of Python's. Reading never fails for that; what is shown
instead stands in the table of `docs/groups.md`. Whoever passes a table on uses its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

MAX_DEPTH = 32
"""A table within 131 kB may be nested 26,000 times, and Python's own stack ends at 1,000."""


class Malformed(ValueError):
    """Bytes that are no table, or no properties; no broker delivers such."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a table as it stands there, `value` with the letter of its type."""

    name: bytes
    value: bytes

    @property
    def encoded(self) -> bytes:
        return bytes([len(self.name)]) + self.name + self.value


def fields(table: bytes) -> list[Field]:
    """The fields of a table (without its own size); their `encoded` joined are the table."""
    return [Field(name, value) for name, value in _named_values(table)]


def long_string(text: bytes) -> bytes:
    """Text as a field's value."""
    return b"S" + struct.pack(">I", len(text)) + text


def whole_number(number: int) -> bytes:
    return b"I" + struct.pack(">i", number)


def read_name(name: bytes) -> str:
    """A name or a routing key as text from which its bytes can be had again: see `write_name`."""
    return name.decode("utf-8", "surrogateescape")


def write_name(name: str) -> bytes:
    """The bytes of a name; text that is nobody's name, such as half an emoji, is written out."""
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return name.encode("utf-8", "backslashreplace")


def read_text(text: bytes) -> str | bytes:
    """Text, or its bytes where it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


def read_table(table: bytes, depth: int = 0) -> dict[str, Any]:
    """A table as a dict. A name that is there twice has its last value."""
    return {
        name.decode("utf-8", "surrogateescape"): _read_value(value, depth)
        for name, value in _named_values(table)
    }


def _read_value(value: bytes, depth: int) -> Any:
    read = _READ.get(value[0])
    if read is not None:
        return read(value)
    if depth >= MAX_DEPTH:
        return value
    if value[:1] == b"F":
        return read_table(value[5:], depth + 1)
    return [_read_value(each, depth + 1) for each in _values(value[5:])]


def _named_values(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    offset = 0
    while offset < len(table):
        start = offset + 1 + table[offset]
        end = _end_of_value(table, start)
        yield table[offset + 1 : start], table[start:end]
        offset = end


def _values(array: bytes) -> Iterator[bytes]:
    offset = 0
    while offset < len(array):
        end = _end_of_value(array, offset)
        yield array[offset:end]
        offset = end


def _unpacked(layout: str) -> Callable[[bytes], Any]:
    unpack = struct.Struct(f">x{layout}").unpack
    return lambda value: unpack(value)[0]


def _read_time(value: bytes) -> datetime | int:
    seconds: int = struct.unpack(">xQ", value)[0]
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return seconds


def _read_decimal(value: bytes) -> Decimal:
    """Signed, as Java and pika have it; made of its digits, so that no context rounds it."""
    scale, number = struct.unpack(">xBi", value)
    return Decimal((number < 0, tuple(map(int, str(abs(number)))), -scale))


_READ: dict[int, Callable[[bytes], Any]] = {
    ord("t"): _unpacked("?"),
    ord("b"): _unpacked("b"),
    ord("B"): _unpacked("B"),
    ord("s"): _unpacked("h"),
    ord("u"): _unpacked("H"),
    ord("I"): _unpacked("i"),
    ord("i"): _unpacked("I"),
    ord("l"): _unpacked("q"),
    ord("L"): _unpacked("q"),
    ord("f"): _unpacked("f"),
    ord("d"): _unpacked("d"),
    ord("D"): _read_decimal,
    ord("T"): _read_time,
    ord("S"): lambda value: read_text(value[5:]),
    ord("x"): lambda value: value[5:],
    ord("V"): lambda _: None,
}
"""By the letter of the type, all but the two that nest; each gets a value with its letter."""
_SIZES = {
    **dict.fromkeys(b"V", 0),
    **dict.fromkeys(b"tbB", 1),
    **dict.fromkeys(b"su", 2),
    **dict.fromkeys(b"Iif", 4),
    **dict.fromkeys(b"D", 5),
    **dict.fromkeys(b"lLdT", 8),
}
"""What follows the letter of a type; the others (S, x, F, A) say their size in four bytes."""
_SIZED = b"SxFA"


def _end_of_value(data: bytes, offset: int) -> int:
    """Where the value at `offset` ends. What is nested in it is not looked into."""
    if offset >= len(data):
        raise Malformed("a field without a value")
    letter = data[offset]
    size = _SIZES.get(letter)
    if size is None:
        if letter not in _SIZED:
            raise Malformed(f"no type of a field is called {chr(letter)!r}")
        if len(data) < offset + 5:
            raise Malformed("a value without its size")
        size = 4 + int(struct.unpack_from(">I", data, offset + 1)[0])
    end = offset + 1 + size
    if end > len(data):
        raise Malformed("a value that ends behind its table")
    return end
