"""Finds where each message of many chunks begins and ends, without a Python object for any.

Entries can only be walked one after the other, as each says where the next begins, and a walk in
Python costs 130 ns a message. So the walk is guessed, and the guess proved:

* Where a chunk's data is a multiple of its first entry's size, all entries may have that size.
* Else all messages may begin with the same bytes as the first (AMQP 1.0 messages of one kind do).
  One search finds all places with these bytes, among them those that a body holds by chance.

A guess holds if the entries follow each other without a gap from the first byte to the last, and
through the first byte of each chunk at the right count: there is only one such row of entries. One
that does not hold costs a walk, never a wrong message. (The search costs 50 ns a message of 100
bytes.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sharding.stream.errors import ProtocolError
from sharding.stream.messages.chunk import BATCH_BIT, ChunkHeader, read_batch, unpack
from sharding.stream.protocol.constants import Limits

Integers: TypeAlias = npt.NDArray[np.int64]
Octets: TypeAlias = npt.NDArray[np.uint8]

PADDING = bytes(512)
"""Stands after the data, so that looking for a layout never looks past the end."""
ROW_BYTES = 128
"""What a message counts for at least where memory is bounded: a row of an empty one takes some."""
_MARKS_IN_VAIN = 16
_LENGTH = struct.Struct(">I")


class Run(NamedTuple):
    """Messages that follow each other, each after its length."""

    data: memoryview
    records: int
    first_offset: int
    timestamp_ms: int
    unopened: bool = False
    """A whole chunk, in which nobody has looked for batches: there may be some all the same."""

    @property
    def weight(self) -> int:
        return max(len(self.data), self.records * ROW_BYTES)


@dataclass(frozen=True, slots=True)
class Rows:
    """Where every message is in one buffer."""

    buffer: Octets
    starts: Integers
    sizes: Integers
    offsets: Integers
    timestamps: Integers

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def ends(self) -> Integers:
        return self.starts + self.sizes

    def where(self, kept: npt.NDArray[np.bool_]) -> Rows:
        return Rows(
            self.buffer,
            self.starts[kept],
            self.sizes[kept],
            self.offsets[kept],
            self.timestamps[kept],
        )


class Wanted(NamedTuple):
    """The offsets that are asked for."""

    first: int = 0
    end: int | None = None

    def meets(self, first: int, end: int) -> bool:
        return first < end and end > self.first and (self.end is None or first < self.end)


def whole(header: ChunkHeader, data: memoryview) -> Run:
    """A chunk as one run, if it holds no batches; `locate` finds out."""
    return Run(data, header.records, header.first_offset, header.timestamp_ms, unopened=True)


def split(chunk: Run, entries: int, wanted: Wanted, limits: Limits, stream: str) -> Iterator[Run]:
    """The runs of a whole chunk, some of whose entries are batches: as far as they are wanted, and
    each batch unpacked only when it is asked for."""
    data, timestamp = chunk.data, chunk.timestamp_ms
    position = plain_start = 0
    offset = plain_offset = chunk.first_offset

    def plain() -> Iterator[Run]:
        """The single messages since the last batch."""
        if wanted.meets(plain_offset, offset):
            records = offset - plain_offset
            yield Run(data[plain_start:position], records, plain_offset, timestamp)

    for _ in range(entries):
        if position + 4 > len(data):
            raise ProtocolError("a chunk holds fewer entries than its header says")
        (length,) = _LENGTH.unpack_from(data, position)
        if not length & BATCH_BIT:
            position += 4 + length
            offset += 1
            continue
        yield from plain()
        batch = read_batch(data, position)
        if wanted.meets(offset, offset + batch.records):
            content = unpack(batch, data, offset, limits, stream)
            yield Run(content, batch.records, offset, timestamp)
            del content  # not held while the next one is unpacked
        offset += batch.records
        plain_offset = offset
        position = plain_start = batch.end
    yield from plain()
    if position != len(data) or offset != chunk.first_offset + chunk.records:
        raise ProtocolError("a chunk holds other entries than its header says")


def cut(run: Run, most: int) -> Iterator[Run]:
    """A run that was opened, in pieces that weigh at most `most`, or hold one message."""
    if run.weight <= most:
        yield run
        return
    data, offset, timestamp = run.data, run.first_offset, run.timestamp_ms
    start = position = records = weight = 0
    for _ in range(run.records):
        if position + 4 > len(data):
            raise ProtocolError("a batch holds fewer messages than it says")
        size = 4 + _LENGTH.unpack_from(data, position)[0]
        if records and weight + max(size, ROW_BYTES) > most:
            yield Run(data[start:position], records, offset, timestamp)
            offset += records
            start, records, weight = position, 0, 0
        position += size
        records += 1
        weight += max(size, ROW_BYTES)
    # A copy, for a view would keep the whole content while the next one is unpacked.
    yield Run(memoryview(bytes(data[start:])), records, offset, timestamp)


def parts(runs: Iterable[Run], most: int) -> Iterator[list[Run]]:
    """Runs that weigh at most `most` together, or one that weighs more by itself.

    What came before a run that can't be read is not held back by it.
    """
    part: list[Run] = []
    weight = 0
    try:
        for run in runs:
            if part and weight + run.weight > most:
                yield part
                part, weight = [], 0
            part.append(run)
            weight += run.weight
            del run  # whoever gets the part lets go of it
    except ProtocolError:
        if part:
            yield part
        raise
    if part:
        yield part


def locate(runs: Sequence[Run]) -> Rows | None:
    """Every message of `runs`; None if they do not hold the messages that they should."""
    # A message takes four bytes at least: nothing is made for messages that can't be there.
    if any(run.records * 4 > len(run.data) for run in runs):
        return None
    buffer = np.frombuffer(b"".join([*[run.data for run in runs], PADDING]), np.uint8)
    counts = np.array([run.records for run in runs], np.int64)
    borders = np.zeros(len(runs) + 1, np.int64)
    np.cumsum([len(run.data) for run in runs], out=borders[1:])
    entries = _of_equal_sizes(runs, borders)
    if entries is None:
        entries = _by_mark(buffer, int(counts.sum()))
    found = None if entries is None else _proved(buffer, entries, counts, borders)
    if found is None:
        entries = _walked(runs, borders)
        found = None if entries is None else _proved(buffer, entries, counts, borders)
    if found is None:
        return None
    starts, sizes = found
    offsets = ranges([run.first_offset for run in runs], counts)
    timestamps = np.repeat(np.array([run.timestamp_ms for run in runs], np.int64), counts)
    return Rows(buffer, starts, sizes, offsets, timestamps)


def ranges(firsts: Sequence[int], counts: Sequence[int] | Integers) -> Integers:
    """Whole numbers in one row: from each of `firsts` as many as `counts` says, one by one."""
    lengths = np.asarray(counts, np.int64)
    before = np.cumsum(lengths) - lengths
    row = np.repeat(np.asarray(firsts, np.int64) - before, lengths)
    row += np.arange(len(row))
    return row


def _of_equal_sizes(runs: Sequence[Run], borders: Integers) -> Integers | None:
    parts = []
    for run, border in zip(runs, borders.tolist(), strict=False):
        if not run.records:
            continue
        size = _LENGTH.unpack_from(run.data)[0] + 4
        if size * run.records != len(run.data):
            return None
        parts.append(np.arange(border, border + len(run.data), size))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _by_mark(buffer: Octets, messages: int) -> Integers | None:
    if buffer[4] != 0x00 or buffer[5] != 0x53:
        return None  # the messages are not AMQP 1.0
    # Two bytes are compared at a time, so a mark at an even place shows as its first two bytes,
    # and one at an odd place as its second and third.
    pairs = buffer[: len(buffer) // 2 * 2].view(np.uint16)
    at_even, at_odd = buffer[4:6].view(np.uint16)[0], buffer[5:7].copy().view(np.uint16)[0]
    alike = (pairs == at_even) | (pairs == at_odd)
    if np.count_nonzero(alike) > _MARKS_IN_VAIN * messages:
        return None  # bodies full of them: a place takes more memory than the mark itself
    hits = np.flatnonzero(alike)
    marks = hits * 2 - (pairs[hits] == at_odd)
    marks = marks[(marks >= 4) & (marks < len(buffer) - len(PADDING))]
    # The last bit of the fourth byte's first digit says how wide the length after it is written.
    words = unaligned(buffer, "<u4")
    kind = np.uint32(0xEF_FF_FF_FF)
    same: npt.NDArray[np.bool_] = words[marks] & kind == words[4] & kind
    entries: Integers = marks[same] - 4
    return entries


def _walked(runs: Sequence[Run], borders: Integers) -> Integers | None:
    entries: list[int] = []
    append, length_at = entries.append, _LENGTH.unpack_from
    for run, border in zip(runs, borders.tolist(), strict=False):
        data, position = run.data, 0
        try:
            for _ in range(run.records):
                append(border + position)
                position += length_at(data, position)[0] + 4
        except struct.error:
            return None
    return np.array(entries, np.int64)


def _proved(
    buffer: Octets, entries: Integers, counts: Integers, borders: Integers
) -> tuple[Integers, Integers] | None:
    """Starts and sizes of the messages, if `entries` are all entries of all runs."""
    if len(entries) != counts.sum():
        return None
    sizes = unaligned(buffer, ">u4")[entries].astype(np.int64)
    starts = entries + 4
    ends = np.zeros(len(entries) + 1, np.int64)
    np.add(starts, sizes, out=ends[1:])
    follow = np.array_equal(ends[:-1], entries) and np.array_equal(
        ends[np.cumsum(counts)], borders[1:]
    )
    return (starts, sizes) if follow else None


def unaligned(buffer: Octets, kind: str) -> npt.NDArray[np.generic]:
    """The buffer as numbers of `kind` that begin at every byte."""
    dtype = np.dtype(kind)
    return np.ndarray((len(buffer) - dtype.itemsize + 1,), dtype, buffer, strides=(1,))


_SHORT_HEAD = struct.Struct(">I4sB")
_LONG_HEAD = struct.Struct(">I4sI")
_SMALL_MAX = 2**31 - 1


# The shortest way from chunks to a column of bodies: plain messages of one size per run.
#
# Such data is a table of fixed width, whose last columns are the bodies. They are copied from the
# chunks as they came from the socket into the column's memory, once, and nothing else is copied.


def table_of_bodies(run: Run) -> Octets | None:
    """A row of bytes for each body; None if these are not plain messages of one size."""
    records, data = run.records, run.data
    if not records or len(data) < _SHORT_HEAD.size:
        return None
    size = _LENGTH.unpack_from(data)[0] + 4
    if size * records != len(data):
        return None
    head = _head(size)
    if head is None or data[: len(head)] != head:
        return None
    heads = np.ndarray((records,), f"V{len(head)}", data, strides=(size,))
    if heads.tobytes() != head * records:  # faster than to compare arrays
        return None
    return np.frombuffer(data, np.uint8).reshape(records, size)[:, len(head) :]


def _head(size: int) -> bytes | None:
    """What stands before the body in an entry of `size` bytes."""
    body = size - _SHORT_HEAD.size
    if 0 <= body < 256:
        return _SHORT_HEAD.pack(size - 4, b"\x00\x53\x75\xa0", body)
    body = size - _LONG_HEAD.size
    return _LONG_HEAD.pack(size - 4, b"\x00\x53\x75\xb0", body) if body >= 0 else None


def bodies_of(tables: Sequence[Octets]) -> pa.Array:
    """The rows of all tables as one array."""
    counts = [len(table) for table in tables]
    widths = [table.shape[1] for table in tables]
    total = sum(table.size for table in tables)
    large = total > _SMALL_MAX
    offsets = np.zeros(sum(counts) + 1, np.int64 if large else np.int32)
    np.cumsum(np.repeat(widths, counts), out=offsets[1:])
    octets = np.empty(total, np.uint8)
    position = 0
    for table in tables:
        octets[position : position + table.size].reshape(table.shape)[:] = table
        position += table.size
    return pa.Array.from_buffers(
        pa.large_binary() if large else pa.binary(),
        len(offsets) - 1,
        [None, pa.py_buffer(offsets), pa.py_buffer(octets)],
    )
