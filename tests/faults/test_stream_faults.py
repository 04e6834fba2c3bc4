"""Streams while nodes are killed, restarted and frozen: nothing lost, nothing twice, in order."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

import pytest

from sharding.stream import ProducerOptions, StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.cluster.health import prove_health
from tests.cluster.waiting import PATIENCE
from tests.support.streams import (
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


class Traffic:
    """A named producer that counts up, and a consumer that collects, each on its own thread."""

    def __init__(
        self, environment: StreamEnvironment, super_stream: str, *, at_least: int, pause: float
    ) -> None:
        self.sent = 0
        self.longest_silence = 0.0
        self._at_least = at_least
        self._pause = pause
        self._ended = False
        self._found: dict[str, list[int]] = defaultdict(list)
        self._fault_is_over = threading.Event()
        self._all_stored = threading.Event()
        self._problems: list[BaseException] = []
        self._producer = environment.producer(super_stream, ProducerOptions(name="counter"))
        self._consumer = environment.consumer(super_stream, offset="first")
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,))
            for work in (self._send, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._at_least = 0
        self._fault_is_over.set()
        self._consumer.close()
        self._producer.close()
        for thread in self._threads:
            thread.join(10)

    @property
    def read(self) -> int:
        return sum(map(len, self._found.values()))

    def wait_until_read(self, count: int) -> None:
        wait_until(lambda: self.read >= count or self._problems, explain=lambda: str(self))

    def finish(self, timeout: float = 90) -> None:
        """Wait until all was sent, stored and read, and see that it was read once, in order."""
        self._fault_is_over.set()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not self._problems, self._problems
        assert self._all_stored.is_set(), f"not all was stored in time: {self}"
        assert self.read == self.sent, f"{self}; {self._consumer.positions}"
        for stream, numbers in self._found.items():
            assert numbers == sorted(set(numbers)), f"{stream}: repeated or out of order"

    def __str__(self) -> str:
        times, longest = self._consumer.recoveries
        return (
            f"{self.sent} sent, {self.read} read; {times} subscriptions made again, the longest in "
            f"{longest:.2f} s; longest silence for the reader {self.longest_silence:.2f} s"
        )

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._problems.append(error)

    def _send(self) -> None:
        while self.sent < self._at_least or not self._fault_is_over.is_set():
            numbers = range(self.sent, self.sent + SLICE)
            bodies = [b"%d" % number for number in numbers]
            keys = [f"key-{number % 97}" for number in numbers]
            self._producer.send_many(bodies, keys, timeout=90)  # an election may take long
            self.sent += SLICE
            # Something should be under way at every moment, but the brokers share two cores.
            self._fault_is_over.wait(self._pause)
        self._producer.flush(timeout=60).raise_for_failures()
        self._all_stored.set()

    def _read(self) -> None:
        last = time.monotonic()
        while not (self._all_stored.is_set() and self.read >= self.sent):
            if self._problems or self._ended:
                return
            for batch in self._consumer.batches(timeout=0.2):
                now = time.monotonic()
                self.longest_silence, last = max(self.longest_silence, now - last), now
                stream = batch.schema.metadata[b"stream"].decode()
                self._found[stream] += map(int, batch.column("body").to_pylist())


def test_nothing_is_lost_or_repeated_when_a_leader_is_killed(
    harmed: Cluster, chosen_version: str
) -> None:
    with (
        environment_of(harmed, connect_timeout=PATIENCE) as environment,
        super_stream_in(environment) as invoices,
        Traffic(environment, invoices, at_least=MESSAGES, pause=0.02) as traffic,
    ):
        traffic.wait_until_read(MESSAGES // 5)
        victim = leader_node(harmed, environment, environment.partitions(invoices)[0])
        victim.kill()
        try:
            traffic.wait_until_read(MESSAGES)
            traffic.finish()
        finally:
            victim.restart()
        print(f"\n{chosen_version}, leader killed: {traffic}")


def test_nothing_is_lost_or_repeated_while_all_nodes_restart(
    harmed: Cluster, chosen_version: str
) -> None:
    """Node after node, for clients that go directly and through a load balancer."""
    balancer = harmed.balancer()
    with (
        environment_of(harmed, connect_timeout=PATIENCE) as direct,
        StreamEnvironment(
            balancer.endpoint.stream_url, load_balancer=True, connect_timeout=PATIENCE
        ) as through,
        super_stream_in(direct) as invoices,
        super_stream_in(direct) as orders,
        Traffic(direct, invoices, at_least=MESSAGES, pause=0.2) as directly,
        Traffic(through, orders, at_least=MESSAGES, pause=0.2) as balanced,
    ):
        for node in harmed.nodes:
            # Streams live on while one node is away; they must be whole before the next one goes,
            # and so must the brokers' stream coordinator, which elects their leaders.
            prove_health(harmed)
            for stream in (*direct.partitions(invoices), *direct.partitions(orders)):
                await_replicas(direct, stream)
            node.restart()
        for traffic in (directly, balanced):
            traffic.finish()
        print(f"\n{chosen_version}, all nodes restarted, directly: {directly}")
        print(f"{chosen_version}, all nodes restarted, through HAProxy: {balanced}")


def test_stream_is_read_elsewhere_when_a_replica_hangs(
    harmed: Cluster, chosen_version: str
) -> None:
    with (
        environment_of(harmed, heartbeat=HEARTBEAT) as environment,
        stream_in(environment) as stream,
        environment.consumer(stream, offset="first") as consumer,
        environment.producer(stream, linger=0) as producer,
    ):
        producer.send(b"before")
        messages = consumer.messages(timeout=30)
        assert next(messages).body == b"before"
        hanging = next(n for n in harmed.nodes if stream_address(n) == consumer.nodes[stream])
        hanging.freeze()
        try:
            producer.send(b"after")
            # Read while the node still hangs, so it was the heartbeat that gave it up: the brokers
            # themselves notice after a minute (net_ticktime), later than `messages` waits.
            assert next(messages).body == b"after"
            assert consumer.nodes[stream] != stream_address(hanging)
        finally:
            hanging.thaw()
            harmed.wait_until_whole()
        _, longest = consumer.recoveries
        print(f"\n{chosen_version}, replica frozen: read elsewhere after {longest:.2f} s")
