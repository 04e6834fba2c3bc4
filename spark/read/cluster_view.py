"""What planning and reading ask of the stream client; the one place that knows how it is called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from sharding.stream.consumer.ranges import DOUBT
from sharding.stream.errors import DataLost, EndsTooEarly, StreamNotFound
from sharding.stream.options import Columns, ConsumerOptions
from spark.options.read import ReadOptions, listed_streams
from spark.read.columns import client_columns
from spark.read.planning import Extent, Seen, StreamGone, StreamRange

if TYPE_CHECKING:
    import pyarrow as pa

    from sharding.stream.consumer.ranges import RangeReading
    from sharding.stream.environment import StreamEnvironment

logger = logging.getLogger("warren.spark")

_T = TypeVar("_T")
_EPOCH = datetime.fromtimestamp(0, UTC)
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
        return self._of_each(streams, self._extent)

    def extents_of_those_there(self, streams: Iterable[str]) -> dict[str, Extent]:
        """The same, without the streams that are no longer there."""
        found = self._of_each(streams, self.extent_if_any)
        return {stream: extent for stream, extent in found.items() if extent is not None}

    def extent_if_any(self, stream: str) -> Extent | None:
        """What a stream holds, or None if there is no such stream."""
        try:
            return self._extent(stream)
        except StreamNotFound:
            if self._environment.exists(stream):
                raise  # it was made again just now, or a node does not know it yet
            return None

    def _of_each(self, streams: Iterable[str], ask: Callable[[str], _T]) -> dict[str, _T]:
        wanted = list(streams)
        if len(wanted) <= 1:
            return {stream: ask(stream) for stream in wanted}
        with ThreadPoolExecutor(min(_QUERIES_AT_ONCE, len(wanted))) as workers:
            return dict(zip(wanted, workers.map(ask, wanted), strict=True))

    def is_stored_at(self, stream: str, seen: Seen) -> bool:
        """Whether a stream has the chunk that was seen, and not another one in its place."""
        try:
            place, columns = seen.chunk, Columns(raw=True)  # whatever is in it
            found = self._environment.read_range(
                stream, place, place + 1, columns=columns, timeout=DOUBT, known_end=place + 1
            )
            batch = next(found, None)
            found.close()
        except DataLost:
            return True  # retention was faster: what is lost is seen elsewhere
        except EndsTooEarly:
            return False
        return batch is not None and batch.column("timestamp")[0].value == seen.time

    def offset_at(self, stream: str, timestamp_ms: int) -> int | None:
        """The first offset that was stored at that time or later; None if nothing was."""
        time = _EPOCH + timedelta(milliseconds=timestamp_ms)
        return self._environment.offset_at(stream, time)

    def store_offset(self, name: str, stream: str, offset: int) -> None:
        """Keep in the broker that `name` has dealt with the stream up to this offset."""
        with self._environment.consumer(stream, ConsumerOptions(name=name, credits=2)) as consumer:
            consumer.store_offset(stream, offset, self._options.connect.request_timeout)

    def read(self, found: StreamRange) -> Iterator[tuple[pa.RecordBatch, str]]:
        """The rows of a range, each batch with the node it came from."""
        options = self._options
        reading = self._environment.read_range(
            found.stream,
            found.first,
            found.end,
            columns=client_columns(options.columns, options.raw),
            filter_values=options.filter.values,
            match_unfiltered=options.filter.match_unfiltered,
            on_data_loss="raise" if options.fail_on_data_loss else "skip",
            credits=options.credits,
            known_end=found.seen.end if found.seen is not None else 0,
        )
        position, latest = found.first, None if found.seen is None else found.seen.time
        try:
            for batch in self._planned(reading, found):
                if latest is not None and batch.column("timestamp")[-1].value > latest:
                    self._check_planned(found)
                    latest = None  # it is the same: clocks of two leaders differ
                position = batch.column("offset")[-1].as_py() + 1
                yield batch, str(reading.node)
            if position < found.end:
                self._check_planned(found)
        except (StreamNotFound, StreamGone) as gone:
            if options.fail_on_data_loss:
                raise
            logger.warning("offsets up to %d are passed over: %s", found.end, gone)
        finally:
            reading.close()

    def _planned(self, reading: RangeReading, found: StreamRange) -> Iterator[pa.RecordBatch]:
        try:
            yield from reading
        except EndsTooEarly:
            self._check_planned(found)
            raise  # it is the same stream, and will be told as a whole later

    def _check_planned(self, found: StreamRange) -> None:
        """Raises if the stream is another one than the range was planned for."""
        if found.seen is not None and not self.is_stored_at(found.stream, found.seen):
            raise StreamGone(
                f"{found.stream!r} was deleted and made again after offsets {found.first} to "
                f"{found.end} were planned to be read; start with a new checkpoint, or allow the "
                "loss (failOnDataLoss=false)"
            )

    def _extent(self, stream: str) -> Extent:
        ends = self._environment.offsets(stream)
        if ends is None:
            return Extent(seen=Seen(0))
        seen = Seen(ends.last + 1, ends.last_chunk, ends.last_time)
        return Extent(ends.first, ends.last + 1, ends.first_time, seen)
