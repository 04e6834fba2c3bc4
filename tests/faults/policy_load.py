"""Processes that publish while a policy lives, and what must hold of all that they were told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pika

from sharding import Topology, WarrenError
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE
from tests.faults.policy_publisher import KINDS, THREADS, Line, read_lines
from tests.machine import PROJECT
from tests.support import patient

CHANNELS = tuple(kind for kind in KINDS if kind != "publisher")


class Process:
    """One client, its process and what it has written so far."""

    def __init__(self, folder: Path, kind: str, logical: str, urls: Sequence[str]) -> None:
        self.kind = kind
        self._path = folder / f"{kind}.txt"
        self._path.touch()
        self._read = 0
        self.lines: list[Line] = []
        self.told: Counter[tuple[int, str]] = Counter()
        """How often each thread was told what."""
        self._log = (folder / f"{kind}.log").open("w")
        program = [sys.executable, "-m", "tests.faults.policy_publisher"]
        command = [*program, kind, logical, str(self._path), *urls]
        self.process = subprocess.Popen(command, cwd=PROJECT, stderr=self._log)

    def read(self) -> None:
        """Read on to the last whole line."""
        with self._path.open("rb") as written:
            written.seek(self._read)
            new = written.read()
        new = new[: new.rfind(b"\n") + 1]
        self._read += len(new)
        lines = read_lines(new.decode())
        self.lines += lines
        self.told.update((line.thread, line.what) for line in lines)

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(2 * PATIENCE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


class Publishers:
    """A process for each kind of client; the test goes on when each of their threads has."""

    def __init__(self, folder: Path, logical: str, urls: Sequence[str]) -> None:
        self.all = [Process(folder, kind, logical, urls) for kind in KINDS]

    def __enter__(self) -> Publishers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each in self.all:
            each.kill()

    def wait_for(self, more: int, what: str = "SRU", kinds: Iterable[str] = KINDS) -> None:
        """Return when every thread was told `what` of so many more messages."""
        chosen = set(kinds)
        before = self._told(what)

        def lacking() -> dict[tuple[str, int], int]:
            """Of whom it is known by now how often they were told."""
            told = ((each, count - before[each]) for each, count in self._told(what).items())
            return {each: count for each, count in told if count < more and each[0] in chosen}

        wait_until(
            lambda: not lacking(),
            2 * PATIENCE,
            explain=lambda: f"of {more} {what!r} some were told {lacking()}; {self.last_words()}",
        )

    def _told(self, what: str) -> dict[tuple[str, int], int]:
        told = {}
        for each in self.all:
            assert each.process.poll() is None, f"{each.kind} has ended"
            each.read()
            for thread in range(THREADS):
                told[each.kind, thread] = sum(each.told[thread, letter] for letter in what)
        return told

    def last_words(self) -> dict[str, str]:
        """The newest reason that each gave for a message that is not stored."""
        return {
            each.kind: next((line.reason for line in reversed(each.lines) if line.reason), "")
            for each in self.all
        }

    def end(self) -> None:
        assert {each.kind: each.end() for each in self.all} == dict.fromkeys(KINDS, 0)
        for each in self.all:
            each.read()

    def told(self, what: str) -> set[bytes]:
        return {
            f"{each.kind}|{line.thread}|{line.number}".encode()
            for each in self.all
            for line in each.lines
            if line.what in what
        }

    def reasons(self, what: str) -> Counter[tuple[str, str]]:
        """Who gave which reason how often; without the names in it, which differ."""
        return Counter(
            (each.kind, line.reason.partition(":")[0])
            for each in self.all
            for line in each.lines
            if line.what in what
        )


class Watch:
    """Brings shards in step with policies again and again, as `warren shards watch` does."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._end = threading.Event()
        self.looks = 0
        self.problems: list[WarrenError] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.2):
            try:
                self._topology.ensure_all()
                self.looks += 1
            except WarrenError as error:
                self.problems.append(error)


@dataclass
class Found:
    """What is in the queues in the end, by a channel that knows nothing of Warren."""

    by_queue: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)

    @classmethod
    def read(cls, url: str, queues: Iterable[str]) -> Found:
        found = cls()
        with pika.BlockingConnection(patient.parameters(url)) as connection:
            channel = connection.channel()
            for queue in queues:
                left = channel.queue_declare(queue, passive=True).method.message_count
                taken = found.by_queue.setdefault(queue, [])
                if not left:
                    continue
                for method, _, body in channel.consume(queue, auto_ack=True):
                    taken.append((method.routing_key or "", body))
                    if len(taken) == left:
                        break
                channel.cancel()
        return found

    def times(self) -> Counter[bytes]:
        return Counter(body for taken in self.by_queue.values() for _, body in taken)

    def disorder(self, unknown: set[bytes]) -> list[str]:
        """Messages that stand behind later ones of their thread and key, queue by queue.

        What a client was told is unknown is its own to send again, so it may stand anywhere.
        """
        found = []
        for queue, taken in self.by_queue.items():
            latest: dict[tuple[str, str, str], int] = {}
            for key, body in taken:
                if body in unknown:
                    continue
                of, number = _whose(key, body)
                if number < latest.get(of, -1):
                    found.append(f"{body.decode()} behind {latest[of]} of {key} in {queue}")
                latest[of] = max(latest.get(of, -1), number)
        return found

    def overtaken(self, kept: str, unknown: set[bytes]) -> list[str]:
        """What is kept in the end although something later of its thread and key is in a shard."""
        latest: dict[tuple[str, str, str], int] = defaultdict(lambda: -1)
        for queue, taken in self.by_queue.items():
            for key, body in taken:
                if queue != kept and body not in unknown:
                    of, number = _whose(key, body)
                    latest[of] = max(latest[of], number)
        found = []
        for key, body in self.by_queue.get(kept, []):
            of, number = _whose(key, body)
            if body not in unknown and number < latest[of]:
                found.append(f"{body.decode()} is kept, and {latest[of]} of {key} in a shard")
        return found


def _whose(key: str, body: bytes) -> tuple[tuple[str, str, str], int]:
    kind, thread, number = body.decode().split("|")
    return (kind, thread, key), int(number)


class Timed:
    """How long the longest of the operator's steps took, for the report."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def note(self, what: str, began: float) -> None:
        took = time.monotonic() - began
        self.longest[what] = max(self.longest.get(what, 0.0), took)

    def __str__(self) -> str:
        return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.longest.items())
