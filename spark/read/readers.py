"""What planning and reading ask of the stream client; the one place that knows how it is called."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from sharding.errors import WarrenError, is_retryable
from sharding.stream.errors import NoAnswerInTime
from spark.options.read import Place, Positions, ReadOptions, resolve
from spark.options.values import BadOption
from spark.process import environment
from spark.read.cluster_view import ClusterView
from spark.read.planning import (
    Batch,
    Extent,
    Offsets,
    StreamRange,
    check_gone,
    cut,
    plan,
    up_to_target,
)
from spark.read.rows import read

if TYPE_CHECKING:
    import pyarrow as pa


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
            StreamRange(stream, number, self._start(starts[stream], extents[stream]), ends[stream])
            for stream, number in found.items()
        ]
        for found_range in ranges:
            if found_range.first > found_range.end:
                rule = (
                    f"must not be after endingOffsets, {found_range.end} in {found_range.stream!r}"
                )
                raise BadOption("startingOffsets", rule, found_range.first)
        return cut(
            ranges,
            min_partitions=options.min_partitions,
            max_records=options.max_records_per_partition,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(self._options, partition)

    def _start(self, offset: int, extent: Extent) -> int:
        # Where a loss is allowed, nothing is gained by planning tasks for what is gone. Where it
        # is not, the task that finds it missing says so.
        return offset if self._options.fail_on_data_loss else max(offset, extent.first)


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


logger = logging.getLogger("warren.spark")

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
        self._seen: dict[str, int] = {}
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
        limited = not isinstance(limit, ReadAllAvailable)
        if limited and not begin.initial and self._waits(batch.waiting):
            return start
        end = batch.up_to(self._options.max_offsets if limited else None)
        if end is begin:
            return start  # the very same text, or Spark would run an empty batch
        self._last_batch_at = self._clock()
        return end.to_json()

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802
        """For the progress report; Spark shows it beside what is read, so the lag can be seen."""
        return Offsets(self._seen).to_json() if self._seen else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[StreamRange]:
        upto = Offsets.from_json(end)
        begins = upto.starts_after(Offsets.from_json(start))
        numbers = self._ask(lambda view: view.streams(missing_ok=True))
        ranges = [
            # -1: of a stream that left its super stream after the batch was planned
            StreamRange(stream, numbers.get(stream, -1), begins[stream], after)
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
        extents = _extents(view)
        self._seen = {stream: extent.end for stream, extent in extents.items()}
        if self._options.fail_on_data_loss:
            gone = [stream for stream in begin.next if stream not in extents]
            check_gone(begin, {stream: view.extent_if_any(stream) for stream in gone})
        if self._target is not None:
            extents = up_to_target(extents, self._target, begin)
        return plan(begin, extents, fail_on_data_loss=self._options.fail_on_data_loss)

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
    return view.extents(view.streams(missing_ok=True))
