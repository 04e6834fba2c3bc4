"""Builds the entries of Publish frames, many at a time, and cuts them to the size of a frame.

An entry is a publishing id and a message (`PROTOCOL.adoc`, Publish):

* simple: u64 id, u32 size, message;
* filtered, in version 2 of the frame: u64 id, u16 size and filter value, u32 size, message. No
  filter value is a size of −1;
* a sub-entry batch: u64 id, u8 `1 | compression:3 | 0:4`, u16 records, u32 size of the records,
  u32 size of what follows, then (u32 size, message)*, compressed as a whole.

One call packs a whole frame with `struct`, `map` and `join`: a Python step for each message would
cost more than all the rest of sending it. Nothing here reads a clock or touches a socket.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, repeat

from sharding.errors import InvalidInput
from sharding.stream.messages.codecs import Compression, compress
from sharding.stream.protocol.commands import PUBLISH_HEADER_SIZE

ENTRY_OVERHEAD = 12  # publishing id and size
DATA_OVERHEAD = 8  # the largest head of a data section: 3 bytes, constructor, u32 size
FILTER_OVERHEAD = 2  # the size of a filter value
SUB_ENTRY_OVERHEAD = 8 + 11  # publishing id and the head of a sub-entry batch
RECORD_OVERHEAD = 4  # the size of each message inside one
MAX_RECORDS = 0xFFFF
MAX_ENTRY_BYTES = 0x7FFF_FFFF
MAX_FILTER_BYTES = 255

# A data section: described type, small ulong 0x75, binary with a size of one byte or four.
_SHORT_START, _LONG_START = b"\x00Su\xa0", b"\x00Su\xb0"
_ENTRY = struct.Struct(">QI")
_SHORT_DATA = struct.Struct(">QI4sB")
_SHORT_RECORD = struct.Struct(">I4sB")
_LONG_DATA = struct.Struct(">QI4sI")
_SHORT_SECTION, _LONG_SECTION = 5, 8  # how many bytes stand before the body
_ID = struct.Struct(">Q")
_SIZE = struct.Struct(">I")
_FILTER_SIZE = struct.Struct(">h")
_SUB_ENTRY = struct.Struct(">QBHII")
_NO_FILTER = _FILTER_SIZE.pack(-1)

Entries = bytes | bytearray


def room_for_entries(frame_max: int) -> int:
    """How many bytes of entries a Publish frame may hold."""
    return frame_max - PUBLISH_HEADER_SIZE


def data_entries(bodies: Sequence[bytes], ids: Sequence[int]) -> Entries:
    """Simple entries, each body as the data section of an AMQP 1.0 message."""
    sizes = list(map(len, bodies))
    shortest, longest = min(sizes), max(sizes)
    if shortest == longest:
        return _alike(_data_head(ids[0], longest), bodies, ids)
    if longest < 256:
        sections = map(_SHORT_SECTION.__add__, sizes)
        heads: Iterator[bytes] = map(_SHORT_DATA.pack, ids, sections, repeat(_SHORT_START), sizes)
    else:
        heads = map(_data_head, ids, sizes)
    return b"".join(chain.from_iterable(zip(heads, bodies, strict=True)))


def message_entries(messages: Sequence[bytes], ids: Sequence[int]) -> Entries:
    """Simple entries of messages that are AMQP 1.0 already."""
    sizes = list(map(len, messages))
    if min(sizes) == max(sizes):
        return _alike(_ENTRY.pack(ids[0], sizes[0]), messages, ids)
    heads = map(_ENTRY.pack, ids, sizes)
    return b"".join(chain.from_iterable(zip(heads, messages, strict=True)))


def filtered_entries(
    messages: Sequence[bytes], ids: Sequence[int], filters: Sequence[bytes | None]
) -> bytes:
    """Entries of version 2; a message without a filter value is matched as unfiltered."""
    parts: list[bytes] = []
    for message, publishing_id, value in zip(messages, ids, filters, strict=True):
        parts += (
            _ID.pack(publishing_id),
            _NO_FILTER if value is None else _FILTER_SIZE.pack(len(value)) + value,
            _SIZE.pack(len(message)),
            message,
        )
    return b"".join(parts)


def data_records(bodies: Sequence[bytes]) -> bytes:
    """What a sub-entry batch holds of bodies: simple entries without ids."""
    sizes = list(map(len, bodies))
    shortest, longest = min(sizes), max(sizes)
    if shortest == longest:
        head = _data_head(0, longest)[_ID.size :]
        return head + head.join(bodies)
    if longest < 256:
        sections = map(_SHORT_SECTION.__add__, sizes)
        heads: Iterator[bytes] = map(_SHORT_RECORD.pack, sections, repeat(_SHORT_START), sizes)
    else:
        heads = (_data_head(0, size)[_ID.size :] for size in sizes)
    return b"".join(chain.from_iterable(zip(heads, bodies, strict=True)))


def message_records(messages: Sequence[bytes]) -> bytes:
    """The same of messages that are AMQP 1.0 already."""
    sizes = map(_SIZE.pack, map(len, messages))
    return b"".join(chain.from_iterable(zip(sizes, messages, strict=True)))


def sub_entry(records: bytes, count: int, publishing_id: int, compression: Compression) -> bytes:
    """One entry that holds `count` messages; what does not shrink is sent as it is."""
    packed = compress(compression, records)
    if len(packed) >= len(records):
        packed, compression = records, Compression.NONE
    head = _SUB_ENTRY.pack(publishing_id, 0x80 | compression << 4, count, len(records), len(packed))
    return head + packed


def cut(sizes: Sequence[int], room: int) -> list[range]:
    """The positions that go together, in order: as many as fit into `room` each time.

    One that is larger than `room` stands alone.

    >>> cut([3, 3, 3, 9, 1], 6)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    ends = list(accumulate(sizes))
    parts = []
    start = before = 0
    while start < len(ends):
        stop = max(start + 1, bisect_right(ends, before + room, start))
        parts.append(range(start, stop))
        start, before = stop, ends[stop - 1]
    return parts


def groups(sizes: Sequence[int], most: int, room: int, plain: bool) -> list[range]:
    """The positions of the messages of each sub-entry batch: `most` at once, in `room` bytes.

    >>> groups([1, 1, 1, 1, 1], 2, 100, plain=False)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    overhead = RECORD_OVERHEAD + (DATA_OVERHEAD if plain else 0)
    fitting = cut(list(map(overhead.__add__, sizes)), room - SUB_ENTRY_OVERHEAD)
    return [
        range(start, min(start + most, part.stop))
        for part in fitting
        for start in range(part.start, part.stop, most)
    ]


def filter_bytes(value: str | None) -> bytes | None:
    """A filter value as it is written."""
    if value is None:
        return None
    encoded = value.encode()
    if len(encoded) > MAX_FILTER_BYTES:
        raise InvalidInput("filter_value", f"may have {MAX_FILTER_BYTES} bytes at most", value)
    return encoded


def _alike(head: bytes, units: Sequence[bytes], ids: Sequence[int]) -> bytearray:
    """Entries of one size: `head`, which holds the first id, before each, then the ids put in.

    The entries lie at equal steps, so the same byte of all ids is written by one slice, and only
    the bytes in which the ids differ are written at all. Half the time of packing each head.
    """
    entries = bytearray(head + head.join(units))
    step = len(head) + len(units[0])
    packed = struct.pack(f">{len(units)}Q", *ids)
    differing = ids[0] ^ ids[-1]
    for place in range(7, 7 - (differing.bit_length() + 7) // 8, -1):
        entries[place::step] = packed[place::8]
    return entries


def _data_head(publishing_id: int, size: int) -> bytes:
    if size < 256:
        return _SHORT_DATA.pack(publishing_id, size + _SHORT_SECTION, _SHORT_START, size)
    return _LONG_DATA.pack(publishing_id, size + _LONG_SECTION, _LONG_START, size)
