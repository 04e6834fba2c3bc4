"""A worker of a queue group that writes down what it does, for tests that harm it.

    python -m tests.faults.group_worker [--aio] LOGICAL FILE URL...

A line is `what monotonic-time shard key number`, and what is one of
  B a handler begins, E it ends well, F it fails on purpose (now and then, at the first attempt),
  H the shards held have changed; their number stands where the shard would.
The clock is the machine's, so lines of different processes can be compared.

While there is FILE with the ending `.hold`, no handler that has begun ends.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from sharding import Topology
from sharding.groups import AioConsumerGroup, ConsumerGroup, Delivery, GroupOptions, Retry

FAILS = 0.005
OPTIONS = GroupOptions(
    prefetch=30,
    parallelism=3,
    retry=Retry(first_delay=0.02),
    heartbeat=int(os.environ.get("WARREN_TEST_HEARTBEAT", "5")),
)


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    at: float
    shard: str
    key: str
    number: int
    worker: str


class _Written:
    """A worker's file, of which only what is new is read: tests look at it many times a second,
    and it grows to tens of thousands of lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0
        self._lines: list[Line] = []

    def lines(self) -> list[Line]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._end)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._end += len(whole)
            self._lines += map(self._parsed, whole.decode().splitlines())
        return list(self._lines)

    def _parsed(self, line: str) -> Line:
        what, at, shard, key, number = line.split("|")
        return Line(what, float(at), shard, key, int(number), self._path.stem)


_written = functools.cache(_Written)


def lines_of(path: Path) -> list[Line]:
    """What a worker has written; the last line may be cut off where it was killed."""
    return _written(path).lines()


def hold_of(path: Path) -> Path:
    return path.with_suffix(".hold")


class Recorder:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, shard: str, key: str = "", number: int = 0) -> None:
        # One system call for a line: whole or not at all, whenever the process is killed.
        line = f"{what}|{time.monotonic():.6f}|{shard}|{key}|{number}\n"
        os.write(self._file, line.encode())


class Handling:
    """The work, and what is written of it."""

    def __init__(self, recorder: Recorder, hold: Path) -> None:
        self._recorder = recorder
        self._hold = hold
        self._chance = random.Random()

    def __call__(self, delivery: Delivery) -> None:
        self._note("B", delivery)
        time.sleep(self._chance.uniform(0, 0.004))  # the work
        while self._hold.exists():
            time.sleep(0.005)
        self._end(delivery)

    async def later(self, delivery: Delivery) -> None:
        self._note("B", delivery)
        await asyncio.sleep(self._chance.uniform(0, 0.004))
        while self._hold.exists():
            await asyncio.sleep(0.005)
        self._end(delivery)

    def _end(self, delivery: Delivery) -> None:
        if delivery.attempt == 1 and self._chance.random() < FAILS:
            self._note("F", delivery)
            raise ValueError("now and then")
        self._note("E", delivery)

    def _note(self, what: str, delivery: Delivery) -> None:
        self._recorder.write(what, delivery.shard, delivery.key, int(delivery.body))


def watch(group: ConsumerGroup | AioConsumerGroup, recorder: Recorder) -> None:
    """Write down how many shards are held, from a thread of its own."""

    def run() -> None:
        before = None
        while True:
            held = len(group.shards)
            if held != before:
                recorder.write("H", str(held))
                before = held
            time.sleep(0.02)

    threading.Thread(target=run, daemon=True).start()


async def work_on_a_loop(
    topology: Topology, logical: str, recorder: Recorder, handling: Handling
) -> None:
    group = AioConsumerGroup(topology, logical, handling.later, options=OPTIONS)
    watch(group, recorder)
    await group.run()


def main() -> None:
    words = sys.argv[1:]
    asynchronous = words[0] == "--aio"
    logical, path, *urls = words[asynchronous:]
    recorder = Recorder(path)
    handling = Handling(recorder, hold_of(Path(path)))
    with Topology(*urls) as topology:
        if asynchronous:
            asyncio.run(work_on_a_loop(topology, logical, recorder, handling))
            return
        group = ConsumerGroup(topology, logical, handling, options=OPTIONS)
        watch(group, recorder)
        group.run()


if __name__ == "__main__":
    main()
