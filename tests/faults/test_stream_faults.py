"""Streams while nodes are killed, restarted and frozen: nothing lost, nothing twice, in order."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from sharding.stream import ConsumerOptions, ProducerOptions, StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.streams import (
    await_replicas,
    environment_of,
    leader_node,
    stream_address,
    stream_in,
    super_stream_in,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

MESSAGES = 200_000
SLICE = 2_000
HEARTBEAT = 2.0


@pytest.fixture(scope="module")
def own(any_version: str) -> Iterator[Cluster]:
    with Cluster.start(version=any_version) as running:
        yield running


class Traffic:
    """A named producer that counts up, and a consumer that collects, each on its own thread."""

    def __init__(self, environment: StreamEnvironment, super_stream: str) -> None:
        self.super_stream = super_stream
        self.sent = 0
        self.longest_silence = 0.0
        self.problems: list[BaseException] = []
        self._found: dict[str, list[int]] = defaultdict(list)
        self._enough = threading.Event()
        self._expected: int | None = None
        self._producer = environment.producer(
            super_stream, ProducerOptions(name="counter", send_timeout=60, confirm_timeout=60)
        )
        self._consumer = environment.consumer(super_stream, ConsumerOptions(offset="first"))
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,)) for work in (self._send, self._read)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def read(self) -> int:
        return sum(map(len, self._found.values()))

    def stop(self, at_least: int) -> None:
        """Send up to `at_least` messages, and no more."""
        self._at_least = at_least
        self._enough.set()

    def result(self, timeout: float) -> dict[str, list[int]]:
        """What was read, by stream, once everything that was sent has been."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not self.problems, self.problems
        assert not any(thread.is_alive() for thread in self._threads), (
            f"{self.read} of {self.sent} messages read in time"
        )
        return self._found

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0)
        self.close()

    def __str__(self) -> str:
        times, longest = self._consumer.recoveries
        return (
            f"{self.sent} sent, {self.read} read; {times} subscriptions made again, the longest in "
            f"{longest:.2f} s; longest silence {self.longest_silence:.2f} s"
        )

    def _guarded(self, work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            self.problems.append(error)

    def _send(self) -> None:
        while not self._enough.is_set() or self.sent < self._at_least:
            numbers = range(self.sent, self.sent + SLICE)
            self._producer.send_many(
                [b"%d" % number for number in numbers], [f"key-{number % 97}" for number in numbers]
            )
            self.sent += SLICE
            if not self._enough.is_set() and self.sent > MESSAGES // 2:
                self._enough.wait(0.1)  # keep it going until the fault is over, but not at full speed
        self._producer.flush(timeout=60).raise_for_failures()
        self._expected = self.sent

    def _read(self) -> None:
        last = time.monotonic()
        for batch in self._consumer.batches(timeout=1):
            now = time.monotonic()
            self.longest_silence, last = max(self.longest_silence, now - last), now
            stream = batch.schema.metadata[b"stream"].decode()
            self._found[stream] += map(int, batch.column("body").to_pylist())
        while self._expected is None or self.read < self._expected:
            if self.problems:
                return
            self._read_more()

    def _read_more(self) -> None:
        raise NotImplementedError


def assert_each_once_and_in_order(found: dict[str, list[int]], sent: int) -> None:
    for stream, numbers in found.items():
        assert numbers == sorted(set(numbers)), f"{stream}: repeated or out of order"
    assert sum(map(len, found.values())) == sent
