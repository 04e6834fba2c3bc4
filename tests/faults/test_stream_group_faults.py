"""A stream group under load while workers come, go and are killed, and a node of the broker too."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sharding.stream import ProducerOptions, StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.faults.group_worker import Line, lines_of
from tests.faults.stream_group_worker import HOLD, OPTIONS
from tests.machine import PROJECT
from tests.support.streams import environment_of, leader_node, super_stream_in

pytestmark = pytest.mark.cluster

MESSAGES = int(os.environ.get("WARREN_GROUP_MESSAGES", "4000"))
PARTITIONS = 12
RATE = 400
KEYS = 200


class Load:
    """Publishes at an even rate, until told to end and `MESSAGES` are sent at least."""

    def __init__(self, environment: StreamEnvironment, super_stream: str) -> None:
        self.sent = 0
        # With a name nothing is stored twice, whatever happens to the brokers.
        self._producer = environment.producer(super_stream, ProducerOptions(name="load"))
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()
        self._producer.flush(timeout=PATIENCE).raise_for_failures()
        self._producer.close()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._end.is_set() or self.sent < MESSAGES:
            while self.sent < RATE * (time.monotonic() - began):
                self._producer.send(b"%d" % self.sent, key=f"key-{self.sent % KEYS}")
                self.sent += 1
            time.sleep(0.01)


@dataclass
class Worker:
    path: Path
    process: subprocess.Popen[bytes]
    killed_at: float | None = None

    @property
    def held(self) -> int:
        """How many partitions it reads now."""
        counts = [int(line.shard) for line in lines_of(self.path) if line.what == "H"]
        return counts[-1] if counts and self.process.poll() is None else 0

    def shards(self, since: float) -> set[str]:
        """What it has worked on since then."""
        return {line.shard for line in lines_of(self.path) if line.what == "B" and line.at > since}

    @property
    def waiting(self) -> int:
        """How many of its handlers are held inside a message."""
        return sum(line.what == "W" for line in lines_of(self.path))

    def kill(self) -> None:
        self.killed_at = time.monotonic()  # before: others may go on while it is waited for
        self.process.kill()
        self.process.wait()

    def freeze(self) -> float:
        """Stop it while every handler is inside a message; returns when.

        Elsewhere it may be about to begin one: allowed to, and not written down yet.
        """
        hold = self.path.with_suffix(HOLD)
        hold.touch()
        wait_until(lambda: self.waiting == OPTIONS.parallelism, explain=lambda: f"{self.waiting}")
        self.process.send_signal(signal.SIGSTOP)
        frozen_at = time.monotonic()
        hold.unlink()
        return frozen_at


@dataclass
class Workers:
    """Processes of one group. Those that are killed stay in `all`, for what they wrote."""

    folder: Path
    stream: str
    urls: Sequence[str]
    all: list[Worker] = field(default_factory=list)

    def start(self, count: int = 1) -> None:
        for _ in range(count):
            path = self.folder / f"worker-{len(self.all)}"
            command = [sys.executable, "-m", "tests.faults.stream_group_worker"]
            with path.with_suffix(".log").open("wb") as log:
                process = subprocess.Popen(
                    [*command, self.stream, str(path), *self.urls], cwd=PROJECT, stderr=log
                )
            self.all.append(Worker(path, process))

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.all if worker.process.poll() is None]

    def loads(self) -> list[int]:
        return sorted(worker.held for worker in self.running)

    def even(self) -> bool:
        loads = self.loads()
        return sum(loads) == PARTITIONS and max(loads) - min(loads) <= 1

    def settle(self, count: int) -> float:
        """Wait until so many workers share all partitions evenly; returns how long it took."""
        began = time.monotonic()
        wait_until(
            lambda: len(self.running) == count and self.even(),
            explain=lambda: f"{self.loads()} of {len(self.running)} workers",
        )
        return time.monotonic() - began

    def lines(self, *what: str) -> list[Line]:
        found = [line for worker in self.all for line in lines_of(worker.path)]
        return sorted((line for line in found if line.what in what), key=lambda line: line.at)

    def handled(self) -> set[int]:
        return {line.number for line in self.lines("E")}

    def work(self) -> float:
        """Wait until messages of every partition have been begun; since when they were."""
        since = time.monotonic()
        wait_until(
            lambda: len({line.shard for line in self.lines("B") if line.at > since}) == PARTITIONS
        )
        return since

    def close(self) -> None:
        for worker in self.running:
            worker.process.kill()
            worker.process.wait()


@pytest.fixture
def environment(harmed: Cluster) -> Iterator[StreamEnvironment]:
    if harmed.version.startswith("3.10."):
        pytest.skip("single active consumers came with RabbitMQ 3.11")
    with environment_of(harmed, heartbeat=5) as opened:
        yield opened


@pytest.fixture
def workers(harmed: Cluster, environment: StreamEnvironment, tmp_path: Path) -> Iterator[Workers]:
    urls = [node.endpoint.stream_url for node in harmed]
    with super_stream_in(environment, PARTITIONS) as stream:
        started = Workers(tmp_path, stream, urls)
        try:
            yield started
        finally:
            started.close()
            for made in (f"{stream}.dead", f"warren.group.{stream}"):
                environment.delete_stream(made, missing_ok=True)


def test_workers_and_a_node_die_and_nothing_is_lost_or_out_of_order(
    harmed: Cluster, environment: StreamEnvironment, workers: Workers
) -> None:
    workers.start()
    load = Load(environment, workers.stream)
    try:
        print(f"\n1 worker has all after {workers.settle(1):.1f} s")
        workers.start(4)
        print(f"5 workers: {workers.settle(5):.1f} s, loads {workers.loads()}")
        since = workers.work()
        victim = workers.running[2]
        theirs = victim.shards(since)
        assert theirs
        sent = load.sent
        victim.kill()
        took = recovery(workers, theirs, at(victim), sent)
        print(f"after kill -9 of a worker its partitions were read again in {took:.2f} s")
        workers.start()
        print(f"5 workers again: {workers.settle(5):.1f} s, loads {workers.loads()}")
        node = leader_node(harmed, environment, environment.partitions(workers.stream)[0])
        killed_node_at = time.monotonic()
        node.kill()
        partitions = set(environment.partitions(workers.stream))
        took = recovery(workers, partitions, killed_node_at, load.sent)
        print(f"after kill -9 of a node every partition was read again in {took:.2f} s")
        node.restart()
        harmed.wait_until_whole()
        print(f"with the node back: {workers.settle(5):.1f} s, loads {workers.loads()}")
        leaving = workers.running[:3]
        for worker in leaving:
            worker.process.send_signal(signal.SIGTERM)
        assert [worker.process.wait(PATIENCE) for worker in leaving] == [0, 0, 0]
        print(f"2 workers: {workers.settle(2):.1f} s, loads {workers.loads()}")
    finally:
        load.end()
    wait_until(
        lambda: len(workers.handled()) == load.sent,
        explain=lambda: f"{len(workers.handled())} handled of {load.sent}; loads {workers.loads()}",
    )
    faults = [at(victim), killed_node_at]
    duplicates = check(workers, load.sent, faults)
    print(f"{load.sent} messages, {duplicates} handled twice around the kills")


def test_worker_that_was_frozen_begins_nothing_that_others_have_handled_meanwhile(
    environment: StreamEnvironment, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTBEAT", "2")
    workers.start(2)
    load = Load(environment, workers.stream)
    try:
        workers.settle(2)
        since = workers.work()
        frozen = workers.running[0]
        theirs = frozen.shards(since)
        assert theirs
        frozen_at = frozen.freeze()
        took = recovery(workers, theirs, frozen_at, load.sent)
        print(f"\npartitions of a frozen worker were read again in {took:.2f} s")
        handled = workers.handled()
        frozen.process.send_signal(signal.SIGCONT)
        thawed_at = time.monotonic()
        print(f"2 workers again: {workers.settle(2):.1f} s, loads {workers.loads()}")
        workers.work()
    finally:
        load.end()
    wait_until(lambda: len(workers.handled()) == load.sent)
    began = [line for line in lines_of(frozen.path) if line.what == "B" and line.at > thawed_at]
    assert began, "it works again"
    assert not [line for line in began if line.number in handled]
    check(workers, load.sent, [frozen_at, thawed_at], overlaps=False)


def at(victim: Worker) -> float:
    assert victim.killed_at is not None
    return victim.killed_at


def recovery(workers: Workers, shards: set[str], since: float, sent: int) -> float:
    """The longest time from the fault on in which nothing of one of these partitions was begun.

    Work goes on for a moment with what a worker has in hand, so a partition is read again when
    something is begun that was published after the fault, when `sent` messages were.
    """

    def begun() -> dict[str, list[float]]:
        found: dict[str, list[float]] = {shard: [since] for shard in shards}
        for line in workers.lines("B"):
            if line.at > since and line.shard in shards:
                found[line.shard].append(line.at)
        return found

    def read_again() -> bool:
        return shards <= {line.shard for line in workers.lines("B") if line.number >= sent}

    wait_until(
        read_again,
        explain=lambda: (
            f"{ {s: t[-1] - since for s, t in begun().items()} }; loads {workers.loads()}"
        ),
    )
    return max(max(b - a for a, b in itertools.pairwise(times)) for times in begun().values())


def check(workers: Workers, sent: int, faults: Sequence[float], overlaps: bool = True) -> int:
    """All that must hold of what the workers wrote; returns how many messages came twice.

    `overlaps` says that nobody was frozen in the middle of a message, so that none may be.
    """
    ended = workers.lines("E")
    assert {line.number for line in ended} == set(range(sent))
    first_endings: dict[int, Line] = {}
    for line in ended:
        first_endings.setdefault(line.number, line)
    by_key: dict[str, list[int]] = defaultdict(list)
    for line in first_endings.values():
        by_key[line.key].append(line.number)
    for key, numbers in by_key.items():
        assert numbers == sorted(numbers), f"{key} was handled out of order"
    again = [line for line in ended if line is not first_endings[line.number]]
    for line in again:
        assert line.at > min(faults), f"{line} was repeated before anything was harmed"
    times = Counter(line.number for line in ended)
    assert len(again) <= len(faults) * PARTITIONS * (
        OPTIONS.store_every_messages + OPTIONS.prefetch
    )
    if overlaps:
        check_one_at_a_time(workers)
    return sum(count > 1 for count in times.values())


def check_one_at_a_time(workers: Workers) -> None:
    """No partition is worked on by two workers at one time."""
    spans: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for worker in workers.all:
        begun: dict[int, Line] = {}
        for line in lines_of(worker.path):
            if line.what == "B":
                begun[line.number] = line
            elif line.what in "EF":
                beginning = begun.pop(line.number)
                spans[line.shard].append((beginning.at, line.at, line.worker))
        for left in begun.values():  # what it was at when it was killed
            end = max(left.at, worker.killed_at or left.at)
            spans[left.shard].append((left.at, end, left.worker))
    for shard, all_spans in spans.items():
        latest_end: dict[str, float] = {}
        for start, end, name in sorted(all_spans):
            others = {each: until for each, until in latest_end.items() if each != name}
            overlap = max(others.values(), default=0.0) - start
            assert overlap <= 0, f"{shard}: {name} began {overlap:.3f} s before {others} ended"
            latest_end[name] = max(end, latest_end.get(name, 0.0))
