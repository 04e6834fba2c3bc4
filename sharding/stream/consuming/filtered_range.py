"""A range of a stream from which the broker leaves out chunks, by the filter values in them.

Of chunks that are left out nothing is heard, so nobody says that the end of the range was passed.
Therefore the range is read in rounds: subscribe where the last round ended, ask for the stream's
metadata, and take what came before that answer. A broker sends the chunks it has, as far as its
credit goes, before it answers the next request. A round without a chunk is thus the end of what
the node holds; that it holds the whole range is made sure of before.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from sharding.errors import Unreachable, WarrenError
from sharding.stream.consuming.consumer_options import ConsumerOptions
from sharding.stream.consuming.data_loss import is_lost
from sharding.stream.consuming.probe import Ends, first_and_last, leader_ends
from sharding.stream.consuming.starting import check_abilities
from sharding.stream.errors import DataLost
from sharding.stream.formats.chunk import parse_header
from sharding.stream.frames.requests import Metadata, Subscribe, Unsubscribe
from sharding.stream.network.access import Access
from sharding.stream.network.placement import consumer_candidates
from sharding.stream.protocol import NEXT, Broker, OffsetSpec

if TYPE_CHECKING:
    import pyarrow as pa

    from sharding.stream.network.client import StreamClient

_TRY_AGAIN = 0.2


def read_filtered(
    access: Access, stream: str, first: int, end: int, options: ConsumerOptions
) -> Generator[tuple[pa.RecordBatch, Broker | None]]:
    """The rows of the chunks that pass the filter, each batch with the node that it came from.

    A connection that is lost fails the reading; it may begin again at any offset.
    """
    from sharding.stream.formats.arrow import BatchReader

    if first == end:
        return
    timeout = options.recovery_timeout
    reader = BatchReader(stream, options.columns, access.limits, options.check_crc)
    with _subscriber(access, stream, timeout) as (client, number, chunks):
        check_abilities(client, options)
        ends = _whole_range(access, client, stream, end, timeout)
        if ends is None:
            return
        gap = (first, ends.first)
        fails = options.on_data_loss == "raise"
        if fails and gap[0] < gap[1] and is_lost(client, stream, gap, timeout):
            raise DataLost(stream, *gap)
        position, properties = first, options.subscription_properties(None)
        while position < end:
            spec = OffsetSpec.at(position)
            subscribe = Subscribe(number, stream, spec, options.credits, properties)
            client.call(subscribe, timeout=timeout)
            client.call(Metadata((stream,)), timeout=timeout)
            client.call(Unsubscribe(number), timeout=timeout)
            came = chunks.take()
            if not came:
                return
            batch = reader.batch(came, position, end)
            position = max(parse_header(chunk).end_offset for chunk in came)
            if batch is not None:
                yield batch, client.node


@contextmanager
def _subscriber(
    access: Access, stream: str, timeout: float
) -> Iterator[tuple[StreamClient, int, _Chunks]]:
    """A connection to a replica with a place for a subscription."""
    chunks = _Chunks()
    route = access.routes.route(stream, timeout)
    candidates = consumer_candidates(route, access.placement, access.rng)
    deadline = access.clock() + timeout
    client, number = access.pool.subscriber(candidates, stream, chunks, deadline)
    try:
        yield client, number, chunks
    finally:
        if chunks.lost is None:
            with suppress(WarrenError):
                client.detach_subscriber(number)
        access.pool.release(client)


def _whole_range(
    access: Access, client: StreamClient, stream: str, end: int, timeout: float
) -> Ends | None:
    """Wait until the node holds the range, as far as there are messages; None if there are none."""
    leader = leader_ends(access, stream, timeout)
    if leader is None:
        return None
    last = min(end - 1, leader.last)
    deadline = access.clock() + timeout
    while True:
        ends = first_and_last(client, stream, timeout, access.clock)
        if ends is not None and ends.last >= last:
            return ends
        if access.clock() > deadline:
            raise Unreachable(f"{client.node} has no message {last} of {stream!r} yet")
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
