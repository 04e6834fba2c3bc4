"""What planning and reading ask of the stream client; the one place that knows how it is called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sharding.errors import Unreachable
from sharding.stream.consuming.consumer_options import ConsumerOptions
from sharding.stream.errors import StreamNotFound
from sharding.stream.handlers import SubscriberHandler
from sharding.stream.network.access import Access
from sharding.stream.protocol import Broker, OffsetSpec
from spark.columns import client_columns
from spark.filtered_ranges import read_filtered
from spark.offsets import Extent
from spark.partitions import StreamRange
from spark.read_options import ReadOptions
from spark.selection import listed_streams

if TYPE_CHECKING:
    import pyarrow as pa

    from sharding.stream.environment import StreamEnvironment
    from sharding.stream.network.client import StreamClient

_QUERIES_AT_ONCE = 8
"""A query for the ends of a stream is a few milliseconds of waiting."""


class ClusterView:
    """The streams that a source selects, as the cluster has them now."""

    def __init__(self, environment: StreamEnvironment, options: ReadOptions) -> None:
        self._environment = environment
        self._options = options

    def streams(self, *, missing_ok: bool = False) -> dict[str, int]:
        """The selected streams, in order, each with its number in its super stream."""
        selection = self._options.selection

        def listed() -> list[str]:
            return listed_streams(self._options.connect, selection.management_url)

        return selection.find(self._environment, listed, missing_ok=missing_ok)

    def extents(self, streams: Iterable[str]) -> dict[str, Extent]:
        """What each of the streams holds."""
        wanted = list(streams)
        if len(wanted) <= 1:
            return {stream: self._extent(stream) for stream in wanted}
        with ThreadPoolExecutor(min(_QUERIES_AT_ONCE, len(wanted))) as workers:
            return dict(zip(wanted, workers.map(self._extent, wanted), strict=True))

    def extent_if_any(self, stream: str) -> Extent | None:
        """What a stream holds, or None if there is no such stream."""
        try:
            return self._extent(stream) if self._environment.exists(stream) else None
        except StreamNotFound:
            return None

    def offset_at(self, stream: str, timestamp_ms: int) -> int | None:
        """The first offset that was stored at that time or later; None if nothing was."""
        ends = self._environment.offsets(stream)
        if ends is None:
            return None
        last_chunk = self._environment.read_range(stream, ends.last_chunk, ends.last + 1)
        if _time_of(next(last_chunk)) < timestamp_ms:
            return None
        # So it can't wait for ever: there is a chunk that late.
        with self._environment.consumer(
            stream, offset=OffsetSpec.since(timestamp_ms), credits=2
        ) as consumer:
            batch = next(consumer.batches(self._options.connect.request_timeout), None)
        if batch is None:
            raise Unreachable(f"no message of {stream!r} came in time, though it is stored")
        return int(batch.column("offset")[0].as_py())

    def store_offset(self, name: str, stream: str, offset: int) -> None:
        """Keep in the broker that `name` has dealt with the stream up to this offset."""
        with self._environment.consumer(stream, ConsumerOptions(name=name, credits=2)) as consumer:
            consumer.store_offset(stream, offset, self._options.connect.request_timeout)

    def read(self, found: StreamRange) -> Iterator[tuple[pa.RecordBatch, str]]:
        """The rows of a range, each batch with the node it came from, if that is a column."""
        from sharding.stream.consuming.reading import read_range

        options = self._options
        columns = client_columns(options.columns, options.raw)
        if options.filter.values:
            yield from read_filtered(
                self._environment._access,
                found,
                options.filter,
                columns,
                fail_on_data_loss=options.fail_on_data_loss,
            )
            return
        how: dict[str, Any] = {
            "columns": columns,
            "on_data_loss": "raise" if options.fail_on_data_loss else "skip",
        }
        if "node" not in options.columns:
            for batch in self._environment.read_range(found.stream, found.first, found.end, **how):
                yield batch, ""
            return
        access = self._environment._access
        noted = _NotedConnections(access)
        access = replace(access, pool=noted)
        for batch in read_range(access, found.stream, found.first, found.end, **how):
            yield batch, noted.node

    def _extent(self, stream: str) -> Extent:
        ends = self._environment.offsets(stream)
        return Extent() if ends is None else Extent(ends.first, ends.last + 1)


def _time_of(batch: pa.RecordBatch) -> int:
    """In milliseconds since 1970."""
    return int(batch.column("timestamp")[0].value)


class _NotedConnections:
    """Connections that remember which node a stream is read from."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.node = ""

    def subscriber(
        self,
        candidates: Sequence[Broker],
        stream: str,
        handler: SubscriberHandler,
        deadline: float,
    ) -> tuple[StreamClient, int]:
        client, number = self._access.pool.subscriber(candidates, stream, handler, deadline)
        # Between its subscriptions a reader asks the leader, and only the leader, for the ends.
        route = self._access.routes.route(stream, max(0.0, deadline - self._access.clock()))
        if not route.replicas or list(candidates) != [route.leader]:
            self.node = str(client.node)
        return client, number

    def release(self, client: StreamClient) -> None:
        self._access.pool.release(client)
