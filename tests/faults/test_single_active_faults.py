"""Single active consumers that are killed, frozen and cut off at random: nothing is skipped."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from sharding.stream import ProducerOptions, StreamEnvironment
from sharding.stream.producer.partitioning import by_hash
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.faults.group_worker import Line, lines_of
from tests.faults.single_active_worker import EVERY, OPTIONS
from tests.machine import PROJECT
from tests.support.streams import environment_of, super_stream_in

pytestmark = pytest.mark.cluster

SECONDS = int(os.environ.get("WARREN_FAULT_SECONDS", "10"))
SEED = int(os.environ.get("WARREN_FAULT_SEED", "1"))
PARTITIONS = 6
WORKERS = 3
RATE = 200
LONGEST_FREEZE = 15.0  # longer than the broker bears a silent client
GROUPS_NEVER_STUCK = (4, 3)
"""Before, a broker may wait for good for a consumer that is gone (its issues 14070 and 15353)."""


@dataclass
class Worker:
    path: Path
    process: subprocess.Popen[bytes]
    frozen_until: float | None = None

    @property
    def has_begun(self) -> bool:
        """Before that a signal to cut its connections would end it, and nobody start another."""
        return self.path.exists()


class Workers:
    """Three processes for each way to store offsets, all over one super stream."""

    def __init__(self, folder: Path, stream: str, urls: list[str]) -> None:
        self._folder = folder
        self.stream = stream
        self._urls = urls
        self._started = 0
        self.running: list[Worker] = []
        for how in [*OPTIONS] * WORKERS:
            self._start(how)

    def _start(self, how: str) -> None:
        path = self._folder / f"{how}.{self._started}"
        self._started += 1
        command = [sys.executable, "-m", "tests.faults.single_active_worker"]
        with path.with_suffix(path.suffix + "-log").open("wb") as log:
            process = subprocess.Popen(
                [*command, self.stream, str(path), how, *self._urls], cwd=PROJECT, stderr=log
            )
        self.running.append(Worker(path, process))

    def kill(self, worker: Worker) -> None:
        worker.process.kill()
        worker.process.wait()
        self.running.remove(worker)
        self._start(worker.path.stem)

    @property
    def frozen(self) -> int:
        return sum(worker.frozen_until is not None for worker in self.running)

    def thaw(self, before: float = math.inf) -> None:
        """Let those go on whose time has come."""
        for worker in self.running:
            if worker.frozen_until is not None and worker.frozen_until <= before:
                worker.process.send_signal(signal.SIGCONT)
                worker.frozen_until = None

    def begin_anew(self, how: str) -> int:
        """All leave, and only then others come; how many were ended."""
        leaving = [worker for worker in self.running if worker.path.stem == how]
        for worker in leaving:
            worker.process.kill()
            worker.process.wait()
            self.running.remove(worker)
        for _ in leaving:
            self._start(how)
        return len(leaving)

    def lines(self, how: str, what: str) -> list[Line]:
        paths = [path for path in self._folder.glob(f"{how}.*") if not path.suffix.endswith("-log")]
        return [line for path in paths for line in lines_of(path) if line.what == what]

    def have_all(self, how: str) -> bool:
        """Whether each partition was somebody's turn."""
        return len({line.shard for line in self.lines(how, "A")}) == PARTITIONS

    def handled(self, how: str) -> list[int]:
        return [line.number for line in self.lines(how, "E")]

    def close(self) -> None:
        for worker in self.running:
            worker.process.kill()
            worker.process.wait()


class Load(threading.Thread):
    """Publishes numbers at an even rate until it is told to end."""

    def __init__(self, environment: StreamEnvironment, super_stream: str) -> None:
        super().__init__()
        self.sent = 0
        self.ending = threading.Event()
        self._producer = environment.producer(super_stream, ProducerOptions(name="load"))
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        while not self.ending.wait(0.01):
            while self.sent < RATE * (time.monotonic() - began):
                self._producer.send(b"%d" % self.sent, key=key_of(self.sent))
                self.sent += 1
        self._producer.flush(timeout=PATIENCE).raise_for_failures()
        self._producer.close()

    def end(self) -> None:
        self.ending.set()
        self.join()


@pytest.fixture
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    if cluster.version.startswith("3.10."):
        pytest.skip("single active consumers came with RabbitMQ 3.11")
    with environment_of(cluster) as opened:
        yield opened


@pytest.fixture
def workers(cluster: Cluster, environment: StreamEnvironment, tmp_path: Path) -> Iterator[Workers]:
    with super_stream_in(environment, PARTITIONS) as stream:
        workers = Workers(tmp_path, stream, [node.endpoint.stream_url for node in cluster])
        try:
            yield workers
        finally:
            workers.close()


@pytest.mark.twin(
    "holes/test_stream_takeovers.py::"
    "test_who_takes_over_misses_nothing_though_next_means_another_place_by_then"
)
@pytest.mark.timeout(SECONDS + 4 * PATIENCE)
def test_nothing_is_skipped_whatever_happens_to_single_active_consumers(
    environment: StreamEnvironment, workers: Workers
) -> None:
    wait_until(lambda: all(map(workers.have_all, OPTIONS)))
    load = Load(environment, workers.stream)
    try:
        faults = harm(workers, random.Random(SEED))
    finally:
        load.end()

    def left() -> dict[str, list[int]]:
        found = {how: not_handled(workers, how, load.sent) for how in OPTIONS}
        return {how: missing[:20] for how, missing in found.items() if missing}

    def all_handled() -> bool:
        return not left()

    if environment.server_version < GROUPS_NEVER_STUCK:
        with suppress(TimeoutError):
            wait_until(all_handled)
        for how in left():  # see docs/streams.md, Limits
            assert not skipped(workers, how, load.sent), f"seed {SEED}: {how}"
            print(f"\n{how}: the broker made nobody active for a partition; all begin anew")
            faults["kill"] += workers.begin_anew(how)
    wait_until(all_handled, explain=lambda: f"seed {SEED}: {left()}")
    for how in OPTIONS:
        more = len(workers.handled(how)) - load.sent
        print(f"\n{how}: {load.sent} handled, {more} handlings more; {dict(faults)}")
        if how != "seconds":  # of each turn that was lost: what was not stored yet, and one in hand
            assert more <= faults.total() * PARTITIONS * (EVERY + 1)
    assert set(faults) == {"kill", "freeze", "cut"}, "each happened"


def harm(workers: Workers, chance: random.Random) -> Counter[str]:
    """Something happens to some worker every second or so; how often what did."""
    faults: Counter[str] = Counter()
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.2, 2.0))
        workers.thaw(before=time.monotonic())
        worker = chance.choice([each for each in workers.running if each.frozen_until is None])
        kind = chance.choice(["kill", "freeze", "cut"])
        if not worker.has_begun:
            continue
        if kind == "kill":
            workers.kill(worker)
        elif kind == "cut":
            worker.process.send_signal(signal.SIGUSR2)
        elif workers.frozen < len(OPTIONS):
            worker.process.send_signal(signal.SIGSTOP)
            worker.frozen_until = time.monotonic() + chance.uniform(0.5, LONGEST_FREEZE)
        else:
            continue
        faults[kind] += 1
    workers.thaw()
    return faults


def skipped(workers: Workers, how: str, sent: int) -> list[int]:
    """Of what is not handled, all before something that is handled in the same partition."""
    last: Counter[int] = Counter()
    for number in workers.handled(how):
        last[partition_of(number)] = max(last[partition_of(number)], number)
    return [
        number for number in not_handled(workers, how, sent) if number < last[partition_of(number)]
    ]


def partition_of(number: int) -> int:
    return by_hash(key_of(number), PARTITIONS)


def key_of(number: int) -> str:
    return f"key-{number}"


def not_handled(workers: Workers, how: str, sent: int) -> list[int]:
    return sorted(set(range(sent)) - set(workers.handled(how)))
