"""The protocol's types as bytes: numbers, strings, lists and maps, written and read.

Big-endian. A string has an i16 length before it (-1 is null), a byte array an i32 length, a list a
u32 count. What is written is checked here, so that a value that does not fit is the caller's error;
what is read may be anything, and gives nothing but `ProtocolError`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from sharding.errors import InvalidInput
from sharding.stream.errors import ProtocolError
from sharding.stream.protocol.constants import MAX_REFERENCE_BYTES, OffsetSpec, OffsetType

T = TypeVar("T")

U8, U16, U32, U64 = (struct.Struct(f">{letter}") for letter in "BHIQ")
I16, I32, I64 = (struct.Struct(f">{letter}") for letter in "hiq")
FRAME_HEADER = struct.Struct(">IHH")
"""Size of what follows, key, version."""
_NUMBER_WITH_CODE = struct.Struct(">QH")

MAX_STRING_BYTES = 0x7FFF
NULL_STRING = b"\xff\xff"


def string(field: str, value: str | None) -> bytes:
    """A string or null; `field` is what an error calls it."""
    if value is None:
        return NULL_STRING
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(field, "must be text that UTF-8 can hold", value) from None
    if len(encoded) > MAX_STRING_BYTES:
        raise InvalidInput(field, f"must be at most {MAX_STRING_BYTES} bytes", value)
    return I16.pack(len(encoded)) + encoded


def reference(value: str | None) -> bytes:
    """The name of a producer or consumer."""
    encoded = string("reference", value)
    if len(encoded) > MAX_REFERENCE_BYTES + I16.size:
        raise InvalidInput("reference", f"must be at most {MAX_REFERENCE_BYTES} bytes", value)
    return encoded


def byte_array(value: bytes) -> bytes:
    return I32.pack(len(value)) + value


def string_list(field: str, values: Iterable[str]) -> bytes:
    encoded = [string(field, value) for value in values]
    return U32.pack(len(encoded)) + b"".join(encoded)


def string_map(field: str, values: Mapping[str, str]) -> bytes:
    pairs = (string(field, key) + string(field, value) for key, value in values.items())
    return U32.pack(len(values)) + b"".join(pairs)


def unsigned(field: str, value: int, form: struct.Struct) -> bytes:
    try:
        return form.pack(value)
    except struct.error:
        top = (1 << form.size * 8) - 1
        raise InvalidInput(field, f"must be a whole number from 0 to {top}", value) from None


def offset_spec(offset: OffsetSpec) -> bytes:
    kind = U16.pack(offset.kind)
    match offset.kind:
        case OffsetType.OFFSET:
            return kind + unsigned("offset", offset.value, U64)
        case OffsetType.TIMESTAMP:
            try:
                return kind + I64.pack(offset.value)
            except struct.error:
                raise InvalidInput("timestamp", "must fit in 64 bits", offset.value) from None
        case _:
            return kind


class Reader:
    """Takes values from the front of a frame's content, and never goes past its end."""

    __slots__ = ("_at", "_data", "_end")

    def __init__(self, data: bytes | bytearray | memoryview, at: int = 0) -> None:
        self._data = memoryview(data)
        self._at = at
        self._end = len(self._data)

    @property
    def left(self) -> int:
        return self._end - self._at

    def _number(self, form: struct.Struct) -> int:
        at = self._at
        self._at = at + form.size
        if self._at > self._end:
            raise ProtocolError(
                f"a frame ends {self._at - self._end} bytes before its content does"
            )
        number: int = form.unpack_from(self._data, at)[0]
        return number

    def u8(self) -> int:
        return self._number(U8)

    def u16(self) -> int:
        return self._number(U16)

    def u32(self) -> int:
        return self._number(U32)

    def u64(self) -> int:
        return self._number(U64)

    def i64(self) -> int:
        return self._number(I64)

    def _take(self, length: int) -> bytes:
        if length > self.left:
            raise ProtocolError(f"a value of {length} bytes is declared where {self.left} are left")
        taken = bytes(self._data[self._at : self._at + length])
        self._at += length
        return taken

    def string(self) -> str | None:
        length = self._number(I16)
        if length == -1:
            return None
        if length < 0:
            raise ProtocolError(f"a string of {length} bytes is declared")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise ProtocolError("a string is not UTF-8") from None

    def text(self) -> str:
        """A string that must not be null."""
        value = self.string()
        if value is None:
            raise ProtocolError("a string is null that must not be")
        return value

    def byte_array(self) -> bytes:
        """Null is read as empty."""
        length = self._number(I32)
        if length < -1:
            raise ProtocolError(f"a byte array of {length} bytes is declared")
        return self._take(max(length, 0))

    def list_of(self, item: Callable[[], T], smallest: int) -> list[T]:
        """A counted list whose items have at least `smallest` bytes each."""
        count = self.u32()
        if count * smallest > self.left:
            raise ProtocolError(f"{count} items are declared where {self.left} bytes are left")
        return [item() for _ in range(count)]

    def string_map(self) -> dict[str, str]:
        """Null values are left out."""
        pairs = self.list_of(lambda: (self.text(), self.string()), 2 * I16.size)
        return {key: value for key, value in pairs if value is not None}

    def u64s(self) -> tuple[int, ...]:
        """A counted array of numbers that fills the rest of the frame, read in one call."""
        rest = self._counted_rest(U64.size)
        return struct.unpack(f">{len(rest) // U64.size}Q", rest)

    def numbers_with_codes(self) -> tuple[tuple[int, int], ...]:
        """The same for pairs of u64 and u16."""
        return tuple(_NUMBER_WITH_CODE.iter_unpack(self._counted_rest(_NUMBER_WITH_CODE.size)))

    def _counted_rest(self, size: int) -> memoryview:
        count = self.u32()
        if count * size != self.left:
            raise ProtocolError(f"{count} items of {size} bytes are declared in {self.left} bytes")
        at, self._at = self._at, self._end
        return self._data[at:]

    def finish(self) -> None:
        """Nothing may be left: what we do not understand, we do not guess at."""
        if self.left:
            raise ProtocolError(f"{self.left} bytes follow the content of a frame")
