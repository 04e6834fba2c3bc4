"""A range of a stream from which the broker leaves out chunks, by the filter values in them.

Of chunks that are left out nothing is heard, so nobody says that the end of the range was passed.
Therefore the range is read in rounds: subscribe where the last round ended, ask for the stream's
metadata, and take what came before that answer. A broker sends the chunks it has, as far as its
credit goes, before it answers the next request. A round without a chunk is thus the end of what
the node holds; that it holds the whole range is made sure of before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from sharding.errors import Unreachable, WarrenError
from sharding.stream.consuming.consumer_options import ConsumerOptions
from sharding.stream.consuming.data_loss import is_lost
from sharding.stream.consuming.probe import Ends, first_and_last, leader_ends
from sharding.stream.consuming.starting import check_abilities
from sharding.stream.errors import DataLost
from sharding.stream.formats.chunk import parse_header
from sharding.stream.formats.columns import Columns
from sharding.stream.frames.requests import Metadata, Subscribe, Unsubscribe
from sharding.stream.network.access import Access
from sharding.stream.network.placement import consumer_candidates
from sharding.stream.protocol import NEXT, OffsetSpec
from spark.filters import ChunkFilter
from spark.partitions import StreamRange

if TYPE_CHECKING:
    import pyarrow as pa

    from sharding.stream.network.client import StreamClient

_CHUNKS_PER_ROUND = 32
_TIMEOUT = 60.0
"""For a replica to catch up with the range, and for each answer."""
_TRY_AGAIN = 0.2


def read_filtered(
    access: Access,
    found: StreamRange,
    chunk_filter: ChunkFilter,
    columns: Columns,
    *,
    fail_on_data_loss: bool,
) -> Iterator[tuple[pa.RecordBatch, str]]:
    """The rows of the chunks that pass the filter, and the node that they came from.

    A connection that is lost fails the reading; Spark runs the task again.
    """
    from sharding.stream.formats.arrow import BatchReader

    options = ConsumerOptions(
        filter_values=chunk_filter.values, match_unfiltered=chunk_filter.match_unfiltered
    )
    reader = BatchReader(found.stream, columns, access.limits)
    with _subscriber(access, found.stream) as (client, number, chunks):
        check_abilities(client, options)
        ends = _whole_range(access, client, found)
        if ends is None:
            return
        gap = (found.first, ends.first)
        if fail_on_data_loss and gap[0] < gap[1] and is_lost(client, found.stream, gap, _TIMEOUT):
            raise DataLost(found.stream, *gap)
        position, properties = found.first, options.subscription_properties(None)
        while position < found.end:
            spec = OffsetSpec.at(position)
            subscribe = Subscribe(number, found.stream, spec, _CHUNKS_PER_ROUND, properties)
            client.call(subscribe, timeout=_TIMEOUT)
            client.call(Metadata((found.stream,)), timeout=_TIMEOUT)
            client.call(Unsubscribe(number), timeout=_TIMEOUT)
            came = chunks.take()
            if not came:
                return
            batch = reader.batch(came, position, found.end)
            position = max(parse_header(chunk).end_offset for chunk in came)
            if batch is not None:
                yield batch, str(client.node)


@contextmanager
def _subscriber(access: Access, stream: str) -> Iterator[tuple[StreamClient, int, _Chunks]]:
    """A connection to a replica with a place for a subscription."""
    chunks = _Chunks()
    route = access.routes.route(stream, _TIMEOUT)
    candidates = consumer_candidates(route, access.placement, access.rng)
    deadline = access.clock() + _TIMEOUT
    client, number = access.pool.subscriber(candidates, stream, chunks, deadline)
    try:
        yield client, number, chunks
    finally:
        if chunks.lost is None:
            with suppress(WarrenError):
                client.detach_subscriber(number)
        access.pool.release(client)


def _whole_range(access: Access, client: StreamClient, found: StreamRange) -> Ends | None:
    """Wait until the node holds the range, as far as there are messages; None if there are none."""
    leader = leader_ends(access, found.stream, _TIMEOUT)
    if leader is None:
        return None
    last = min(found.end - 1, leader.last)
    deadline = access.clock() + _TIMEOUT
    while True:
        ends = first_and_last(client, found.stream, _TIMEOUT, access.clock)
        if ends is not None and ends.last >= last:
            return ends
        if access.clock() > deadline:
            raise Unreachable(f"{client.node} has no message {last} of {found.stream!r} yet")
        time.sleep(_TRY_AGAIN)


class _Chunks:
    """What a subscription delivers."""

    def __init__(self) -> None:
        self._came: list[memoryview] = []
        self.lost: Exception | None = None

    def take(self) -> list[memoryview]:
        """All that came; called when no more can come."""
        if self.lost is not None:
            raise self.lost
        came, self._came = self._came, []
        return came

    def on_chunk(self, chunk: memoryview) -> None:
        self._came.append(chunk)

    def on_activity(self, active: bool) -> OffsetSpec:  # noqa: ARG002
        return NEXT

    def on_lost(self, reason: Exception) -> None:
        self.lost = reason
