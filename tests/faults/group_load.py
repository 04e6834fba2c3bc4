"""Load on a logical queue, worker processes, and what must hold of all that they wrote down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from interceptors import Outcome, Result, ShardedPublisher
from sharding import ShardUnavailable, Topology
from sharding.cluster.management import NoAnswer
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.faults.group_worker import OPTIONS, Line, hold_of, lines_of
from tests.machine import PROJECT

KEYS = 200


class Load:
    """Publishes at an even rate, until it is told to end and `least` messages are sent."""

    def __init__(self, topology: Topology, logical: str, least: int, rate: float) -> None:
        self._least, self._rate = least, rate
        self.bodies: list[int] = []
        self.outcomes: dict[int, Outcome] = {}
        self.refused = 0
        self._publisher = ShardedPublisher(topology, logical, on_result=self._on_result)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()
        self._publisher.close(timeout=20)

    def having(self, outcome: Outcome) -> set[int]:
        return {self.bodies[n] for n, found in self.outcomes.items() if found is outcome}

    def _run(self) -> None:
        began, sent = time.monotonic(), 0
        while not self._end.is_set() or sent < self._least:
            while sent < self._rate * (time.monotonic() - began):
                try:
                    self._publisher.publish(f"key-{sent % KEYS}", b"%d" % sent)
                    self.bodies.append(sent)
                except ShardUnavailable:
                    self.refused += 1
                sent += 1
            time.sleep(0.01)  # the rate

    def _on_result(self, result: Result) -> None:
        self.outcomes[result.number] = result.outcome


class Worker:
    """One worker process and what it has written; every second one runs on asyncio."""

    def __init__(
        self, folder: Path, number: int, logical: str, urls: Sequence[str], heartbeat: int = 5
    ) -> None:
        self.path = folder / f"worker-{number}.txt"
        module = "tests.faults.group_worker"
        kind = ["--aio"] if number % 2 else []  # both kinds share one queue
        command = [sys.executable, "-m", module, *kind, logical, str(self.path), *urls]
        self.log = (folder / f"worker-{number}.log").open("w")
        environment = {**os.environ, "WARREN_TEST_HEARTBEAT": str(heartbeat)}
        self.process = subprocess.Popen(command, cwd=PROJECT, stderr=self.log, env=environment)
        self.killed_at: float | None = None
        self.frozen: tuple[float, float] | None = None

    def lines(self) -> list[Line]:
        return lines_of(self.path)

    def held(self) -> int:
        held = [int(line.shard) for line in self.lines() if line.what == "H"]
        return held[-1] if held else 0

    def kill(self) -> None:
        self.killed_at = time.monotonic()  # before: another may have its shards at once
        self.process.kill()
        self.process.wait()

    def freeze_at_work(self) -> None:
        """Freeze it while all its handlers are at work, so that none is about to begin."""
        hold = hold_of(self.path)
        hold.touch()
        try:
            wait_until(lambda: len(self._begun()) == OPTIONS.parallelism)
            self.freeze()
        finally:
            hold.unlink()

    def _begun(self) -> set[tuple[str, int]]:
        """Messages that a handler is at work on."""
        begun: set[tuple[str, int]] = set()
        for line in self.lines():
            if line.what == "B":
                begun.add((line.shard, line.number))
            elif line.what in "EF":
                begun.discard((line.shard, line.number))
        return begun

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.process.pid}/status")
        wait_until(lambda: "State:\tT" in state.read_text())  # it may go on for a moment
        self.frozen = time.monotonic(), float("inf")

    def thaw(self) -> None:
        assert self.frozen is not None
        self.frozen = self.frozen[0], time.monotonic()
        self.process.send_signal(signal.SIGCONT)

    def was_frozen_in(self, start: float, end: float) -> bool:
        """Whether a handler that began and ended then was at work while the worker was frozen."""
        return self.frozen is not None and start < self.frozen[0] and end > self.frozen[1]

    def end(self, timeout: float = PATIENCE) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


class ConsumerWatch:
    """Asks the broker all the time how many consumers each queue has."""

    def __init__(self, cluster: Cluster, queues: Iterable[str]) -> None:
        self._cluster, self._queues = cluster, set(queues)
        self.most: Counter[str] = Counter()
        self.looks = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.3):
            for node in self._cluster.nodes:
                with suppress(NoAnswer):
                    consumers = node.management.get("consumers", node.endpoint.vhost, timeout=3)
                    seen = Counter(consumer["queue"]["name"] for consumer in consumers)
                    self.looks += 1
                    for queue in self._queues & seen.keys():
                        self.most[queue] = max(self.most[queue], seen[queue])
                    break


def wait_for_balance(workers: Sequence[Worker], shards: int) -> float:
    """Wait until loads differ by one at most and all shards are held; how long it took."""
    began = time.monotonic()

    def fair() -> bool:
        loads = [worker.held() for worker in workers]
        return sum(loads) == shards and max(loads) - min(loads) <= 1

    wait_until(fair, explain=lambda: f"loads {[worker.held() for worker in workers]}")
    return time.monotonic() - began


def time_until_read(lines: Iterable[Line], shards: set[str], since: float) -> float:
    """How long after `since` the last of these shards was read again."""
    first: dict[str, float] = {}
    for line in lines:
        if line.what == "B" and line.at > since and line.shard in shards:
            first[line.shard] = min(first.get(line.shard, line.at), line.at)
    return max(first.values()) - since if first.keys() == shards else float("inf")


def check_order(lines: Sequence[Line]) -> None:
    """The first time that each message was handled well, by key: in the order of publishing."""
    first: dict[str, dict[int, float]] = defaultdict(dict)
    for line in sorted(lines, key=lambda line: line.at):
        if line.what == "E":
            first[line.key].setdefault(line.number, line.at)
    for key, times in first.items():
        handled = list(times)
        assert handled == sorted(handled), (
            f"{key} was handled out of order:\n{_around_disorder(lines, key, handled)}"
        )


def _around_disorder(lines: Sequence[Line], key: str, handled: list[int]) -> str:
    """What was done with the messages of a key around the first one that was overtaken."""
    at = next(n for n, (one, other) in enumerate(pairwise(handled)) if other < one)
    near = set(handled[max(at - 2, 0) : at + 5])
    return "\n".join(
        f"{line.at:.6f} {line.worker} {line.what} {line.number} {line.shard}"
        for line in sorted(lines, key=lambda line: line.at)
        if (line.key == key and line.number in near) or line.what == "H"
    )


def check_one_reader(workers: Sequence[Worker]) -> int:
    """No two workers ever had a message of one shard in hand at one time; how many pairs of
    neighbours by different workers that was seen on.
    """
    spans: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for worker in workers:
        begun: dict[tuple[str, int], float] = {}
        for line in worker.lines():
            if line.what == "B":
                begun[line.shard, line.number] = line.at
            elif line.what in "EF":
                start = begun.pop((line.shard, line.number))
                if not worker.was_frozen_in(start, line.at):  # nothing can keep that from going on
                    spans[line.shard].append((start, line.at, worker.path.stem))
        for (shard, _), start in begun.items():
            assert worker.killed_at is not None, "a handler that was begun did not end"
            spans[shard].append((start, worker.killed_at, worker.path.stem))
    handovers = 0
    for shard, found in spans.items():
        latest: dict[str, float] = {}
        before = ""
        for start, end, name in sorted(found):
            for other, ended in latest.items():
                assert other == name or ended <= start, (
                    f"{name} began on {shard} at {start}, while {other} was on it until {ended}"
                )
            latest[name] = max(latest.get(name, 0), end)
            handovers += bool(before) and before != name
            before = name
    return handovers
