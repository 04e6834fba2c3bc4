"""The ids of exactly-once depend on a batch's rows alone; what would lose rows is refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.outcomes import Report
from sharding.stream.producer.partitioning import by_hash
from spark.options.values import BadOption
from spark.write.exactly_once import (
    BatchTooLarge,
    TaskRows,
    exactly_once,
    publish_task_rows,
    stream_owners,
)
from spark.write.exactly_once_rules import (
    BATCHES,
    MAX_RANK,
    VERSION_BITS,
    RowsDropped,
    StreamOwners,
    WouldLoseRows,
    check_known_rows,
    content_check,
    producer_name,
    row_ids,
)

STREAMS = ("a-0", "a-1", "a-2")


class Crash(Exception):
    """The process was killed."""


class ModelBroker:
    """Streams that drop what is not above the last id of a name."""

    def __init__(self, crash_after: int | None = None) -> None:
        self.streams: dict[str, list[bytes]] = {}
        self.last_ids: dict[tuple[str, str], int] = {}
        self.crash_after = crash_after
        self.before_message: dict[int, Callable[[], object]] = {}
        self._came = 0

    def open(self, stream: str, name: str) -> Any:
        return ModelProducer(self, stream, name)

    def last_id(self, name: str, stream: str) -> int:
        return self.last_ids.get((stream, name), 0)

    def publish(self, stream: str, name: str, publishing_id: int, message: bytes) -> None:
        intrude = self.before_message.pop(self._came, None)
        self._came += 1
        if intrude is not None:
            intrude()
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
    broker: ModelBroker,
    rows: Sequence[Row],
    *,
    batch: int,
    tasks: int,
    rng: random.Random,
    bound: Sequence[str] = STREAMS,
) -> int:
    """As Spark does: one task after the other."""
    own = stream_owners(bound, tasks, ["place"])
    return sum(run_task(broker, own, task, rows, batch, rng) for task in range(own.tasks))


def run_task(
    broker: ModelBroker,
    own: StreamOwners,
    task: int,
    rows: Sequence[Row],
    batch: int,
    rng: random.Random,
) -> int:
    """A task with its rows, in any order, cut into batches anyhow."""
    mine = [row for row in rows if own.shard_of(row[0]) % own.tasks == task]
    rng.shuffle(mine)
    held = TaskRows(own, task, max_bytes=1 << 20)
    while mine:
        cut = rng.randint(1, len(mine))
        part, mine = mine[:cut], mine[cut:]
        add(held, part)
    return publish_task_rows(
        own,
        held,
        query="q",
        batch=batch,
        last_id=broker.last_id,
        open_producer=broker.open,
        timeout=1,
    )


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


@settings(max_examples=200)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 5), st.binary(max_size=2)),
        min_size=1,
        max_size=40,
    ),
    crash=st.integers(0, 41),
    change=st.sampled_from(
        ["nothing", "order", "encoding", "keys", "fewer", "first lost", "more", "partitions"]
    ),
    rng=st.randoms(use_true_random=False),
)
def test_replay_of_a_batch_that_changed_stores_its_rows_once_or_is_refused_and_loses_none(
    rows: list[Row], crash: int, change: str, rng: random.Random
) -> None:
    """Whatever was changed between two attempts, and wherever the first one ended."""
    rows = [(key, place, b"%d %s" % (at, body)) for at, (key, place, body) in enumerate(rows)]
    broker = ModelBroker(crash_after=crash)
    with contextlib.suppress(Crash):
        run_batch(broker, rows, batch=4, tasks=2, rng=rng)
    broker.crash_after = None
    before = {stream: list(messages) for stream, messages in broker.streams.items()}
    changed = {
        "nothing": rows,
        "order": [(key, -place, body) for key, place, body in rows],
        "encoding": [(key, place, body + b".") for key, place, body in rows],
        "keys": [(key.upper(), place, body) for key, place, body in rows],
        "fewer": rows[: len(rows) // 2],
        "first lost": rows[1:],
        "more": [*rows, *((key, place, body + b" new") for key, place, body in rows)],
        "partitions": rows,
    }[change]
    bound = (*STREAMS, "a-3") if change == "partitions" else STREAMS
    try:
        run_batch(broker, changed, batch=4, tasks=1, rng=rng, bound=bound)
    except WouldLoseRows:
        assert change != "nothing"
        assert broker.streams == before
    else:
        own = stream_owners(bound, 1, ["place"])
        for number, stream in enumerate(bound):
            wanted = sorted((row[1], row[2]) for row in changed if own.shard_of(row[0]) == number)
            assert broker.streams.get(stream, []) == [message for _, message in wanted]


@settings(max_examples=100)
@given(
    rows=st.integers(1, 30),
    others=st.integers(1, 30),
    before=st.integers(0, 30),
    dies_after=st.integers(0, 30),
    shared=st.integers(0, 30),
    salt=st.binary(max_size=2),
)
def test_rows_are_stored_if_a_task_says_so_whatever_a_task_given_up_publishes_meanwhile(
    rows: int, others: int, before: int, dies_after: int, shared: int, salt: bytes
) -> None:
    """A zombie with other rows of the batch: the first ones were dropped for its own, unsaid."""
    broker, rng = ModelBroker(), random.Random(1)
    meant = [("k", at, b"meant %d %s" % (at, salt)) for at in range(rows)]
    other = [*meant[:shared], *(("k", at, b"other %d" % at) for at in range(shared, others))]
    zombie_says: list[BaseException | None] = []

    def zombie() -> None:
        broker.crash_after = dies_after
        try:
            run_batch(broker, other, batch=4, tasks=1, rng=rng)
            zombie_says.append(None)
        except (Crash, WouldLoseRows, RowsDropped) as error:
            zombie_says.append(error)
        broker.crash_after = None

    broker.before_message[before] = zombie
    says: BaseException | None = None
    try:
        run_batch(broker, meant, batch=4, tasks=1, rng=rng)
    except RowsDropped as error:
        says = error
    stored = [message for messages in broker.streams.values() for message in messages]
    for said, wanted in ((says, meant), *((each, other) for each in zombie_says)):
        if said is None:
            mine = {message for _, _, message in wanted}
            found = [message for message in stored if message in mine]
            assert set(found) == mine


def test_stream_that_has_rows_of_a_batch_which_now_has_none_for_it_is_refused() -> None:
    """Another key: the row would be in two streams."""
    broker, rng = ModelBroker(), random.Random(1)
    own = stream_owners(STREAMS, 1, ["place"])
    key, other = "a", next(key for key in "bcdefgh" if own.shard_of(key) != own.shard_of("a"))
    run_batch(broker, [(key, 0, b"m")], batch=3, tasks=3, rng=rng)
    with pytest.raises(WouldLoseRows, match="has 1 rows of batch 3 already"):
        run_batch(broker, [(other, 0, b"m")], batch=3, tasks=1, rng=rng)
    assert list(broker.streams.values()) == [[b"m"]]


BEGUN = StreamOwners(STREAMS, 3, ("place",), ("value", "key", "", ""))


@pytest.mark.parametrize(
    "changed",
    [
        replace(BEGUN, bound=(*STREAMS, "a-3"), tasks=4),
        replace(BEGUN, bound=STREAMS[::-1]),
        replace(BEGUN, order_by=()),
        replace(BEGUN, columns=("value", "other", "", "")),
    ],
    ids=["a partition more", "partitions in another order", "order", "columns"],
)
def test_batch_that_was_begun_otherwise_is_refused_by_every_task_and_can_end_as_it_began(
    changed: StreamOwners,
) -> None:
    """Only the task whose stream had rows refused: rows of the others were stored where they belong
    now, and then neither version could end the batch."""
    broker, rng = ModelBroker(), random.Random(1)
    rows = [(f"k{number}", number, b"%d" % number) for number in range(30)]
    run_task(broker, BEGUN, 0, rows, 7, rng)
    before = {stream: list(messages) for stream, messages in broker.streams.items()}
    for task in range(changed.tasks):
        with pytest.raises(WouldLoseRows, match=r"has .*rows of batch 7 already"):
            run_task(broker, changed, task, rows, 7, rng)
    assert broker.streams == before
    for tasks in (1, 3):  # how many there are is no matter
        own = replace(BEGUN, tasks=tasks)
        assert sum(run_task(broker, own, task, rows, 7, rng) for task in range(tasks)) == 30
    stored = sorted(int(message) for messages in broker.streams.values() for message in messages)
    assert stored == list(range(30))


def test_checkpoint_older_than_any_stream_is_refused_by_every_task() -> None:
    broker, rng = ModelBroker(), random.Random(1)
    rows = [(f"k{number}", number, b"%d" % number) for number in range(30)]
    run_task(broker, BEGUN, 0, rows, 8, rng)
    for task in range(3):
        with pytest.raises(WouldLoseRows, match="has rows of batch 8 of this query already"):
            run_task(broker, BEGUN, task, rows, 7, rng)


def test_stream_that_is_bound_twice_is_one_stream_and_gets_the_keys_of_both() -> None:
    """s09: two tasks published to it under one name, and a third of all rows was lost."""
    broker, rng = ModelBroker(), random.Random(1)
    bound = ("emea", "emea", "apac")
    rows = [(f"k{number}", 0, b"%d" % number) for number in range(300)]
    assert run_batch(broker, rows, batch=0, tasks=9, rng=rng, bound=bound) == 300
    assert sum(map(len, broker.streams.values())) == 300
    for number in range(300):
        stream = bound[by_hash(f"k{number}", 3)]  # as the Java client does
        assert b"%d" % number in broker.streams[stream]


def test_ids_rise_from_batch_to_batch_and_from_row_to_row() -> None:
    last = 0
    for batch in (0, 1, 2, BATCHES - 1):
        check = content_check([[b"b", b"a"], [b"", b"a"]])
        for found in row_ids(batch, (1 << VERSION_BITS) - 1, check, 4):
            assert last < found < 2**63
            last = found


def test_check_is_of_the_rows_and_their_order_and_not_of_how_they_are_cut() -> None:
    assert content_check([[b"a", b"b"]]) == content_check([[b"a"], [], [b"b"]])
    assert content_check([[b"a", b"b"]]) != content_check([[b"b", b"a"]])


def test_name_changes_before_batches_run_out_and_an_older_name_is_refused() -> None:
    broker, rng = ModelBroker(), random.Random(1)
    for batch in (BATCHES - 1, BATCHES, BATCHES + 1):
        run_batch(broker, [("k", 0, b"%d" % batch)], batch=batch, tasks=3, rng=rng)
    names = {producer_name("q", 0), producer_name("q", BATCHES)}
    assert {name for _, name in broker.last_ids} == names
    assert sum(map(len, broker.streams.values())) == 3
    for older in (BATCHES, BATCHES - 1):
        with pytest.raises(WouldLoseRows, match="the checkpoint is older than the stream"):
            run_batch(broker, [("k", 0, b"%d" % older)], batch=older, tasks=3, rng=rng)


def test_replay_with_fewer_rows_than_are_stored_is_refused() -> None:
    last = row_ids(2, 5, 77, 3)[1]
    check_known_rows(last, 2, row_ids(2, 5, 77, 3), "a")
    with pytest.raises(WouldLoseRows, match="has 2 rows of batch 2 already"):
        check_known_rows(last, 2, row_ids(2, 5, 77, 1), "a")


def test_more_rows_than_there_are_ranks_are_refused() -> None:
    with pytest.raises(WouldLoseRows, match="4194303 rows for a stream at most"):
        check_known_rows(0, 2, row_ids(2, 5, 77, MAX_RANK + 1), "a")


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


class ConnectFrame:
    """All that is known of a DataFrame before the broker is asked; the classic one has a `_jdf`."""

    isStreaming = True  # noqa: N815


def test_password_is_refused_under_connect_which_would_show_it() -> None:
    rows: Any = ConnectFrame()
    with pytest.raises(BadOption, match=r"'password'.*passwordFile or passwordEnv") as told:
        exactly_once(rows, stream="a", password="Kanarienvogel")
    assert "Kanarienvogel" not in str(told.value)


def test_what_the_tasks_are_told_survives_the_way_there() -> None:
    own = StreamOwners((*STREAMS, "a-0"), 2, ("place", "other"), ("value", "key", "", ""))
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
