"""The ids of exactly-once depend on a batch's rows alone; what would lose rows is refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.outcomes import Report
from spark.options.values import BadOption
from spark.write.exactly_once import BatchTooLarge, TaskRows, publish_task_rows, stream_owners
from spark.write.exactly_once_rules import StreamOwners, WouldLoseRows, check_last_id, first_id

STREAMS = ("a-0", "a-1", "a-2")


class Crash(Exception):
    """The process was killed."""


class ModelBroker:
    """Streams that drop what is not above the last id of a name."""

    def __init__(self, crash_after: int | None = None) -> None:
        self.streams: dict[str, list[bytes]] = {}
        self.last_ids: dict[tuple[str, str], int] = {}
        self.crash_after = crash_after

    def open(self, stream: str, name: str) -> Any:
        return ModelProducer(self, stream, name)

    def publish(self, stream: str, name: str, publishing_id: int, message: bytes) -> None:
        if self.crash_after is not None:
            if self.crash_after == 0:
                raise Crash
            self.crash_after -= 1
        if publishing_id > self.last_ids.get((stream, name), 0):
            self.last_ids[stream, name] = publishing_id
            self.streams.setdefault(stream, []).append(message)


class ModelProducer:
    def __init__(self, broker: ModelBroker, stream: str, name: str) -> None:
        self._broker, self._stream, self._name = broker, stream, name
        self._sent = 0

    @property
    def last_publishing_ids(self) -> dict[str, int]:
        return {self._stream: self._broker.last_ids.get((self._stream, self._name), 0)}

    def send_encoded(
        self, messages: Sequence[bytes], *, publishing_ids: Sequence[int], timeout: float
    ) -> None:
        assert timeout > 0
        for message, publishing_id in zip(messages, publishing_ids, strict=True):
            self._broker.publish(self._stream, self._name, publishing_id, message)
            self._sent += 1

    def flush(self, timeout: float) -> Report:
        assert timeout > 0
        return Report(stored=self._sent)

    def close(self, timeout: float) -> None:
        assert timeout > 0


Row = tuple[str, int, bytes]  # key, place in the order, message


def run_batch(
    broker: ModelBroker, rows: Sequence[Row], *, batch: int, tasks: int, rng: random.Random
) -> int:
    """As Spark does: each row to its task, in any order, cut into batches anyhow."""
    own = stream_owners(STREAMS, tasks, ["place"])
    stored = 0
    for task in range(own.tasks):
        mine = [row for row in rows if own.shard_of(row[0]) % own.tasks == task]
        rng.shuffle(mine)
        held = TaskRows(own, task, max_bytes=1 << 20)
        while mine:
            cut = rng.randint(1, len(mine))
            part, mine = mine[:cut], mine[cut:]
            add(held, part)
        stored += publish_task_rows(
            own, held, query="q", batch=batch, open_producer=broker.open, timeout=1
        )
    return stored


def add(held: TaskRows, rows: Sequence[Row]) -> None:
    keys, places, messages = zip(*rows, strict=True)
    held.add(messages, keys, pa.record_batch([pa.array(places, pa.int64())], names=["place"]))


@settings(max_examples=40)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 5), st.binary(max_size=2)),
        min_size=1,
        max_size=40,
    ),
    crash=st.integers(0, 40),
    tasks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    rng=st.randoms(use_true_random=False),
)
def test_replay_in_another_order_and_other_tasks_stores_every_row_once(
    rows: list[Row], crash: int, tasks: tuple[int, int], rng: random.Random
) -> None:
    broker = ModelBroker(crash_after=crash)
    with contextlib.suppress(Crash):
        run_batch(broker, rows, batch=4, tasks=tasks[0], rng=rng)
    broker.crash_after = None
    assert run_batch(broker, rows, batch=4, tasks=tasks[1], rng=rng) == len(rows)

    own = stream_owners(STREAMS, 1, ["place"])
    for number, stream in enumerate(STREAMS):
        expected = sorted((row[1], row[2]) for row in rows if own.shard_of(row[0]) == number)
        assert broker.streams.get(stream, []) == [message for _, message in expected]


def test_next_batch_is_stored_after_the_one_before() -> None:
    broker, rng = ModelBroker(), random.Random(1)
    for batch in (0, 1, 5):
        run_batch(broker, [("k", 0, b"%d" % batch)], batch=batch, tasks=3, rng=rng)
    assert list(broker.streams.values()) == [[b"0", b"1", b"5"]]


def test_row_of_another_tasks_stream_is_refused_before_anything_is_published() -> None:
    own = stream_owners(STREAMS, 3, ["place"])
    key = next(key for key in "abcdefgh" if own.shard_of(key) == 2)
    with pytest.raises(WouldLoseRows, match="task 0 of 3 was given rows of 'a-2'"):
        add(TaskRows(own, 0, 1 << 20), [(key, 0, b"m")])


def test_checkpoint_older_than_the_stream_is_refused_before_anything_is_published() -> None:
    broker, rng = ModelBroker(), random.Random(1)
    rows = [(key, 0, key.encode()) for key in "abcdefgh"]
    run_batch(broker, rows, batch=3, tasks=1, rng=rng)
    before = {stream: list(messages) for stream, messages in broker.streams.items()}
    with pytest.raises(WouldLoseRows, match="has rows of batch 3 of this query already"):
        run_batch(broker, rows, batch=2, tasks=1, rng=rng)
    assert broker.streams == before


def test_replay_with_fewer_rows_than_are_stored_is_refused() -> None:
    check_last_id(first_id(2) + 1, 2, 2, "a")
    with pytest.raises(WouldLoseRows, match="has 2 rows of batch 2 already"):
        check_last_id(first_id(2) + 1, 2, 1, "a")


def test_rows_of_a_task_are_bounded_and_the_error_names_the_option() -> None:
    held = TaskRows(stream_owners(["a"], None, []), 0, max_bytes=1_000)
    empty = pa.record_batch([pa.array([0])], names=["x"])
    held.add([b"x" * 900], None, empty)
    with pytest.raises(BatchTooLarge, match="maxTaskBytes"):
        held.add([b"x" * 900], None, empty)


def test_more_tasks_than_streams_are_not_made() -> None:
    assert stream_owners(STREAMS, 99, []).tasks == stream_owners(STREAMS, None, []).tasks == 3
    with pytest.raises(BadOption, match="at least 1"):
        stream_owners(STREAMS, 0, [])


def test_what_the_tasks_are_told_survives_the_way_there() -> None:
    own = StreamOwners(STREAMS, 2, ("place", "other"))
    assert StreamOwners.loads("ownShards", own.dumps()) == own


@pytest.mark.parametrize("values", [[None, 1.0, float("nan"), -0.0, 0.0], ["b", None, "a"]])
def test_order_is_the_same_for_nulls_and_numbers_that_are_none(values: list[Any]) -> None:
    own = StreamOwners(("a",), 1, ("place",))
    rng, found = random.Random(7), set()
    rows = [(value, b"%d" % number) for number, value in enumerate(values)]
    for _ in range(10):
        rng.shuffle(rows)
        held = TaskRows(own, 0, 1 << 20)
        for value, message in rows:
            kind = pa.string() if isinstance(values[0], str) else pa.float64()
            held.add([message], None, pa.record_batch([pa.array([value], kind)], names=["place"]))
        found.add(tuple(message for part in held.ordered(0) for message in part))
    assert len(found) == 1
