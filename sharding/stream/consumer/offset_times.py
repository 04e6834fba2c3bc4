"""Where in a stream a moment lies."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from sharding.errors import Unreachable
from sharding.stream.connections.access import Access
from sharding.stream.consumer.consumer import Consumer
from sharding.stream.consumer.probe import leader_ends
from sharding.stream.consumer.ranges import read_range
from sharding.stream.options import ConsumerOptions, offset_spec

if TYPE_CHECKING:
    import pyarrow as pa


def offset_at(access: Access, stream: str, time: datetime, timeout: float) -> int | None:
    """The first offset that was stored at that time or later; None if nothing was."""
    wanted = offset_spec(time)
    ends = leader_ends(access, stream, timeout)
    if ends is None:
        return None
    last_chunk = read_range(access, stream, ends.last_chunk, ends.last + 1, timeout=timeout)
    if _time_of(next(last_chunk)) < wanted.value:
        return None
    # So it can't wait for ever: there is a chunk that late.
    with Consumer((stream,), access, ConsumerOptions(offset=wanted, credits=2)) as consumer:
        batch = next(consumer.batches(timeout), None)
    if batch is None:
        raise Unreachable(f"no message of {stream!r} came in time, though it is stored")
    return int(batch.column("offset")[0].as_py())


def _time_of(batch: pa.RecordBatch) -> int:
    """In milliseconds since 1970."""
    return int(batch.column("timestamp")[0].value)
