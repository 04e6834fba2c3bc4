"""`exactly_once` means the rows: what changed between two attempts at a batch costs none unsaid.

Programs 10, s09 and s17 of the audits.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from sharding.stream.environment import StreamEnvironment
from sharding.stream.messages.message import encode_data
from sharding.stream.producer.partitioning import by_hash
from sharding.stream.producer.producer import Producer
from spark import PublishOptions, exactly_once, publish_partition
from spark.write.exactly_once import TaskRows, publish_task_rows, stream_owners
from spark.write.exactly_once_rules import (
    RowsDropped,
    WouldLoseRows,
    content_check,
    producer_name,
    row_ids,
)
from spark.write.messages import Messages
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.spark.sources import add_partitions, bodies, follow, send
from tests.spark.stored import environment_of, one_stream, reach, stored_in, super_stream
from tests.support.sharded import raw_channel

pytestmark = pytest.mark.cluster

ROWS = [(number, number * 7919 % 1_000, b"row %d" % number) for number in range(1_000)]
Change = Callable[[list[tuple[int, int, bytes]]], list[tuple[int, int, bytes]]]
CHANGES: dict[str, tuple[str, Change]] = {
    "nothing": ("number", lambda rows: rows),
    "order_by": ("price", lambda rows: rows),
    "an expression": ("number", lambda rows: [(n, p, b + b"!") for n, p, b in rows]),
    "a row less": ("number", lambda rows: rows[1:]),
    "the source's beginning": ("number", lambda rows: rows[600:]),
    "rows before": ("number", lambda rows: [(-1, 0, b"first"), *rows]),
    "rows after": ("number", lambda rows: [*rows, (1_000, 0, b"last")]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_batch_whose_rows_changed_after_it_was_begun_is_stored_once_or_refused(
    environment: StreamEnvironment, change: str
) -> None:
    """10: 251 of 1,000 rows were lost when order_by was another in the second attempt."""
    order, changed = CHANGES[change]
    query = secrets.token_hex(8)
    with one_stream(environment) as target:
        with environment.producer(target, name=producer_name(query, 0)) as producer:
            half = [encode_data(body) for _, _, body in ROWS[:500]]
            check = content_check([[encode_data(body) for _, _, body in ROWS]])
            version = stream_owners([target], 1, ["number"]).version
            producer.send_encoded(half, publishing_ids=row_ids(0, version, check, 500))
        now = changed(ROWS)
        random.Random(1).shuffle(now := list(now))
        own = stream_owners([target], 1, [order])
        held = TaskRows(own, 0, 1 << 30)
        columns = {"number": [n for n, _, _ in now], "price": [p for _, p, _ in now]}
        held.add([encode_data(body) for _, _, body in now], None, pa.record_batch(columns))
        try:
            publish_task_rows(
                own,
                held,
                query=query,
                batch=0,
                last_id=environment.last_publishing_id,
                open_producer=lambda stream, name: environment.producer(stream, name=name),
                timeout=PATIENCE,
            )
            said = ""
        except WouldLoseRows as error:
            said = str(error)
        stored = [row.body for row in stored_in(environment, [target])[target]]
    wanted = ROWS[:500] if said else sorted(now)
    assert stored == [body for _, _, body in wanted]
    assert ("has 500 rows of batch 0 already" in said) == (change != "nothing")


class Killed(Exception):
    """The task's process."""


class MortalProducer:
    """A producer of a process that dies after some more messages, which are stored."""

    def __init__(self, producer: Producer, life: list[int]) -> None:
        self._producer, self._life = producer, life
        self.last_publishing_ids = producer.last_publishing_ids
        self.flush, self.close = producer.flush, producer.close

    def send_encoded(
        self, messages: Sequence[bytes], *, publishing_ids: Sequence[int], timeout: float
    ) -> None:
        taken = min(self._life[0], len(messages))
        ids = publishing_ids[:taken]
        self._producer.send_encoded(messages[:taken], publishing_ids=ids, timeout=timeout)
        self._life[0] -= taken
        if taken < len(messages):
            self._producer.flush(PATIENCE).raise_for_failures()
            raise Killed


Keyed = tuple[str, int, bytes]  # key, place in the order, message


def attempt(
    environment: StreamEnvironment,
    bound: Sequence[str],
    rows: Sequence[Keyed],
    rng: random.Random,
    *,
    query: str,
    batch: int = 3,
    life: int = 10**9,
) -> None:
    """As Spark does: each row to its task, in any order; `Killed` after `life` messages."""
    left = [life]
    own = stream_owners(bound, rng.randint(1, 4), ["place"])
    for task in rng.sample(range(own.tasks), own.tasks):
        mine = [row for row in rows if own.shard_of(row[0]) % own.tasks == task]
        rng.shuffle(mine)
        held = TaskRows(own, task, 1 << 20)
        places = pa.record_batch({"place": pa.array([place for _, place, _ in mine], pa.int64())})
        messages = Messages([body for _, _, body in mine], [key for key, _, _ in mine])
        held.add(messages.encoded(), [key for key, _, _ in mine], places)
        publish_task_rows(
            own,
            held,
            query=query,
            batch=batch,
            last_id=environment.last_publishing_id,
            open_producer=lambda stream, name: MortalProducer(  # type: ignore[arg-type,return-value]
                environment.producer(stream, name=name), left
            ),
            timeout=PATIENCE,
        )


def changed_rows(rows: list[Keyed], rng: random.Random) -> tuple[str, list[Keyed]]:
    """What a deploy, an operator or retention may do between two attempts at a batch."""
    more = [(f"k{n}", rng.randint(-9, 99), b"new %d" % n) for n in range(rng.randint(1, 9))]
    changes: dict[str, list[Keyed]] = {
        "nothing": rows,
        "order": [(key, rng.randint(0, 99), body) for key, _, body in rows],
        "expression": [(key, place, body + b"!") for key, place, body in rows],
        "one row's expression": [(k, p, b + b"!" * (b == rows[0][2])) for k, p, b in rows],
        "keys": [(key.upper(), place, body) for key, place, body in rows],
        "beginning lost": rows[rng.randint(1, len(rows)) :],
        "some lost": rng.sample(rows, rng.randint(0, len(rows) - 1)),
        "more rows": [*rows, *more],
        "other rows": more,
    }
    change = rng.choice(list(changes))
    return change, changes[change]


@pytest.mark.parametrize("seed", range(int(os.environ.get("WARREN_CHANGED_BATCHES", "6"))))
def test_whatever_changes_between_attempts_all_rows_are_stored_once_or_none_is_lost(
    cluster: Cluster, environment: StreamEnvironment, seed: int
) -> None:
    """Query, options, checkpoint, source and partitions; killed anywhere in the first attempt."""
    rng = random.Random(seed)
    query, name = secrets.token_hex(8), f"changed-{secrets.token_hex(4)}"
    rows = [(f"k{rng.randint(0, 30)}", rng.randint(0, 9), b"%d" % n) for n in range(60)]
    environment.create_super_stream(name, partitions=rng.randint(1, 3))
    try:
        bound = environment.bound_streams(name)
        life = rng.choice([rng.randint(0, 60), 10**9])
        with suppress(Killed):
            attempt(environment, bound, rows, rng, query=query, life=life)
        later: list[Keyed] = []
        if life > 60 and rng.random() < 0.3:  # the next batch, which the checkpoint then forgets
            later = [(f"k{n}", n, b"later %d" % n) for n in range(rng.randint(1, 20))]
            attempt(environment, bound, later, rng, query=query, batch=4)
        before = stored_in(environment, environment.partitions(name))
        change, now = changed_rows([*rows, *later], rng)
        if rng.random() < 0.3:
            change += ", partitions"
            bound = (*bound, *add_partitions(cluster, name, first=len(bound), count=1))
        said = None
        try:
            attempt(environment, bound, now, rng, query=query)
        except WouldLoseRows as refused:
            said = str(refused)
        stored = stored_in(environment, dict.fromkeys(bound))
    finally:
        environment.delete_super_stream(name)
    print(f"seed {seed}: {change}, killed after {life}, later {len(later)}: {said or 'stored'}")
    if said is None:
        for stream, found in stored.items():
            wanted = [(p, k, b) for k, p, b in now if bound[by_hash(k, len(bound))] == stream]
            assert [(row.key, row.body) for row in found] == [
                (k, b) for _, k, b in by_order(wanted)
            ]
    else:
        assert change != "nothing" or later
        for stream, found in before.items():
            assert stored[stream][: len(found)] == found


class OvertakenProducer:
    """A producer of a task that stands still before it sends anything."""

    def __init__(self, producer: Producer, meanwhile: Callable[[], None]) -> None:
        self._producer, self._meanwhile = producer, meanwhile
        self.last_publishing_ids = producer.last_publishing_ids
        self.flush, self.close = producer.flush, producer.close

    def send_encoded(
        self, messages: Sequence[bytes], *, publishing_ids: Sequence[int], timeout: float
    ) -> None:
        self._meanwhile()
        self._producer.send_encoded(messages, publishing_ids=publishing_ids, timeout=timeout)


@pytest.mark.parametrize("seed", range(4))  # whose ids are above the other's is by the rows
def test_task_given_up_that_publishes_other_rows_meanwhile_costs_none_unsaid(
    cluster: Cluster, environment: StreamEnvironment, seed: int
) -> None:
    """40 of 100 rows were dropped, and the task said that all are stored."""
    query = secrets.token_hex(8)
    meant = [b"meant %d %d" % (seed, number) for number in range(100)]
    other = [b"other %d %d" % (seed, number) for number in range(40)]

    def publish(
        process: StreamEnvironment, rows: list[bytes], meanwhile: Callable[[], None] = lambda: None
    ) -> str | None:
        own = stream_owners([target], 1, [])
        held = TaskRows(own, 0, 1 << 20)
        held.add(list(map(encode_data, rows)), None, pa.record_batch({"value": rows}))
        try:
            publish_task_rows(
                own,
                held,
                query=query,
                batch=0,
                last_id=process.last_publishing_id,
                open_producer=lambda stream, name: OvertakenProducer(  # type: ignore[arg-type,return-value]
                    process.producer(stream, name=name), meanwhile
                ),
                timeout=PATIENCE,
            )
        except (WouldLoseRows, RowsDropped) as error:
            return str(error)
        return None

    with one_stream(environment) as target, environment_of(cluster) as another:
        zombie: list[str | None] = []
        said = publish(environment, meant, lambda: zombie.append(publish(another, other)))
        stored = Counter(row.body for row in stored_in(environment, [target])[target])
    assert zombie == [None]  # at its time nobody had published
    assert all(stored[body] == 1 for body in other)
    if said is None:
        assert all(stored[body] == 1 for body in meant)
    else:
        assert "Some of these rows may not be stored" in said


def by_order(rows: list[tuple[int, str, bytes]]) -> list[tuple[int, str, bytes]]:
    """By place, then by the whole message."""
    return sorted(rows, key=lambda row: (row[0], Messages([row[2]], [row[1]]).encoded()[0]))


def run(
    session: SparkSession,
    cluster: Cluster,
    source: str,
    folder: Path,
    columns: Sequence[str | Column] = ("value",),
    **options: Any,
) -> str | None:
    """What a query that stores the source exactly once, and then stops, failed with."""
    rows: DataFrame = follow(session, cluster, stream=source, startingOffsets="earliest")
    how: dict[str, Any] = {**reach(cluster), **options}
    writer = exactly_once(rows.select(*columns), **how)
    writer = writer.option("checkpointLocation", str(folder))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(4 * round(PATIENCE))
    except PySparkException as error:
        return str(error)
    return None


def test_checkpoint_that_was_set_back_by_one_batch_is_refused_and_costs_no_row(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    """s17: 251 of 1,500 rows were lost, and 251 stored twice."""
    any_order = [b"%d" % (number * 7919 % 100_003) for number in range(1_500)]
    with one_stream(environment) as source, one_stream(environment) as target:
        send(environment, source, any_order[:500])
        assert run(session, cluster, source, tmp_path / "c", stream=target) is None
        shutil.copytree(tmp_path / "c", tmp_path / "backup")
        send(environment, source, any_order[500:1_000])
        assert run(session, cluster, source, tmp_path / "c", stream=target) is None
        newest = tmp_path / "newest"
        (tmp_path / "c").rename(newest)
        (tmp_path / "backup").rename(tmp_path / "c")
        send(environment, source, any_order[1_000:])
        said = run(session, cluster, source, tmp_path / "c", stream=target)
        assert said is not None
        assert "has 500 rows of batch 1 already" in said
        assert len(stored_in(environment, [target])[target]) == 1_000
        shutil.rmtree(tmp_path / "c")
        newest.rename(tmp_path / "c")
        assert run(session, cluster, source, tmp_path / "c", stream=target) is None
        stored = Counter(row.body for row in stored_in(environment, [target])[target])
    assert stored == Counter(any_order)


def test_partition_with_two_binding_keys_is_one_for_producers_and_spark(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    """s09: exactly_once stored 2,000 of 3,000 rows; 111 of 200 keys were elsewhere by the sink."""
    keys = [f"k{number}" for number in range(300)]
    name = f"regions-{secrets.token_hex(4)}"
    environment.create_super_stream(name, binding_keys=["emea", "apac"])
    try:
        emea, apac = f"{name}-emea", f"{name}-apac"
        with raw_channel(cluster.nodes[0]) as channel:
            first, hole = {"x-stream-partition-order": 0}, {"x-stream-partition-order": 7}
            channel.queue_bind(emea, name, "uk", arguments=first)
            channel.queue_bind(apac, name, "nz", arguments=hole)
            other = channel.queue_declare("", exclusive=True).method.queue
            channel.queue_bind(other, name, "emea")
            with StreamEnvironment(
                *(node.endpoint.stream_url for node in cluster.nodes), options=environment.options
            ) as fresh:
                assert fresh.partitions(name) == (emea, apac)
                bound = fresh.bound_streams(name)
                assert bound == (emea, emea, apac, apac)
                # As the Java client chooses: from the broker's list as it is.
                places = {key: bound[by_hash(key, len(bound))] for key in keys}
                with fresh.producer(name, name="billing") as producer:
                    assert {key: producer.partition(key) for key in keys} == places
                    producer.send_many([b"by producer"] * len(keys), keys)
        sink = PublishOptions.of(superStream=name, **reach(cluster))
        publish_partition([(key, b"by sink") for key in keys], sink)
        with one_stream(environment) as source:
            send(environment, source, [b"exactly once"] * len(keys), keys=keys)
            columns = ("key", "value", "offset")
            how: dict[str, Any] = {"superStream": name, "order_by": ["offset"]}
            assert run(session, cluster, source, tmp_path / "c", columns, **how) is None
        stored = stored_in(environment, (emea, apac))
    finally:
        environment.delete_super_stream(name)
    for body in (b"by producer", b"by sink", b"exactly once"):
        found = {
            row.key: stream for stream, rows in stored.items() for row in rows if row.body == body
        }
        assert found == places, body
    assert sum(map(len, stored.values())) == 3 * len(keys)


def test_key_expression_that_changed_between_attempts_is_refused(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    """A row that goes to another stream in the second attempt would be stored in both."""
    with super_stream(environment, partitions=2) as target, one_stream(environment) as source:
        send(environment, source, bodies(20))
        keys = (next(key for key in "abcdefgh" if by_hash(key, 2) == place) for place in (0, 1))
        one, other = (f.lit(key).alias("key") for key in keys)
        how: dict[str, Any] = {"superStream": target}
        assert run(session, cluster, source, tmp_path, ("value", one), **how) is None
        for name in ("0", ".0.crc"):  # as if the driver had died before it noted the batch
            (tmp_path / "commits" / name).unlink(missing_ok=True)
        said = run(session, cluster, source, tmp_path, ("value", other), **how)
        assert said is not None
        assert "has 20 rows of batch 0 already, but they are none of the 0 that" in said
