"""A worker of a queue group that writes down what it does, for tests that harm it.

    python -m tests.faults.group_worker LOGICAL FILE URL...

A line is `what monotonic-time shard key number`, and what is one of
  B a handler begins, E it ends well, F it fails on purpose (now and then, at the first attempt),
  H the shards held have changed; their number stands where the shard would.
The clock is the machine's, so lines of different processes can be compared.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from sharding import Topology
from sharding.groups import ConsumerGroup, Delivery, GroupOptions, Retry

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


def lines_of(path: Path) -> list[Line]:
    """What a worker has written; the last line may be cut off where it was killed."""
    found = []
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        what, at, shard, key, number = line.split("|")
        found.append(Line(what, float(at), shard, key, int(number), path.stem))
    return found


class Recorder:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, shard: str, key: str = "", number: int = 0) -> None:
        # One system call for a line: whole or not at all, whenever the process is killed.
        line = f"{what}|{time.monotonic():.6f}|{shard}|{key}|{number}\n"
        os.write(self._file, line.encode())


def main() -> None:
    logical, path, *urls = sys.argv[1:]
    recorder, chance = Recorder(path), random.Random()

    def handle(delivery: Delivery) -> None:
        number = int(delivery.body)
        recorder.write("B", delivery.shard, delivery.key, number)
        time.sleep(chance.uniform(0, 0.004))  # the work
        if delivery.attempt == 1 and chance.random() < FAILS:
            recorder.write("F", delivery.shard, delivery.key, number)
            raise ValueError("now and then")
        recorder.write("E", delivery.shard, delivery.key, number)

    def watch(group: ConsumerGroup) -> None:
        before = None
        while True:
            held = len(group.shards)
            if held != before:
                recorder.write("H", str(held))
                before = held
            time.sleep(0.02)

    with (
        Topology(*urls) as topology,
        ConsumerGroup(topology, logical, handle, options=OPTIONS) as g,
    ):
        threading.Thread(target=watch, args=(g,), daemon=True).start()
        g.run()


if __name__ == "__main__":
    main()
