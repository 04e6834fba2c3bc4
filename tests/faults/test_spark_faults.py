"""Streaming queries whose workers, drivers and brokers are killed: what is promised, by row.

The copied rows are shuffled on their way, and the number of cores, of shuffled partitions, of
reading and of publishing tasks differs from one start of the driver to the next. Nothing may be
lost by any sink; `exactly_once` stores nothing twice and keeps the order, the others' duplicates
are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sharding.stream.environment import StreamEnvironment
from spark import PublishOptions, publish_partition
from tests.cluster import Cluster, Node, wait_until
from tests.faults.spark_driver import Copy
from tests.faults.spark_kills import RUN_TIMEOUT, Driver, kill_workers
from tests.spark.stored import (
    Orders,
    StoredRow,
    amqp_uri,
    count_of,
    environment_of,
    reach,
    sharded_queue,
    stored_in,
    stream_uri,
    super_stream,
)
from tests.support.sharded import drain, shards_in_broker, topology_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.twin(
        "spark/test_exactly_once.py::"
        "test_batch_that_is_run_again_in_another_order_and_other_tasks_is_stored_once"
    ),
]

ORDERS = Orders(keys=100, of_each=200)
ROWS_PER_BATCH = 5_000
every_sink = pytest.mark.parametrize("sink", ["exactly_once", "stream", "queue"])


@dataclass(frozen=True)
class Target:
    """Where rows are copied to."""

    name: str
    count: Callable[[], int]
    rows: Callable[[], Mapping[str, Sequence[StoredRow]]]
    leader: Callable[[], Node]
    """A node that leads one of its streams, or holds one of its queues."""


@contextmanager
def target_of(sink: str, cluster: Cluster, environment: StreamEnvironment) -> Iterator[Target]:
    if sink == "queue":
        with (
            sharded_queue(cluster) as logical,
            topology_of(cluster.nodes, options=None) as topology,
        ):
            shards = shards_in_broker(cluster, logical)
            yield Target(
                logical,
                lambda: sum(each.messages for each in topology.look_at(shards).values() if each),
                lambda: queued_in(cluster, shards),
                lambda: next(node for node in cluster.nodes if node.name in shards.values()),
            )
        return
    with super_stream(environment, partitions=4) as name:
        streams = environment.partitions(name)
        yield Target(
            name,
            lambda: count_of(environment, streams),
            lambda: stored_in(environment, streams),
            lambda: leader_of(cluster, environment, streams[0]),
        )


def leader_of(cluster: Cluster, environment: StreamEnvironment, stream: str) -> Node:
    leader = environment.route(stream).leader
    assert leader is not None
    return next(node for node in cluster.nodes if node.endpoint.address == leader.host)


def queued_in(cluster: Cluster, shards: Mapping[str, str]) -> dict[str, list[StoredRow]]:
    found: dict[str, list[StoredRow]] = {shard: [] for shard in shards}
    for shard, key, body in drain(cluster.nodes[0], shards):
        found[shard].append(StoredRow(key, body))
    return found


@contextmanager
def source_of(cluster: Cluster, environment: StreamEnvironment) -> Iterator[str]:
    """A super stream with all orders."""
    with super_stream(environment) as name:
        publish_partition(ORDERS, PublishOptions.of(superStream=name, **reach(cluster)))
        yield name


@contextmanager
def copying(sink: str, cluster: Cluster, folder: Path) -> Iterator[tuple[Driver, Target]]:
    with (
        environment_of(cluster) as environment,
        source_of(cluster, environment) as source,
        target_of(sink, cluster, environment) as target,
    ):
        copy = Copy(
            sink=sink,
            source=source,
            target=target.name,
            checkpoint=str(folder / "checkpoint"),
            uri=stream_uri(cluster),
            amqp_uri=amqp_uri(cluster),
            rows_per_batch=ROWS_PER_BATCH,
        )
        yield Driver(copy, folder / "driver.log"), target


def judge(sink: str, what: str, stored: Mapping[str, Sequence[StoredRow]]) -> None:
    lost, twice = ORDERS.lost_and_twice(stored)
    print(f"\n{sink}, {what}: {len(ORDERS):,} rows, {lost:,} lost, {twice:,} twice")
    assert lost == 0
    if sink == "exactly_once":
        assert twice == 0
        ORDERS.assert_in_order(stored)


@every_sink
def test_drivers_killed_mid_batch(sink: str, cluster: Cluster, tmp_path: Path) -> None:
    with copying(sink, cluster, tmp_path) as (driver, target):
        seen = []
        for batch in range(3):
            middle = batch * ROWS_PER_BATCH + ROWS_PER_BATCH // 4
            driver.kill_when(lambda middle=middle: target.count() > middle)  # type: ignore[misc]
            seen.append(target.count())
        driver.finish()
        stored = target.rows()
    if sink == "exactly_once":
        assert any(count % ROWS_PER_BATCH for count in seen), f"none died in a batch: {seen}"
    judge(sink, f"3 drivers killed with {seen} rows stored", stored)


@every_sink
def test_python_workers_killed_mid_batch(sink: str, cluster: Cluster, tmp_path: Path) -> None:
    killed = []
    with copying(sink, cluster, tmp_path) as (driver, target):
        with driver.started() as process:
            for part in (1, ROWS_PER_BATCH // 2, 2 * ROWS_PER_BATCH):
                wait_until(
                    lambda part=part: target.count() >= part or process.poll() is not None,  # type: ignore[misc]
                    RUN_TIMEOUT,
                )
                killed.append(kill_workers(process))
            process.wait(timeout=RUN_TIMEOUT)
        driver.finish()
        stored = target.rows()
    assert sum(killed), "no worker was there to be killed"
    judge(sink, f"{killed} Python workers killed", stored)


@every_sink
def test_leader_killed_mid_batch(sink: str, harmed: Cluster, tmp_path: Path) -> None:
    with copying(sink, harmed, tmp_path) as (driver, target):
        victim = target.leader()
        with driver.started() as process:
            wait_until(lambda: target.count() > ROWS_PER_BATCH // 2, RUN_TIMEOUT)
            victim.kill()
            if sink == "queue":
                # A queue is on one node, so there is no going on without it.
                victim.restart()
            ended = process.wait(timeout=RUN_TIMEOUT)
        if sink != "queue":
            victim.restart()
        starts = driver.finish()
        stored = target.rows()
    judge(sink, f"leader killed, driver ended with {ended}, {starts} starts after it", stored)
