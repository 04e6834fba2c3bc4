"""Chunks are taken apart whole, and only if they add up."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sharding.stream.errors import ProtocolError
from sharding.stream.messages.chunk import HEADER_SIZE, check_crc, messages, parse_header
from sharding.stream.messages.codecs import Compression
from sharding.stream.protocol.constants import Limits
from tests.support.chunks import SubBatch, chunk, chunk_of, sub_batch_entry, with_length

LIMITS = Limits()


def read(octets: memoryview, limits: Limits = LIMITS) -> list[tuple[int, bytes]]:
    return [(offset, bytes(raw)) for offset, raw in messages(octets, limits)]


def test_header_is_read() -> None:
    header = parse_header(chunk_of(b"abc", 2, 5, 77, timestamp_ms=1_000, crc=9))
    assert (header.entries, header.records, header.first_offset) == (2, 5, 77)
    assert (header.timestamp_ms, header.epoch, header.crc, header.data_length) == (1_000, 1, 9, 3)
    assert header.end_offset == 82
    assert header.timestamp == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)


def test_every_message_has_its_own_offset_those_in_batches_too() -> None:
    entries: list[bytes | SubBatch] = [
        b"a",
        SubBatch([b"b", b"", b"d"]),
        b"e",
        SubBatch([b"f"], Compression.GZIP),
    ]
    expected = [b"a", b"b", b"", b"d", b"e", b"f"]
    assert read(chunk(entries, 10)) == list(enumerate(expected, 10))


def test_a_chunk_may_be_empty() -> None:
    assert read(chunk([])) == []


@pytest.mark.parametrize("codec", Compression)
def test_batches_of_every_codec_are_unpacked(codec: Compression) -> None:
    bodies = [b"message %d" % number for number in range(500)]
    assert read(chunk([SubBatch(bodies, codec)])) == list(enumerate(bodies))


def test_the_crc_is_that_of_the_data() -> None:
    whole = chunk([b"abc"])
    header = parse_header(whole)
    check_crc(header, whole[HEADER_SIZE:])
    with pytest.raises(ProtocolError, match="CRC"):
        check_crc(header, memoryview(bytes(7)))


ENTRY = with_length(b"abc")
BATCH = sub_batch_entry(SubBatch([b"abc", b"de"]))
CONTENT_LENGTH = 4 + 3 + 4 + 2


@pytest.mark.parametrize(
    ("octets", "why"),
    [
        (memoryview(bytes(47)), "no whole header"),
        (chunk_of(ENTRY, 1, 1, magic=0x51), "0x51"),
        (chunk_of(ENTRY, 1, 1, kind=1), "type 1"),
        (chunk_of(ENTRY, 1, 1, data_length=6), "declares 6 bytes"),
        (chunk_of(ENTRY, 1, 1, data_length=2**32 - 1), "declares"),
        (chunk_of(ENTRY, 1, 1, 2**63 - 1), "impossible offset"),
        (chunk_of(ENTRY, 1, 1, timestamp_ms=-1), "impossible timestamp"),
        (chunk_of(ENTRY, 1, 1, timestamp_ms=2**62), "impossible timestamp"),
        (chunk_of(ENTRY, 2, 2), "fewer entries"),
        (chunk_of(ENTRY + ENTRY, 1, 1), "other entries"),
        (chunk_of(ENTRY, 1, 2), "other entries"),
        (chunk_of(ENTRY + b"\0\0\0", 1, 1), "other entries"),
        (chunk_of(ENTRY[:-1], 1, 1), "ends after the chunk"),
        (chunk_of(b"\x7f\xff\xff\xff", 1, 1), "ends after the chunk"),
        (chunk_of(b"\x00\x00\x00", 1, 1), "fewer entries"),
        (chunk_of(BATCH[:10], 1, 2), "within its head"),
        (chunk_of(BATCH[:-1], 1, 2), "ends after the chunk"),
        (chunk_of(b"\xd0" + BATCH[1:], 1, 2), "unknown compression 5"),
        (chunk_of(BATCH, 1, 3), "other entries"),
        (
            chunk_of(sub_batch_entry(SubBatch([b"abc", b"de"]), records=3), 1, 3),
            "fewer messages",
        ),
        (
            chunk_of(sub_batch_entry(SubBatch([b"abc", b"de"]), records=1), 1, 1),
            "more messages",
        ),
        (
            chunk_of(
                sub_batch_entry(SubBatch([b"abc", b"de"]), uncompressed_length=CONTENT_LENGTH - 1),
                1,
                2,
            ),
            "declares 12 bytes",
        ),
        (
            chunk_of(b"\x80\x00\x01\x00\x00\x00\x05\x00\x00\x00\x05\x00\x00\x00\x02a", 1, 1),
            "ends after the batch",
        ),
    ],
)
def test_what_does_not_add_up_is_refused(octets: memoryview, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        read(octets)


def test_every_cut_of_a_chunk_is_refused() -> None:
    whole = chunk([b"abc", SubBatch([b"d"] * 9, Compression.ZSTD)])
    for size in range(len(whole)):
        with pytest.raises(ProtocolError):
            read(whole[:size])
        if size >= HEADER_SIZE:
            with pytest.raises(ProtocolError):
                read(chunk_of(bytes(whole[HEADER_SIZE:size]), 2, 10))
