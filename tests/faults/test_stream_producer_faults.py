"""Producers while nodes are killed and restarted: what is reported is what is there."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sharding.errors import OutcomeUnknown
from sharding.stream import (
    Compression,
    Outcome,
    Producer,
    ProducerOptions,
    Report,
    StreamEnvironment,
)
from tests.cluster import Cluster, wait_until
from tests.cluster.health import prove_health
from tests.support.streams import (
    await_replicas,
    environment_of,
    leader_node,
    read_all,
    super_stream_in,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

MESSAGES = 200_000
SLICE = 1_000


class Sending:
    """Sends numbers as bodies from a thread of its own, in slices."""

    def __init__(self, producer: Producer, at_least: int) -> None:
        self.sent = 0
        self._producer = producer
        self._at_least = at_least
        self._may_end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._problem: BaseException | None = None
        self._thread.start()

    def end(self, timeout: float) -> Report:
        """All outcomes, once the producer has tried everything."""
        self._may_end.set()
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"stuck after {self.sent} messages"
        if self._problem is not None:
            raise self._problem
        return self._producer.flush(timeout)

    def _run(self) -> None:
        try:
            while self.sent < self._at_least or not self._may_end.is_set():
                numbers = range(self.sent, self.sent + SLICE)
                bodies = [b"%d" % number for number in numbers]
                keys = [f"key-{number % 97}" for number in numbers]
                taken = self._producer.send_many(bodies, keys, timeout=90)
                assert taken == numbers
                self.sent += SLICE
                self._may_end.wait(0.001 if self.sent < self._at_least else 0.05)
        except BaseException as error:
            self._problem = error


@contextmanager
def producing(
    environment: StreamEnvironment, super_stream: str, options: ProducerOptions, at_least: int
) -> Iterator[tuple[Producer, Sending]]:
    producer = environment.producer(super_stream, options)
    sending = Sending(producer, at_least)
    try:
        yield producer, sending
    finally:
        sending._at_least = 0
        sending._may_end.set()
        producer.close(timeout=1)


def read_back(environment: StreamEnvironment, super_stream: str) -> dict[str, list[int]]:
    """Everything in the partitions, in order."""
    found: dict[str, list[int]] = {}
    for stream in environment.partitions(super_stream):
        ends = environment.offsets(stream)
        found[stream] = []
        if ends is not None:
            for batch in environment.read_range(stream, 0, ends.last + 1):
                found[stream] += map(int, batch.column("body").to_pylist())
    return found


def kill_a_leader(
    cluster: Cluster, environment: StreamEnvironment, super_stream: str, sending: Sending
) -> float:
    """Kill -9 when a quarter is sent, and wait until all is; how long after the kill."""
    wait_until(lambda: sending.sent >= MESSAGES // 4)
    victim = leader_node(cluster, environment, environment.partitions(super_stream)[0])
    killed_at = time.monotonic()
    victim.kill()
    try:
        wait_until(lambda: sending.sent >= MESSAGES, 120)
    finally:
        took = time.monotonic() - killed_at
        victim.restart()
    return took


@pytest.mark.parametrize(
    "sub_entries",
    [
        pytest.param(100, id="sub-entries"),
        pytest.param(
            0,
            id="simple",
            marks=pytest.mark.twin(
                "faults/test_stream_faults.py::"
                "test_nothing_is_lost_or_repeated_when_a_leader_is_killed"
            ),
        ),
    ],
)
def test_a_named_producer_loses_repeats_and_reorders_nothing_when_a_leader_is_killed(
    harmed: Cluster, chosen_version: str, sub_entries: int
) -> None:
    codec = Compression.GZIP if sub_entries else Compression.NONE
    options = ProducerOptions(name="p", sub_entry_messages=sub_entries, compression=codec)
    with (
        environment_of(harmed) as environment,
        super_stream_in(environment) as invoices,
        producing(environment, invoices, options, MESSAGES) as (producer, sending),
    ):
        kill_a_leader(harmed, environment, invoices, sending)
        report = sending.end(timeout=90)
        report.raise_for_failures()
        assert report.stored == sending.sent
        found = read_back(environment, invoices)
        assert sorted(n for numbers in found.values() for n in numbers) == list(range(sending.sent))
        for stream, numbers in found.items():
            assert numbers == sorted(numbers), f"{stream} is out of order"
        assert producer.counters["recoveries"] > 0
        print(f"\n{chosen_version}, named, leader killed: {sending.sent} stored once, in order;")
        print(f"  longest time to the next confirm {producer.counters['longest_recovery']:.2f} s")


def test_an_unnamed_producer_reports_what_is_unknown_and_repeats_nothing_when_a_leader_is_killed(
    harmed: Cluster, chosen_version: str
) -> None:
    with (
        environment_of(harmed) as environment,
        super_stream_in(environment) as invoices,
        producing(environment, invoices, ProducerOptions(), MESSAGES) as (producer, sending),
    ):
        kill_a_leader(harmed, environment, invoices, sending)
        report = sending.end(timeout=90)
        assert (report.pending, report.omitted) == (0, 0)
        assert report.stored + report.refused + report.unknown == sending.sent
        by_outcome = {
            outcome: [each for each in report.not_stored if each.outcome is outcome]
            for outcome in Outcome
        }
        refused = {each.number for each in by_outcome[Outcome.REFUSED]}
        unknown = {each.number for each in by_outcome[Outcome.UNKNOWN]}
        assert (len(refused), len(unknown)) == (report.refused, report.unknown)
        assert all(isinstance(each.cause, OutcomeUnknown) for each in by_outcome[Outcome.UNKNOWN])
        found = read_back(environment, invoices)
        times = Counter(n for numbers in found.values() for n in numbers)
        assert max(times.values()) == 1, "stored twice"
        assert set(range(sending.sent)) - refused - unknown <= set(times), "lost"
        assert not refused & set(times)
        for stream, numbers in found.items():
            assert numbers == sorted(numbers), f"{stream} is out of order"
        print(
            f"\n{chosen_version}, unnamed, leader killed: {report.stored} stored, "
            f"{len(unknown)} unknown, of which {len(unknown & set(times))} are there;"
        )
        print(f"  longest time to the next confirm {producer.counters['longest_recovery']:.2f} s")


@pytest.mark.twin(
    "faults/test_stream_faults.py::test_nothing_is_lost_or_repeated_while_all_nodes_restart"
)
def test_a_named_producer_goes_on_while_all_nodes_restart(
    harmed: Cluster, chosen_version: str
) -> None:
    with (
        environment_of(harmed) as environment,
        super_stream_in(environment) as invoices,
        producing(environment, invoices, ProducerOptions(name="p"), 0) as (producer, sending),
    ):
        for node in harmed.nodes:
            # Streams live on while one node is away; they must be whole before the next one goes.
            prove_health(harmed)
            for stream in environment.partitions(invoices):
                await_replicas(environment, stream)
            node.restart()
        report = sending.end(timeout=90)
        report.raise_for_failures()
        with environment.consumer(invoices, offset="first") as consumer:
            found = read_all(consumer, sending.sent)
        for bodies in found.values():
            numbers = list(map(int, bodies))
            assert numbers == sorted(set(numbers))
        counters = producer.counters
        print(f"\n{chosen_version}, all nodes restarted: {sending.sent} stored once, in order;")
        print(
            f"  {counters['recoveries']} recoveries, longest time to the next confirm "
            f"{counters['longest_recovery']:.2f} s"
        )
