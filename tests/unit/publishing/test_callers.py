"""Who shares a publisher is told of his own messages, and nobody's wait or end harms another's."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sharding.outcomes import NotStored, Report
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.clocks import Clock, TimedPublisher
from tests.unit.publishing.test_publisher_deadlines import NoWay


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def publisher(clock: Clock) -> Iterator[TimedPublisher]:
    """One whose messages are all refused, two seconds of that clock after they were accepted."""
    made = TimedPublisher(clock, NoWay(), "images", confirm_timeout=2)
    yield made
    made.close(0)


def refused(report: Report) -> list[int]:
    assert report.refused == len(report.not_stored)
    return [result.number for result in report.not_stored]


def test_each_batch_reports_its_own_messages(clock: Clock, publisher: TimedPublisher) -> None:
    first, second = publisher.batch(), publisher.batch()
    numbers = [caller.publish("k", b"") for caller in (first, second, first, publisher)]
    assert numbers == [0, 1, 2, 3]
    clock.pass_by(2)
    assert refused(second.flush(PATIENCE)) == [1]
    assert refused(first.flush(PATIENCE)) == [0, 2]
    assert refused(publisher.flush(PATIENCE)) == [3]
    assert first.flush() == second.flush() == publisher.flush() == Report()
    assert publisher.counters["refused"] == 4


def test_batches_that_flush_at_once_get_each_their_own(
    clock: Clock, publisher: TimedPublisher
) -> None:
    batches = [publisher.batch() for _ in range(4)]
    for _ in range(3):
        for batch in batches:
            batch.publish("k", b"")
    with ThreadPoolExecutor(4) as others:
        reports = [others.submit(batch.flush, PATIENCE) for batch in batches]
        wait_until(lambda: publisher._waiters == 4, PATIENCE)
        clock.pass_by(2)
        found = [refused(report.result(PATIENCE)) for report in reports]
    assert found == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_batch_does_not_wait_for_what_others_published(
    clock: Clock, publisher: TimedPublisher
) -> None:
    batch = publisher.batch()
    batch.publish("k", b"")
    clock.pass_by(1)
    publisher.publish("k", b"")
    clock.pass_by(1)
    assert refused(batch.flush(PATIENCE)) == [0]
    assert publisher.flush(timeout=0) == Report(pending=1)
    assert batch.flush(PATIENCE) == Report()


def test_block_of_a_batch_raises_for_its_own_messages(
    clock: Clock, publisher: TimedPublisher
) -> None:
    with publisher.batch() as fine:
        publisher.publish("k", b"")
        clock.pass_by(2)
        assert refused(publisher.flush(PATIENCE)) == [0]

    def publish_late() -> None:
        with publisher.batch() as batch:
            batch.publish("k", b"")
            clock.pass_by(2)

    with pytest.raises(NotStored) as caught:
        publish_late()
    assert refused(caught.value.report) == [1]
    assert "0 unsettled" in repr(fine)


def test_what_a_lost_batch_had_to_tell_the_publisher_tells(
    clock: Clock, publisher: TimedPublisher
) -> None:
    publisher.batch().publish("k", b"")
    gc.collect()
    clock.pass_by(2)
    wait_until(lambda: publisher.counters["refused"], PATIENCE)
    assert refused(publisher.flush(PATIENCE)) == [0]
    publisher.batch().publish("k", b"")
    gc.collect()
    clock.pass_by(2)
    assert refused(publisher.close(PATIENCE)) == [1]
    assert publisher.close() == Report()


def test_close_tells_what_a_batch_was_not_asked_for_and_the_batch_tells_it_too(
    clock: Clock, publisher: TimedPublisher
) -> None:
    batch = publisher.batch()
    batch.publish("k", b"")
    publisher.publish("k", b"")
    clock.pass_by(2)
    assert sorted(refused(publisher.close(PATIENCE))) == [0, 1]
    assert publisher.close() == Report()
    assert refused(batch.flush()) == [0]
    assert batch.flush() == Report()


def test_flush_ends_beside_others_that_publish_and_do_not_wait(
    clock: Clock, publisher: TimedPublisher
) -> None:
    publisher.publish("k", b"")
    with ThreadPoolExecutor(1) as other:
        flushed = other.submit(publisher.flush, PATIENCE)
        wait_until(lambda: publisher._waiters, PATIENCE)
        for _ in range(40):  # something of theirs is always under way
            clock.pass_by(0.1)
            publisher.publish("k", b"")
            publisher.flush(timeout=0.01)
        assert flushed.result(PATIENCE).pending == 0


def test_who_closes_it_too_cuts_nothing_short_and_is_told_the_same(
    clock: Clock, publisher: TimedPublisher
) -> None:
    publisher.publish("k", b"")
    with ThreadPoolExecutor(2) as others:
        closed = [others.submit(publisher.close, PATIENCE) for _ in range(2)]
        wait_until(lambda: publisher._waiters == 2, PATIENCE)
        clock.pass_by(2)
        first, second = (each.result(PATIENCE) for each in closed)
    assert first == second
    assert "not sent before its deadline" in first.not_stored[0].reason
    assert publisher.close() == Report()


def test_shorter_time_of_two_that_close_it_counts(publisher: TimedPublisher) -> None:
    publisher.publish("k", b"")
    with ThreadPoolExecutor(1) as other:
        patient = other.submit(publisher.close, 10 * PATIENCE)
        wait_until(lambda: publisher._waiters, PATIENCE)
        report = publisher.close(0.1)
        assert refused(patient.result(PATIENCE)) == [0]
    assert report.refused + report.pending == 1


class Exiting(NoWay):
    """A routing of the application's that exits whenever the publisher's thread asks it."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = 0

    def _exit(self) -> None:
        if threading.current_thread().name.startswith("warren-publisher"):
            self.exits += 1
            sys.exit("not the publisher's end")

    def shard_map(self, logical: str):  # type: ignore[no-untyped-def]
        self._exit()
        return super().shard_map(logical)

    def connection_parameters(self, node: str):  # type: ignore[no-untyped-def]
        self._exit()
        return super().connection_parameters(node)


def test_application_that_exits_in_the_publishers_thread_does_not_end_it(clock: Clock) -> None:
    routing = Exiting()
    publisher = TimedPublisher(clock, routing, "images", confirm_timeout=2)
    publisher.publish("k", b"")
    wait_until(lambda: routing.exits > 2, PATIENCE)
    clock.pass_by(2)
    report = publisher.flush(PATIENCE)
    assert "not sent before its deadline" in report.not_stored[0].reason
    publisher.close()
