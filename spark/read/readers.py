"""The readers that Spark calls on the driver, batch and streaming: from options to tasks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from sharding.errors import WarrenError, is_retryable
from sharding.stream.consumer.ranges import DOUBT
from sharding.stream.errors import DataLost, NoAnswerInTime
from spark.options.read import Place, Positions, ReadOptions, resolve
from spark.options.values import BadOption
from spark.process import environment
from spark.read.cluster_view import ClusterView
from spark.read.planning import (
    Batch,
    Extent,
    Offsets,
    Seen,
    StreamRange,
    check_gone,
    cut,
    has_chunk,
    is_shorter,
    last_seen,
    may_be_another,
    plan,
    up_to_target,
)
from spark.read.rows import read

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("warren.spark")


class BatchReader(DataSourceReader):
    """Reads what the streams hold when the query is planned."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[StreamRange]:
        options = self._options
        with environment(options.connect) as streams:
            view = ClusterView(streams, options)
            found = view.streams()
            extents = view.extents(found)
            starts = places(options.starting, Place.EARLIEST, extents, view)
            ends = places(options.ending, Place.LATEST, extents, view)
        ranges = [
            StreamRange(
                stream,
                number,
                *self._range(stream, starts[stream], ends[stream], extent),
                extent.seen,
            )
            for (stream, number), extent in zip(found.items(), extents.values(), strict=True)
        ]
        return cut(
            ranges,
            min_partitions=options.min_partitions,
            max_records=options.max_records_per_partition,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(self._options, partition)

    def _range(self, stream: str, start: int, end: int, extent: Extent) -> tuple[int, int]:
        """What is to be read of a stream: from `start` up to `end`, as far as it is there."""
        if start > end:
            # From the first message there is to an earlier one: retention has passed the end. It
            # deleted all that was asked for, and streams begin at 0.
            if start != extent.first:
                rule = f"must not be after endingOffsets, {end} in {stream!r}"
                raise BadOption("startingOffsets", rule, start)
            if self._options.fail_on_data_loss:
                raise DataLost(stream, 0, extent.first)
            start = 0
        if self._options.fail_on_data_loss or start >= extent.first:
            return start, end  # a task that finds something missing says so
        # Nothing is gained by planning tasks for what is gone.
        first = min(extent.first, end)
        logger.warning("%d offsets of %r are gone, and passed over", first - start, stream)
        return first, end


def places(
    asked: Positions | None,
    default: Place,
    extents: Mapping[str, Extent],
    view: ClusterView,
) -> dict[str, int]:
    """The offset in each stream that the option, or the default, means."""
    asked = asked or Positions("startingOffsets", default)
    offsets = {}
    for stream, position in asked.for_streams(extents).items():
        extent = extents[stream]

        def offset_at(timestamp_ms: int, stream: str = stream) -> int | None:
            return view.offset_at(stream, timestamp_ms)

        offset = resolve(position, extent.first, extent.end, offset_at)
        if offset > extent.end:
            rule = f"must be at most {extent.end}, where {stream!r} ends"
            raise BadOption(asked.option, rule, offset)
        offsets[stream] = offset
    return offsets


_T = TypeVar("_T")
_NO_LIMIT = 2**63 - 1
_PATIENCE = 120.0
"""How long a running query waits for a cluster that is away: nodes restart within that."""
_TRY_AGAIN = 1.0


# Streams as a streaming source: the driver plans batches by offsets, the tasks read them.
#
# Spark keeps one reader on the driver for the life of a query, which plans, and pickles another for
# the tasks, which only read. So what planning remembers is never asked for in a task.


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads micro-batches; its rules are those of `planning`."""

    def __init__(
        self,
        options: ReadOptions,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._clock = clock
        self._sleep = sleep
        self._initial: dict[str, object] | None = None
        self._target: Mapping[str, int] | None = None
        self._last_batch_at: float | None = None
        self._seen: dict[str, Seen] = {}
        self._stored: dict[str, int] = {}
        self._runs = False

    # On the driver

    def initialOffset(self) -> dict[str, object]:  # noqa: N802
        # Asked for twice before the first batch: "latest" must not mean two places.
        if self._initial is None:
            starts = self._ask(self._starts)
            self._initial = Offsets(starts, initial=True).to_json()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        # It tells latestOffset() that the options count at all. Spark has no limit that says both
        # "at least" and "at most", so what they are is looked up there.
        most = self._options.max_offsets
        if most is None and self._options.min_offsets is None:
            return ReadAllAvailable()
        return ReadMaxRows(most or _NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = {stream: extent.end for stream, extent in self._ask(_extents).items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, object]:  # noqa: N802
        begin = Offsets.from_json(start)
        if not begin.initial:
            # Spark plans a batch when the one before it is done, but says commit() only when it
            # has planned one: for a query that is stopped or has nothing to read, never.
            self._store(begin)
        batch = self._ask(lambda view: self._plan(view, begin))
        begin = batch.start
        limited = not isinstance(limit, ReadAllAvailable)
        # Where a stream begins elsewhere than it ended, that is written down at once.
        may_wait = limited and not begin.initial and not batch.began
        if may_wait and self._waits(batch.waiting):
            return start
        end = batch.up_to(self._options.max_offsets if limited else None)
        if end is begin:
            return start  # the very same text, or Spark would run an empty batch
        self._last_batch_at = self._clock()
        for stream, count in batch.lost.items():
            logger.warning("%d offsets of %r are gone, and passed over", count, stream)
        return end.to_json()

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802
        """For the progress report; Spark shows it beside what is read, so the lag can be seen."""
        ends = {stream: seen.end for stream, seen in self._seen.items()}
        return Offsets(ends).to_json() if ends else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[StreamRange]:
        upto = Offsets.from_json(end)
        begins = upto.starts_after(Offsets.from_json(start))
        numbers = upto.numbers
        if not upto.next.keys() <= numbers.keys():  # it was planned before they were kept
            numbers = self._ask(lambda view: view.streams(missing_ok=True))
        ranges = [
            # -1: of a stream that has left its super stream since
            StreamRange(
                stream, numbers.get(stream, -1), begins[stream], after, upto.seen.get(stream)
            )
            for stream, after in upto.next.items()
        ]
        return cut(
            ranges,
            min_partitions=self._options.min_partitions,
            max_records=self._options.max_records_per_partition,
        )

    def commit(self, end: dict[str, Any]) -> None:
        self._store(Offsets.from_json(end))

    # In tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(self._options, partition)

    # Planning

    def _ask(self, question: Callable[[ClusterView], _T]) -> _T:
        """The answer of the cluster. A query that runs bears with one that is away for a while."""
        patience = _PATIENCE if self._runs else 0.0
        deadline = self._clock() + patience
        while True:
            try:
                with environment(self._options.connect) as streams:
                    answer = question(ClusterView(streams, self._options))
                self._runs = True
                return answer
            except WarrenError as error:
                passes = is_retryable(error) or isinstance(error, NoAnswerInTime)
                if not passes or self._clock() + _TRY_AGAIN > deadline:
                    raise
                logger.warning("the next batch can't be planned yet: %s", error)
            self._sleep(_TRY_AGAIN)

    def _starts(self, view: ClusterView) -> dict[str, int]:
        extents = view.extents(view.streams())
        return places(self._options.starting, Place.LATEST, extents, view)

    def _plan(self, view: ClusterView, begin: Offsets) -> Batch:
        # What this process has seen is newer than what it last wrote down.
        begin = replace(begin, seen={**begin.seen, **self._seen})
        numbers = view.streams(missing_ok=True)
        extents = self._extents_not_in_doubt(view, numbers, begin)
        made_again = self._made_again(view, begin, extents)
        if self._options.fail_on_data_loss:
            gone = [stream for stream in begin.next if stream not in extents]
            check_gone(begin, {stream: view.extent_if_any(stream) for stream in gone})
        known = extents
        if self._target is not None:
            extents = up_to_target(extents, self._target, begin)
        batch = plan(
            begin,
            extents,
            fail_on_data_loss=self._options.fail_on_data_loss,
            made_again=made_again,
            came_back={
                stream
                for stream, (_, seen) in begin.left.items()
                if stream in extents
                and has_chunk(extents[stream], seen)
                and view.is_stored_at(stream, seen)
            },
        )
        # Only now: what a failed plan has seen must be found again by the next one.
        self._seen = last_seen(known, begin.seen)
        return replace(batch, numbers=numbers)

    def _extents_not_in_doubt(
        self, view: ClusterView, streams: Iterable[str], begin: Offsets
    ) -> dict[str, Extent]:
        """What the streams hold. One that had more than was read, and is called empty, is asked
        again before that counts (`DOUBT`)."""
        extents = view.extents_of_those_there(streams)
        deadline = self._clock() + DOUBT
        while True:
            doubtful = [
                stream
                for stream, extent in extents.items()
                if extent.is_empty
                and stream in begin.next
                and stream in begin.seen
                and begin.seen[stream].end > begin.next[stream]
            ]
            if not doubtful or self._clock() + _TRY_AGAIN > deadline:
                return extents
            self._sleep(_TRY_AGAIN)
            for stream in doubtful:
                del extents[stream]
            extents |= view.extents_of_those_there(doubtful)

    def _made_again(
        self, view: ClusterView, begin: Offsets, extents: Mapping[str, Extent]
    ) -> set[str]:
        """The streams that are others than before, under the same name."""
        found = set()
        for stream, extent in extents.items():
            seen = begin.seen.get(stream)
            if seen is None or stream not in begin.next:
                continue
            first_look = stream not in self._seen
            if is_shorter(extent, seen) or (
                has_chunk(extent, seen)
                and (first_look or may_be_another(extent, seen))
                and not view.is_stored_at(stream, seen)
            ):
                found.add(stream)
        return found

    def _store(self, done: Offsets) -> None:
        """Keep in the broker how far the query is, if that is asked for."""
        name = self._options.store_offsets
        moved = {
            stream: after - 1
            for stream, after in done.next.items()
            if after - 1 > self._stored.get(stream, -1)
        }
        if name is None or not moved:
            return
        try:
            with environment(self._options.connect) as streams:
                view = ClusterView(streams, self._options)
                for stream, offset in moved.items():
                    view.store_offset(name, stream, offset)
                    self._stored[stream] = offset
        except WarrenError as error:
            # It is for others to look at. The checkpoint is what counts, so the query goes on.
            logger.warning("offsets are not stored in the broker for %r: %s", name, error)

    def _waits(self, waiting: int) -> bool:
        """Whether there is too little for a batch, and none is overdue."""
        least = self._options.min_offsets
        if least is None or waiting >= least or self._target is not None:
            return False
        if self._last_batch_at is None:
            return False
        return self._clock() - self._last_batch_at < self._options.max_trigger_delay


def _extents(view: ClusterView) -> dict[str, Extent]:
    # By what is remembered of routes a stream may be there that was just deleted.
    return view.extents_of_those_there(view.streams(missing_ok=True))
