"""A chunk taken apart: its header, its entries, and the batches inside entries.

A chunk is what a broker delivers: 48 bytes of header, then entries. An entry is a message (a
length of 31 bits, then the message) or, if its first bit is set, a batch of messages that was
published as one entry, maybe compressed. Every message has an offset of its own; they count up
from the chunk's first offset.

Nothing here is trusted: every length is checked against what is left, and the numbers of entries
and messages against the header, so that data that does not add up is a `ProtocolError`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from sharding.stream.errors import ProtocolError
from sharding.stream.messages.codecs import Compression, decompress
from sharding.stream.protocol.constants import Limits

HEADER_SIZE = 48
# magic and version, type, entries, records, timestamp, epoch, first offset, CRC, data length,
# trailer length, bloom size with 3 reserved bytes. Bloom filter and trailer are not delivered.
_HEADER = struct.Struct(">BBHIqQQIIII")
_MAGIC = 0x50
_USER_DATA = 0
MAX_OFFSET = 2**63 - 1  # offsets are signed wherever they go from here: Arrow, Spark
MAX_TIMESTAMP_MS = 253_402_300_799_999  # the last one that a datetime can hold

_LENGTH = struct.Struct(">I")
_BATCH = struct.Struct(">BHII")  # first bit 1 and compression, records, uncompressed length, length
BATCH_BIT = 0x8000_0000
_COMPRESSIONS = {int(each): each for each in Compression}


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    entries: int
    records: int
    timestamp_ms: int
    epoch: int
    first_offset: int
    crc: int
    data_length: int

    @property
    def end_offset(self) -> int:
        """The offset after the chunk's last message."""
        return self.first_offset + self.records

    @property
    def timestamp(self) -> datetime:
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)


class Batch(NamedTuple):
    """The head of an entry that holds several messages."""

    compression: Compression
    records: int
    uncompressed_length: int
    start: int
    end: int


def parse_header(chunk: memoryview) -> ChunkHeader:
    """The header of a whole chunk, whose data is all that follows."""
    if len(chunk) < HEADER_SIZE:
        raise ProtocolError(f"a chunk of {len(chunk)} bytes has no whole header")
    (
        magic,
        kind,
        entries,
        records,
        timestamp_ms,
        epoch,
        first_offset,
        crc,
        data_length,
        _trailer,
        _bloom,
    ) = _HEADER.unpack_from(chunk)
    if magic != _MAGIC:
        raise ProtocolError(f"a chunk begins with {magic:#04x} instead of {_MAGIC:#04x}")
    if kind != _USER_DATA:
        raise ProtocolError(f"a chunk of type {kind} was delivered; only type 0 holds messages")
    if data_length != len(chunk) - HEADER_SIZE:
        raise ProtocolError(
            f"a chunk declares {data_length} bytes of data and has {len(chunk) - HEADER_SIZE}"
        )
    if first_offset + records > MAX_OFFSET:
        raise ProtocolError(f"a chunk begins at the impossible offset {first_offset}")
    if not 0 <= timestamp_ms <= MAX_TIMESTAMP_MS:
        raise ProtocolError(f"a chunk has the impossible timestamp {timestamp_ms}")
    return ChunkHeader(entries, records, timestamp_ms, epoch, first_offset, crc, data_length)


def check_crc(header: ChunkHeader, data: memoryview) -> None:
    """Raises if `data`, which follows the header, is not what the broker stored."""
    if zlib.crc32(data) != header.crc:
        raise ProtocolError(f"the CRC of the chunk at offset {header.first_offset} is wrong")


def messages(
    chunk: memoryview, limits: Limits, first: int = 0, stream: str = ""
) -> Iterator[tuple[int, memoryview]]:
    """The messages of a chunk from offset `first` on as they were published, each with its offset.

    One batch is unpacked at a time, so that no more than its content is held; one that ends before
    `first` is passed over unopened. `stream` is for errors.
    """
    header = parse_header(chunk)
    data = chunk[HEADER_SIZE:]
    offset, position = header.first_offset, 0
    for _ in range(header.entries):
        if position + 4 > len(data):
            raise ProtocolError("a chunk holds fewer entries than its header says")
        (length,) = _LENGTH.unpack_from(data, position)
        if length & BATCH_BIT:
            batch = read_batch(data, position)
            if batch.records and offset + batch.records > first:
                content = unpack(batch, data, offset, limits, stream)
                for number, message in enumerate(batch_messages(content, batch.records), offset):
                    if number >= first:
                        yield number, message
            offset += batch.records
            position = batch.end
        else:
            position += 4
            if length > len(data) - position:
                raise ProtocolError("a message ends after the chunk that holds it")
            if offset >= first:
                yield offset, data[position : position + length]
            position += length
            offset += 1
    if position != len(data) or offset != header.end_offset:
        raise ProtocolError("a chunk holds other entries than its header says")


def read_batch(data: memoryview, position: int) -> Batch:
    """The head of the batch at `position`, checked against what is left."""
    if position + _BATCH.size > len(data):
        raise ProtocolError("a batch of messages ends within its head")
    first, records, uncompressed_length, length = _BATCH.unpack_from(data, position)
    compression = _COMPRESSIONS.get(first >> 4 & 0b111)
    if compression is None:
        raise ProtocolError(f"a batch has the unknown compression {first >> 4 & 0b111}")
    start = position + _BATCH.size
    if length > len(data) - start:
        raise ProtocolError("a batch of messages ends after the chunk that holds it")
    return Batch(compression, records, uncompressed_length, start, start + length)


def unpack(batch: Batch, data: memoryview, offset: int, limits: Limits, stream: str) -> memoryview:
    """What a batch holds, decompressed; `offset` is its first message's."""
    compressed = data[batch.start : batch.end]
    try:
        return memoryview(
            decompress(batch.compression, compressed, batch.uncompressed_length, limits)
        )
    except ProtocolError as error:
        last = offset + batch.records - 1
        raise ProtocolError(f"{stream!r}, offsets {offset} to {last}: {error}") from error


def batch_messages(content: memoryview, records: int) -> Iterator[memoryview]:
    """The messages of an unpacked batch, of which there have to be `records`."""
    position = 0
    for _ in range(records):
        if position + 4 > len(content):
            raise ProtocolError("a batch holds fewer messages than it says")
        (length,) = _LENGTH.unpack_from(content, position)
        position += 4
        if length > len(content) - position:
            raise ProtocolError("a message ends after the batch that holds it")
        yield content[position : position + length]
        position += length
    if position != len(content):
        raise ProtocolError("a batch holds more messages than it says")
