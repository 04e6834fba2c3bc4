"""The shortest way from chunks to a column of bodies: plain messages of one size per run.

Such data is a table of fixed width, whose last columns are the bodies. They are copied from the
chunks as they came from the socket into the column's memory, once, and nothing else is copied.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from sharding.stream.formats.arrow_rows import Octets, Run

_SHORT_HEAD = struct.Struct(">I4sB")
_LONG_HEAD = struct.Struct(">I4sI")
_LENGTH = struct.Struct(">I")
_SMALL_MAX = 2**31 - 1


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
