"""The source's planning on the driver, with a cluster that is only pretended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

import spark.read.readers
from sharding.errors import Unreachable
from sharding.stream.consumer.probe import Ends
from sharding.stream.errors import DataLost, StreamNotFound
from spark.options.read import ReadOptions
from spark.options.values import BadOption
from spark.read.cluster_view import ClusterView
from spark.read.planning import Seen, StreamGone, StreamRange
from spark.read.readers import BatchReader, StreamReader


class FakeEnvironment:
    """Streams by name: the first offset and the one after the last."""

    def __init__(self, **streams: tuple[int, int]) -> None:
        self.streams = streams
        self.stored: list[tuple[str, str, int]] = []
        self.failures = 0
        self.made_again: dict[str, int] = {}
        """How often, by stream: its chunks are that much younger."""

    def partitions(self, super_stream: str) -> tuple[str, ...]:
        if self.failures:
            self.failures -= 1
            raise Unreachable("no node")
        found = tuple(name for name in self.streams if name.startswith(super_stream))
        if not found:
            raise StreamNotFound("Partitions", 2, super_stream)
        return found

    def route(self, stream: str) -> object:
        if stream not in self.streams:
            raise StreamNotFound("Metadata", 2, stream)
        return object()

    def exists(self, stream: str) -> bool:
        return stream in self.streams

    def offsets(self, stream: str) -> Ends | None:
        self.route(stream)
        first, end = self.streams[stream]
        if first == end:
            return None
        return Ends(first, end - 1, end - 1, self.time(stream, first), self.time(stream, end - 1))

    def time(self, stream: str, offset: int) -> int:
        """When the chunk at an offset was stored."""
        return 1_000_000 * self.made_again.get(stream, 0) + offset

    def offset_at(self, stream: str, timestamp_ms: int) -> int | None:
        first, end = self.streams[stream]
        return first + timestamp_ms if first + timestamp_ms < end else None


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeEnvironment:
    fake = FakeEnvironment(s0=(0, 100), s1=(10, 50), s2=(0, 0))

    @contextmanager
    def environment(_: object) -> Iterator[FakeEnvironment]:
        yield fake

    def offset_at(_: ClusterView, stream: str, timestamp_ms: int) -> int | None:
        return fake.offset_at(stream, timestamp_ms)

    def store_offset(_: ClusterView, name: str, stream: str, offset: int) -> None:
        fake.stored.append((name, stream, offset))

    def is_stored_at(_: ClusterView, stream: str, seen: Seen) -> bool:
        return fake.time(stream, seen.chunk) == seen.time

    monkeypatch.setattr(ClusterView, "is_stored_at", is_stored_at)
    monkeypatch.setattr(ClusterView, "offset_at", offset_at)
    monkeypatch.setattr(ClusterView, "store_offset", store_offset)
    monkeypatch.setattr(spark.read.readers, "environment", environment)
    return fake


def batch(**options: str) -> list[StreamRange]:
    parsed = ReadOptions.parse({"superStream": "s", **options}).for_batch()
    return BatchReader(parsed).partitions()


class Query:
    """What Spark does with a stream reader, with the checkpoint in memory."""

    def __init__(self, log: list[str] | None = None, **options: str) -> None:
        parsed = ReadOptions.parse({"superStream": "s", **options}).for_streaming()
        self.clock = Clock()
        self.reader = StreamReader(parsed, self.clock, self.clock.sleep)
        self.log = log if log is not None else []

    @property
    def start(self) -> dict[str, Any]:
        return json.loads(self.log[-1]) if self.log else self.reader.initialOffset()

    def trigger(self, limit: ReadLimit | None = None) -> list[StreamRange] | None:
        """The tasks of the next batch; None if there is none."""
        start = json.dumps(self.start)
        found = self.reader.latestOffset(
            json.loads(start), limit or self.reader.getDefaultReadLimit()
        )
        if json.dumps(found) == start:
            return None
        self.log.append(json.dumps(found))
        return self.reader.partitions(json.loads(start), found)

    def repeat(self) -> list[StreamRange]:
        """The tasks of the last batch, as after a restart."""
        last = json.loads(self.log.pop())
        try:
            return self.reader.partitions(self.start, last)
        finally:
            self.log.append(json.dumps(last))


def spans(tasks: list[StreamRange] | None) -> dict[str, tuple[int, int]] | None:
    return None if tasks is None else {t.stream: (t.first, t.end) for t in tasks}


@pytest.mark.usefixtures("cluster")
class TestBatch:
    def test_everything_there_is_by_default(self) -> None:
        assert batch() == [StreamRange("s0", 0, 0, 100), StreamRange("s1", 1, 10, 50)]

    def test_positions_are_kept(self) -> None:
        found = batch(
            startingOffsets='{"s0": 7, "s1": "1970-01-01T00:00:00.005Z", "s2": "earliest"}',
            endingOffsets='{"s0": 9, "s1": 20, "s2": "latest"}',
        )
        assert spans(found) == {"s0": (7, 9), "s1": (15, 20)}

    @pytest.mark.parametrize(
        ("option", "text", "said"),
        [
            ("startingOffsets", '{"s0": 101, "s1": 10, "s2": 0}', "at most 100, where 's0' ends"),
            ("endingOffsets", '{"s0": 10, "s1": 51, "s2": 0}', "at most 50, where 's1' ends"),
            ("startingOffsets", '{"s0": 10, "s1": 30, "s2": 0}', "after endingOffsets, 20 in 's1'"),
            ("startingOffsets", '{"s0": 10, "s1": 9, "s9": 0}', "only s0, s1, s2; found 's9'"),
        ],
    )
    def test_offsets_that_are_not_there_are_refused(
        self, option: str, text: str, said: str
    ) -> None:
        ending = {"endingOffsets": '{"s0": 100, "s1": 20, "s2": 0}'}
        with pytest.raises(BadOption, match=said):
            batch(**{**(ending if "30" in text else {}), option: text})

    def test_end_that_retention_has_passed_is_a_loss_and_not_a_mistake(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """s08: it was called a mistake of startingOffsets, also where losses are allowed."""
        ending = '{"s0": 100, "s1": 9, "s2": 0}'
        for start in ("earliest", '{"s0": 0, "s1": 10, "s2": 0}'):
            with pytest.raises(DataLost, match="'s1' no longer has"):
                batch(startingOffsets=start, endingOffsets=ending)
            found = batch(startingOffsets=start, endingOffsets=ending, failOnDataLoss="false")
            assert spans(found) == {"s0": (0, 100)}
            assert "9 offsets of 's1' are gone" in caplog.text

    def test_what_is_gone_is_left_to_the_task_unless_that_is_allowed(self) -> None:
        start = '{"s0": 0, "s1": 3, "s2": 0}'
        assert spans(batch(startingOffsets=start))["s1"] == (3, 50)  # type: ignore[index]
        allowed = batch(startingOffsets=start, failOnDataLoss="false")
        assert spans(allowed)["s1"] == (10, 50)  # type: ignore[index]

    def test_tasks_are_cut(self) -> None:
        assert [task.size for task in batch(maxRecordsPerPartition="50")] == [50, 50, 40]
        assert len(batch(minPartitions="7")) == 7


def test_latest_is_one_place_and_stays_so_in_the_checkpoint(cluster: FakeEnvironment) -> None:
    query = Query()
    first = query.reader.initialOffset()
    cluster.streams["s0"] = (0, 105)
    assert query.reader.initialOffset() == first
    assert spans(query.trigger()) == {"s0": (100, 105)}
    cluster.streams["s0"] = (0, 500)
    restarted = Query(query.log)
    assert spans(restarted.repeat()) == {"s0": (100, 105)}
    assert spans(restarted.trigger()) == {"s0": (105, 500)}
    assert restarted.trigger() is None


def test_a_query_that_starts_at_the_end_runs_one_empty_batch_and_then_waits(
    cluster: FakeEnvironment,
) -> None:
    query = Query()
    assert query.trigger() == []
    assert query.trigger() is None
    cluster.streams["s2"] = (0, 3)
    assert Query(query.log).trigger() == [StreamRange("s2", 2, 0, 3)]


def test_available_now_with_a_limit_gives_the_batches_it_should(cluster: FakeEnvironment) -> None:
    query = Query(startingOffsets="earliest", maxOffsetsPerTrigger="50")
    query.reader.prepareForTriggerAvailableNow()
    cluster.streams["s0"] = (0, 1000)
    cluster.streams["s3"] = (0, 1000)
    sizes = []
    while (tasks := query.trigger()) is not None:
        sizes.append(sum(task.size for task in tasks))
    assert sizes == [50, 50, 40]
    assert query.start["next"] == {"s0": 100, "s1": 50, "s2": 0, "s3": 0}


@pytest.mark.usefixtures("cluster")
def test_read_all_available_is_stronger_than_the_limit() -> None:
    query = Query(startingOffsets="earliest", maxOffsetsPerTrigger="5")
    tasks = query.trigger(ReadAllAvailable())
    assert tasks is not None
    assert sum(task.size for task in tasks) == 140


def test_too_few_rows_wait_but_not_for_ever(cluster: FakeEnvironment) -> None:
    query = Query(minOffsetsPerTrigger="10", maxTriggerDelay="1m")
    assert query.trigger() == []
    cluster.streams["s0"] = (0, 105)
    assert query.trigger() is None
    cluster.streams["s0"] = (0, 110)
    assert spans(query.trigger()) == {"s0": (100, 110)}
    cluster.streams["s0"] = (0, 111)
    query.clock.now += 59
    assert query.trigger() is None
    query.clock.now += 2
    assert spans(query.trigger()) == {"s0": (110, 111)}


def test_new_partitions_are_read_from_their_beginning(cluster: FakeEnvironment) -> None:
    query = Query()
    query.trigger()
    cluster.streams.update(s3=(4, 9), s4=(0, 0))
    assert query.trigger() == [StreamRange("s3", 3, 4, 9)]
    cluster.streams["s3"] = (8, 12)  # retention goes on
    assert Query(query.log).repeat() == [StreamRange("s3", 3, 4, 9)]
    assert spans(Query(query.log).trigger()) == {"s3": (9, 12)}


def test_a_partition_that_was_read_may_go_and_one_with_rows_may_not(
    cluster: FakeEnvironment,
) -> None:
    query = Query()
    query.trigger()
    del cluster.streams["s2"]
    assert Query(query.log).trigger() == []
    assert set(query.start["next"]) == {"s0", "s1"}
    cluster.streams["s1"] = (10, 55)
    slow = Query(query.log, maxOffsetsPerTrigger="2")
    slow.trigger()
    del cluster.streams["s1"]
    for each in (slow, Query(slow.log)):
        with pytest.raises(StreamGone, match=r"'s1' .* is deleted and has 3 offsets that"):
            each.trigger()
    allowed = Query(slow.log, failOnDataLoss="false")
    allowed.trigger()
    assert set(allowed.start["next"]) == {"s0"}
    assert allowed.start["lost"] == {"s1": 3}


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("length", [40, 95, 1_000])
def test_stream_that_was_made_again_is_noticed_also_if_it_has_grown_past_the_checkpoint(
    cluster: FakeEnvironment, length: int, restarts: bool
) -> None:
    """21: what it had before the checkpoint's offset was skipped."""
    query = Query(startingOffsets="earliest", maxOffsetsPerTrigger="40")
    query.trigger()
    unread = 100 - int(query.start["next"]["s0"])
    cluster.made_again["s0"] = 1
    cluster.streams["s0"] = (0, length)
    again = Query(query.log) if restarts else query
    with pytest.raises(StreamGone, match=r"'s0' .* it was deleted and made again"):
        again.trigger()
    with pytest.raises(StreamGone, match=r"'s0' .* it was deleted and made again"):
        again.trigger()
    allowed = Query(query.log, failOnDataLoss="false", minOffsetsPerTrigger="10000")
    tasks = spans(allowed.trigger())
    assert tasks is not None
    assert tasks["s0"] == (0, length)
    assert allowed.start["lost"]["s0"] == unread
    assert allowed.trigger() is None
    cluster.streams["s0"] = (0, length + 10_000)
    assert spans(allowed.trigger()) == {"s0": (length, length + 10_000)}


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("length", [40, 100, 1_000])
def test_stream_that_was_made_again_is_noticed_also_if_it_was_looked_at_while_it_was_empty(
    cluster: FakeEnvironment, length: int, restarts: bool
) -> None:
    """Its first 100 rows were skipped: nothing was left to compare it with."""
    query = Query(startingOffsets="earliest")
    query.trigger()
    cluster.made_again["s0"] = 1
    cluster.streams["s0"] = (0, 0)
    assert query.trigger() is None
    cluster.streams["s1"] = (10, 60)  # a batch, so that what was seen is written down
    assert spans(query.trigger()) == {"s1": (50, 60)}
    cluster.streams["s0"] = (0, length)
    again = Query(query.log) if restarts else query
    with pytest.raises(StreamGone, match=r"'s0' .* it was deleted and made again"):
        again.trigger()


def test_stream_that_is_empty_now_and_was_not_read_to_its_end_is_a_loss(
    cluster: FakeEnvironment,
) -> None:
    """A query that stops by itself ended well, and nobody heard of 60 rows."""
    query = Query(startingOffsets="earliest", maxOffsetsPerTrigger="40")
    query.trigger()
    done = int(query.start["next"]["s0"])
    cluster.streams["s0"] = (0, 0)
    for each in (query, Query(query.log)):
        with pytest.raises(StreamGone, match=rf"'s0' is empty, and {100 - done} offsets of it"):
            each.trigger()
    allowed = Query(query.log, failOnDataLoss="false")
    allowed.trigger()
    assert allowed.start["lost"] == {"s0": 100 - done}
    cluster.streams["s0"] = (100, 120)  # only emptied
    assert spans(allowed.trigger()) == {"s0": (100, 120)}
    assert allowed.start["lost"] == {"s0": 100 - done}


@pytest.mark.usefixtures("cluster")
def test_what_a_lost_stream_had_is_counted_up(cluster: FakeEnvironment) -> None:
    query = Query(startingOffsets="earliest", failOnDataLoss="false")
    query.trigger()
    for first, end, lost in ((120, 130, 20), (130, 140, 20), (145, 150, 25)):
        cluster.streams["s0"] = (first, end)
        query.trigger()
        assert query.start["lost"] == {"s0": lost}


def test_offsets_are_stored_once_each_for_others_to_see(cluster: FakeEnvironment) -> None:
    query = Query(startingOffsets="earliest", storeOffsets="billing")
    query.trigger()
    assert cluster.stored == []
    assert query.trigger() is None  # so the batch is done
    query.reader.commit(query.start)
    assert cluster.stored == [("billing", "s0", 99), ("billing", "s1", 49)]


def test_a_query_that_runs_bears_with_a_cluster_that_is_away(cluster: FakeEnvironment) -> None:
    cluster.failures = 1
    with pytest.raises(Unreachable):
        Query().trigger()
    query = Query()
    query.trigger()
    cluster.failures = 5
    cluster.streams["s0"] = (0, 101)
    assert spans(query.trigger()) == {"s0": (100, 101)}
    cluster.failures = 10**6
    with pytest.raises(Unreachable):
        query.trigger()


@pytest.mark.usefixtures("cluster")
def test_the_latest_offsets_are_reported_beside_what_is_read() -> None:
    query = Query(startingOffsets="earliest", maxOffsetsPerTrigger="5")
    assert query.reader.reportLatestOffset() is None
    query.trigger()
    report = query.reader.reportLatestOffset()
    assert report is not None
    assert report["next"] == {"s0": 100, "s1": 50, "s2": 0}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("meanwhile", ["the same", "made again", "empty at first"])
def test_a_stream_that_comes_back_goes_on_where_it_was_unless_it_is_another(
    cluster: FakeEnvironment, meanwhile: str, restart: bool
) -> None:
    """A node that has just started denied a partition for a moment: all of it was read again."""
    query = Query(startingOffsets="earliest")
    assert spans(query.trigger()) == {"s0": (0, 100), "s1": (10, 50)}
    del cluster.streams["s1"]
    assert not query.trigger()
    cluster.streams["s0"] = (0, 110)
    assert spans(query.trigger()) == {"s0": (100, 110)}
    if restart:
        query = Query(query.log, startingOffsets="earliest")
    cluster.streams["s1"] = (10, 60)
    if meanwhile == "made again":
        cluster.made_again["s1"] = 1
    if meanwhile == "empty at first":
        cluster.streams["s1"] = (0, 0)
        assert not query.trigger()
        cluster.streams["s1"] = (10, 60)
    begin = 10 if meanwhile == "made again" else 50
    assert spans(query.trigger()) == {"s1": (begin, 60)}
    assert spans(query.repeat()) == {"s1": (begin, 60)}
    assert "left" not in json.loads(query.log[-1])


@pytest.mark.parametrize("loss", ["true", "false"])
def test_stream_with_unread_rows_that_is_called_empty_for_a_moment_is_asked_again(
    cluster: FakeEnvironment, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """A leader of 3.10 that was just elected: 90 rows were counted as lost."""
    query = Query(startingOffsets="earliest", maxOffsetsPerTrigger="10", failOnDataLoss=loss)
    query.trigger()
    begins = query.start["next"]["s0"]
    asked: list[str] = []

    def offsets(stream: str) -> Ends | None:
        if stream == "s0" and len(asked) < 3:
            asked.append(stream)
            return None
        return FakeEnvironment.offsets(cluster, stream)

    monkeypatch.setattr(cluster, "offsets", offsets)
    found = spans(query.trigger())
    assert found is not None
    assert found["s0"][0] == begins
    assert "lost" not in query.start


def test_repeated_batch_has_the_partitions_numbers_that_it_was_planned_with(
    cluster: FakeEnvironment,
) -> None:
    query = Query(startingOffsets="earliest")
    planned = query.trigger()
    assert planned is not None
    cluster.streams = {"s-before": (0, 5), **cluster.streams}
    del cluster.streams["s0"]
    assert query.repeat() == planned
    assert [task.partition for task in planned] == [0, 1]


def test_batch_of_a_checkpoint_without_numbers_looks_them_up(cluster: FakeEnvironment) -> None:
    query = Query(startingOffsets="earliest")
    planned = query.trigger()
    without = json.loads(query.log[-1])
    del without["numbers"]
    query.log[-1] = json.dumps(without)
    assert query.repeat() == planned
    del cluster.streams["s0"]
    assert [task.partition for task in query.repeat()] == [-1, 0]
