"""Values are written as the protocol says, and read back; what is cut or too long is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from sharding import InvalidInput
from sharding.stream.errors import ProtocolError
from sharding.stream.protocol import wire
from sharding.stream.protocol.constants import FIRST, LAST, NEXT, OffsetSpec
from sharding.stream.protocol.wire import Reader


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (wire.string("x", None), "ffff"),
        (wire.string("x", ""), "0000"),
        (wire.string("x", "é"), "0002 c3a9"),
        (wire.byte_array(b""), "00000000"),
        (wire.byte_array(b"ab"), "00000002 6162"),
        (wire.string_list("x", ["a", "b"]), "00000002 000161 000162"),
        (wire.string_map("x", {"a": "b"}), "00000001 000161 000162"),
        (wire.offset_spec(FIRST), "0001"),
        (wire.offset_spec(LAST), "0002"),
        (wire.offset_spec(NEXT), "0003"),
        (wire.offset_spec(OffsetSpec.at(2**64 - 1)), "0004 ffffffffffffffff"),
        (wire.offset_spec(OffsetSpec.since(-1)), "0005 ffffffffffffffff"),
    ],
)
def test_values_are_written_as_the_protocol_says(written: bytes, expected: str) -> None:
    assert written == bytes.fromhex(expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda: wire.string("stream", "x" * 32_768),
        lambda: wire.string("stream", "\ud800"),
        lambda: wire.reference("é" * 128),
        lambda: wire.unsigned("credit", 65_536, wire.U16),
        lambda: wire.unsigned("credit", -1, wire.U16),
        lambda: wire.offset_spec(OffsetSpec.at(-1)),
        lambda: wire.offset_spec(OffsetSpec.at(2**64)),
        lambda: wire.offset_spec(OffsetSpec.since(2**63)),
    ],
)
def test_what_does_not_fit_is_the_callers_error(write: Callable[[], bytes]) -> None:
    with pytest.raises(InvalidInput):
        write()


def test_a_reference_may_have_255_bytes_and_a_string_32767() -> None:
    assert wire.reference("x" * 255)[:2] == b"\x00\xff"
    assert wire.string("x", "x" * 32_767)[:2] == b"\x7f\xff"


READS: list[tuple[Callable[[Reader], object], bytes, object]] = [
    (Reader.u8, b"\xff", 255),
    (Reader.u16, b"\xff\xfe", 65_534),
    (Reader.u32, b"\xff\xff\xff\xff", 2**32 - 1),
    (Reader.u64, b"\xff" * 8, 2**64 - 1),
    (Reader.i64, b"\xff" * 8, -1),
    (Reader.string, b"\0\2\xc3\xa9", "é"),
    (Reader.text, b"\0\1a", "a"),
    (Reader.byte_array, b"\0\0\0\2ab", b"ab"),
    (Reader.string_map, bytes.fromhex("00000002 000161 000162 000163 ffff"), {"a": "b"}),
    (lambda reader: reader.list_of(reader.u16, 2), bytes.fromhex("00000002 0001 0002"), [1, 2]),
    (Reader.u64s, struct.pack(">I2Q", 2, 5, 6), (5, 6)),
    (Reader.numbers_with_codes, struct.pack(">IQHQH", 2, 5, 18, 6, 2), ((5, 18), (6, 2))),
]


@pytest.mark.parametrize(("read", "data", "expected"), READS)
def test_values_are_read_whole_and_nothing_after_them(
    read: Callable[[Reader], object], data: bytes, expected: object
) -> None:
    reader = Reader(data)
    assert read(reader) == expected
    reader.finish()


@pytest.mark.parametrize(("read", "data", "_"), READS)
def test_a_value_that_is_cut_anywhere_is_a_protocol_error(
    read: Callable[[Reader], object], data: bytes, _: object
) -> None:
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            read(Reader(data[:end]))


@pytest.mark.parametrize(
    ("read", "data"),
    [
        (Reader.string, "fffe"),  # -2 bytes
        (Reader.string, "0001 ff"),  # not UTF-8
        (Reader.text, "ffff"),  # null
        (Reader.byte_array, "fffffffe"),
        (Reader.byte_array, "7fffffff 00"),
        (Reader.string_map, "00000001 ffff 0000"),  # a null key
        (Reader.string_map, "ffffffff 0000 0000"),  # 4 billion pairs
        (Reader.u64s, "00000001 000000000000000000"),  # one byte more
        (Reader.numbers_with_codes, "ffffffff"),
    ],
)
def test_nonsense_is_a_protocol_error(read: Callable[[Reader], object], data: str) -> None:
    with pytest.raises(ProtocolError):
        read(Reader(bytes.fromhex(data)))


def test_null_byte_arrays_are_empty() -> None:
    assert Reader(b"\xff\xff\xff\xff").byte_array() == b""


def test_what_follows_the_content_is_refused() -> None:
    reader = Reader(b"\0\1")
    reader.u8()
    with pytest.raises(ProtocolError, match="1 bytes follow"):
        reader.finish()
