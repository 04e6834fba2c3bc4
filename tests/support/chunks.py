"""Chunks as a broker would deliver them, made by hand."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from sharding.stream.messages.codecs import Compression, compress

TIMESTAMP_MS = 1_700_000_000_123
HEADER = struct.Struct(">BBHIqQQIIII")


@dataclass(frozen=True)
class SubBatch:
    """Messages that are published as one entry."""

    messages: Sequence[bytes]
    codec: Compression = Compression.NONE


def with_length(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def sub_batch_entry(
    batch: SubBatch, *, records: int | None = None, uncompressed_length: int | None = None
) -> bytes:
    content = b"".join(map(with_length, batch.messages))
    compressed = compress(batch.codec, content)
    head = struct.pack(
        ">BHII",
        0x80 | batch.codec << 4,
        len(batch.messages) if records is None else records,
        len(content) if uncompressed_length is None else uncompressed_length,
        len(compressed),
    )
    return head + compressed


def chunk(entries: Sequence[bytes | SubBatch], first_offset: int = 0) -> memoryview:
    """A chunk of messages and batches of messages."""
    data = b"".join(
        sub_batch_entry(entry) if isinstance(entry, SubBatch) else with_length(entry)
        for entry in entries
    )
    records = sum(len(entry.messages) if isinstance(entry, SubBatch) else 1 for entry in entries)
    return chunk_of(data, len(entries), records, first_offset)


def chunk_of(
    data: bytes,
    entries: int,
    records: int,
    first_offset: int = 0,
    *,
    magic: int = 0x50,
    kind: int = 0,
    timestamp_ms: int = TIMESTAMP_MS,
    crc: int | None = None,
    data_length: int | None = None,
) -> memoryview:
    """A chunk whose header says what it is told to say."""
    return memoryview(
        HEADER.pack(
            magic,
            kind,
            entries,
            records,
            timestamp_ms,
            1,
            first_offset,
            zlib.crc32(data) if crc is None else crc,
            len(data) if data_length is None else data_length,
            7,  # of a trailer that is not delivered
            16 << 24,  # of a bloom filter that is not delivered
        )
        + data
    )
