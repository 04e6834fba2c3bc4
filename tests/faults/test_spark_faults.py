"""Streaming queries whose workers, drivers and brokers are killed: what is promised, by row.

The copied rows are shuffled on their way, and the number of cores, of shuffled partitions, of
reading and of publishing tasks differs from one start of the driver to the next.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sharding.stream.environment import StreamEnvironment
from spark import PublishOptions, publish_partition
from tests.cluster import Cluster, wait_until
from tests.faults.spark_driver import Copy
from tests.machine import PROJECT
from tests.sharded import drain, shards_in_broker, topology_of
from tests.spark.stored import (
    Orders,
    amqp_uri,
    count_of,
    environment_of,
    sharded_queue,
    stored_in,
    stream_uri,
    super_stream,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ORDERS = Orders(keys=100, of_each=200)
ROWS_PER_BATCH = 5_000
RUN_TIMEOUT = 240.0
SHAPES: Iterator[dict[str, Any]] = itertools.cycle(
    [
        {"cores": "local[2,8]", "shuffled_into": 3, "tasks": 3, "read_partitions": 1},
        {"cores": "local[1,8]", "shuffled_into": 2, "tasks": 1, "read_partitions": 5},
        {"cores": "local[3,8]", "shuffled_into": 5, "tasks": 2, "read_partitions": 4},
    ]
)


@pytest.fixture
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster) as made:
        yield made


@pytest.fixture
def source(cluster: Cluster, environment: StreamEnvironment) -> Iterator[str]:
    """A super stream with all orders."""
    with super_stream(environment) as name:
        publish_partition(ORDERS, PublishOptions.of(superStream=name, uri=stream_uri(cluster)))
        yield name


@contextmanager
def driver(copy: Copy, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The driver in a process group of its own; nothing of it is left behind."""
    command = [sys.executable, "-m", "tests.faults.spark_driver", copy.dumps()]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=PROJECT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill -9 of the driver, its JVM and its Python workers at once."""
    for pid in members_of(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=30)


def members_of(session: int) -> list[int]:
    """Every process of a session, also those with a group of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    found.append(int(entry.name))
    return found


def python_workers(session: int) -> list[int]:
    """The processes that run tasks: children of Spark's Python daemon."""
    parents: dict[int, int] = {}
    daemons = set()
    for pid in members_of(session):
        with suppress(OSError, IndexError):
            fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
            parents[pid] = int(fields[1])
            if b"pyspark.daemon" in (Path("/proc") / str(pid) / "cmdline").read_bytes():
                daemons.add(pid)
    return [pid for pid, parent in parents.items() if parent in daemons and pid in daemons]


def finish(copy: Copy, log: Path) -> None:
    """Run the driver to its end; a batch that fails ends it, and then it is started again."""
    deadline = time.monotonic() + RUN_TIMEOUT
    while True:
        shape = next(SHAPES)
        with driver(replace(copy, **shape), log) as process:
            if process.wait(timeout=max(1.0, deadline - time.monotonic())) == 0:
                return
        assert time.monotonic() < deadline, log.read_text()[-4_000:]


def kill_when(copy: Copy, log: Path, reached: Callable[[], bool]) -> None:
    """Start the driver, wait for a state in the middle of its work, and kill all of it."""
    with driver(replace(copy, **next(SHAPES)), log) as process:
        wait_until(lambda: reached() or process.poll() is not None, RUN_TIMEOUT)
        assert process.poll() is None, log.read_text()[-4_000:]


def copy_of(cluster: Cluster, sink: str, source: str, target: str, folder: Path) -> Copy:
    return Copy(
        sink=sink,
        source=source,
        target=target,
        checkpoint=str(folder / "checkpoint"),
        uri=stream_uri(cluster),
        amqp_uri=amqp_uri(cluster),
        rows_per_batch=ROWS_PER_BATCH,
    )


def kill_drivers_mid_batch(
    environment: StreamEnvironment, copy: Copy, log: Path, streams: tuple[str, ...]
) -> list[int]:
    """Three drivers die, each in another batch; how many rows were stored each time."""
    seen = []
    for batch in range(3):
        middle = batch * ROWS_PER_BATCH + ROWS_PER_BATCH // 4

        def reached(middle: int = middle) -> bool:
            return count_of(environment, streams) > middle

        kill_when(copy, log, reached)
        seen.append(count_of(environment, streams))
    return seen


def test_exactly_once_survives_drivers_killed_mid_batch(
    cluster: Cluster, environment: StreamEnvironment, source: str, tmp_path: Path
) -> None:
    log = tmp_path / "driver.log"
    with super_stream(environment, partitions=4) as target:
        streams = environment.partitions(target)
        copy = copy_of(cluster, "exactly_once", source, target, tmp_path)
        seen = kill_drivers_mid_batch(environment, copy, log, streams)
        finish(copy, log)
        stored = stored_in(environment, streams)
    print(f"exactly_once: drivers killed with {seen} rows stored")
    assert any(count % ROWS_PER_BATCH for count in seen), f"none died in a batch: {seen}"
    assert ORDERS.lost_and_twice(stored) == (0, 0)
    ORDERS.assert_in_order(stored)


def test_exactly_once_survives_python_workers_killed_mid_batch(
    cluster: Cluster, environment: StreamEnvironment, source: str, tmp_path: Path
) -> None:
    log = tmp_path / "driver.log"
    killed = []
    with super_stream(environment, partitions=4) as target:
        streams = environment.partitions(target)
        copy = copy_of(cluster, "exactly_once", source, target, tmp_path)
        with driver(copy, log) as process:
            for part in (1, ROWS_PER_BATCH // 2, 2 * ROWS_PER_BATCH):
                wait_until(
                    lambda part=part: (  # type: ignore[misc]
                        count_of(environment, streams) >= part or process.poll() is not None
                    ),
                    RUN_TIMEOUT,
                )
                for pid in python_workers(process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)
            process.wait(timeout=RUN_TIMEOUT)
        finish(copy, log)
        stored = stored_in(environment, streams)
    assert killed, "no worker was there to be killed"
    assert ORDERS.lost_and_twice(stored) == (0, 0)
    ORDERS.assert_in_order(stored)


def test_exactly_once_survives_the_leader_killed_mid_batch(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    with (
        Cluster.start() as own,
        environment_of(own) as environment,
        super_stream(environment) as source,
        super_stream(environment) as target,
    ):
        publish_partition(ORDERS, PublishOptions.of(superStream=source, uri=stream_uri(own)))
        streams = environment.partitions(target)
        copy = copy_of(own, "exactly_once", source, target, tmp_path)
        leader = environment.route(streams[0]).leader
        assert leader is not None
        victim = next(node for node in own.nodes if node.endpoint.address == leader.host)
        with driver(copy, log) as process:
            wait_until(lambda: count_of(environment, streams) > ROWS_PER_BATCH // 2, RUN_TIMEOUT)
            victim.kill()
            process.wait(timeout=RUN_TIMEOUT)
        victim.restart()
        finish(copy, log)
        stored = stored_in(environment, streams)
    assert ORDERS.lost_and_twice(stored) == (0, 0)
    ORDERS.assert_in_order(stored)


def test_plain_sink_loses_nothing_when_drivers_are_killed_mid_batch(
    cluster: Cluster, environment: StreamEnvironment, source: str, tmp_path: Path
) -> None:
    log = tmp_path / "driver.log"
    with super_stream(environment, partitions=4) as target:
        streams = environment.partitions(target)
        copy = copy_of(cluster, "stream", source, target, tmp_path)
        kill_drivers_mid_batch(environment, copy, log, streams)
        finish(copy, log)
        lost, twice = ORDERS.lost_and_twice(stored_in(environment, streams))
    print(f"plain sink: {lost} lost, {twice} twice")
    assert lost == 0


def test_queue_shards_lose_nothing_when_a_driver_is_killed_mid_batch(
    cluster: Cluster, source: str, tmp_path: Path
) -> None:
    log = tmp_path / "driver.log"
    with sharded_queue(cluster) as logical, topology_of(cluster.nodes) as topology:
        copy = copy_of(cluster, "queue", source, logical, tmp_path)
        shards = list(shards_in_broker(cluster, logical))

        def depth() -> int:
            return sum(each.messages for each in topology.look_at(shards).values() if each)

        kill_when(copy, log, lambda: depth() > ROWS_PER_BATCH // 4)
        finish(copy, log)
        taken = drain(cluster.nodes[0], shards)
    found = Counter((key, body) for _, key, body in taken)
    lost = set(ORDERS) - set(found)
    print(f"queue shards: {len(lost)} lost, {found.total() - len(found)} twice")
    assert not lost
    assert set(found) <= set(ORDERS)
