"""Whoever takes a partition over begins where the last one stopped (s01)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from sharding.stream import Consumer, NotActive, StreamEnvironment
from sharding.stream.options import ConsumerOptions
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.hand_time import HandTimer
from tests.support.streams import environment_of, publish, stream_in, super_stream_in

pytestmark = pytest.mark.cluster

END = b"end"


@pytest.fixture(scope="module")
def environments(cluster: Cluster) -> Iterator[tuple[StreamEnvironment, StreamEnvironment]]:
    """Two, as two processes have them: each has connections of its own."""
    with (
        environment_of(cluster, **patient.STREAMS) as one,
        environment_of(cluster, **patient.STREAMS) as two,
    ):
        if one.server_version < (3, 11):
            pytest.skip("single active consumers came with RabbitMQ 3.11")
        yield one, two


def member(environment: StreamEnvironment, stream: str, **options: Any) -> Consumer:
    return environment.consumer(
        stream, name="billing", single_active=True, **patient.READER, **options
    )


def until_the_end(consumer: Consumer) -> list[int]:
    """What it is handed, up to the message `END`."""
    found: list[int] = []
    for message in consumer.messages(PATIENCE):
        if message.body == END:
            return found
        found.append(int(message.body))
    raise AssertionError(f"the end never came, after {found[-1:]}")


class ByHand:
    """In place of what does things later: they are done when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def schedule(self, delay: float, job: Callable[[], None]) -> HandTimer:
        self.jobs.append(job)
        return HandTimer(delay, job)


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("joined", ["before", "after"])
@pytest.mark.parametrize("begun", [0, 5])
def test_who_takes_over_misses_nothing_though_next_means_another_place_by_then(
    environments: tuple[StreamEnvironment, StreamEnvironment],
    stored: bool,
    joined: str,
    begun: int,
) -> None:
    one, two = environments
    with stream_in(one) as stream, ExitStack() as open_ones:
        if begun:
            publish(one, stream, numbers(1000, 1000 + begun))  # before anybody asked for "next"
        first = open_ones.enter_context(member(one, stream))
        wait_until(lambda: first.active)
        if joined == "before":
            second = open_ones.enter_context(member(two, stream))
        publish(two, stream, numbers(0, 100))
        if joined == "after":
            second = open_ones.enter_context(member(two, stream))
        handled = [int(message.body) for message in islice(first.messages(PATIENCE), 10)]
        if stored:
            first.store_offset()
        first.close()
        wait_until(lambda: second.active)
        publish(two, stream, [END])
        got = until_the_end(second)
        assert handled == list(range(10))
        assert got == list(range(10 if stored else 0, 100))


def test_what_was_dealt_with_is_stored_before_another_one_has_the_turn(
    environments: tuple[StreamEnvironment, StreamEnvironment],
) -> None:
    one, two = environments
    with super_stream_in(one, 2) as invoices, ExitStack() as open_ones:
        moves = one.partitions(invoices)[1]  # of two in line it is the second one's
        by_itself = {"offset": "first", "store_every_messages": 1_000_000}
        first = open_ones.enter_context(member(one, invoices, **by_itself))
        wait_until(lambda: len(first.active) == 2)
        publish(one, moves, numbers(0, 100))
        iteration = first.messages(PATIENCE)
        handled = [int(next(iteration).body) for _ in range(40)]
        second = open_ones.enter_context(member(two, invoices, **by_itself))
        wait_until(lambda: second.active == (moves,))
        publish(two, moves, [END])
        assert handled + until_the_end(second) == [*range(40), *range(39, 100)], (
            "what is in hand, and no more, comes again"
        )
        with pytest.raises(NotActive, match=moves):
            first.store_offset()
        before = two.stored_offset("billing", moves)
        first.store_offset()  # it knows by now that this is not its own any more
        assert two.stored_offset("billing", moves) == before


def test_answer_that_comes_too_late_makes_nobody_skip(
    environments: tuple[StreamEnvironment, StreamEnvironment],
) -> None:
    one, two = environments
    with super_stream_in(one, 2) as invoices, ExitStack() as open_ones:
        moves = one.partitions(invoices)[1]  # of two in line it is the second one's
        publish(one, moves, numbers(0, 10))
        later = ByHand()
        options = ConsumerOptions(
            name="billing", single_active=True, offset="first", **patient.READER
        )
        first = open_ones.enter_context(
            Consumer([moves], replace(one._access, later=later), options, super_stream=invoices)
        )
        wait_until(lambda: len(later.jobs) == 1)  # it has the turn, and does not say where
        with member(two, invoices, offset="first") as second:
            wait_until(lambda: moves in second.active)
        wait_until(lambda: len(later.jobs) == 2)  # it has the turn again
        answer, answer_again = later.jobs
        answer()
        publish(two, moves, numbers(10, 20))
        with two.consumer(moves, offset="first") as anybody:
            assert len(list(islice(anybody.messages(PATIENCE), 20))) == 20
        answer_again()
        publish(two, moves, [END])
        assert until_the_end(first) == list(range(20))
