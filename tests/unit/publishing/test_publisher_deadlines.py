"""When a publisher gives a message up: counted from its acceptance, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pika
import pytest

from sharding import ShardMap
from sharding.outcomes import NotStored, Outcome, PerhapsNotStored, Report, Result
from sharding.publishing.publisher import WindowFull
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.clocks import Clock, TimedPublisher
from tests.support.maps import queue_map


class NoWay:
    """A routing without addresses: every attempt to connect fails, and is told."""

    def __init__(self, on_attempt: Callable[[], None] = lambda: None) -> None:
        self._on_attempt = on_attempt
        self._maps = {"images": queue_map("a")}
        self._ways: dict[str, list[pika.ConnectionParameters]] = {}
        self._away: set[str] = set()

    def shard_map(self, logical: str) -> ShardMap | None:
        return self._maps[logical]

    def connection_parameters(self, node: str) -> Sequence[pika.ConnectionParameters]:
        self._on_attempt()
        return self._ways.get(node, [])

    def unavailable(self, shard: str) -> bool:
        return shard in self._away

    def suspect(self, shard: str) -> None: ...

    def refresh(self, timeout: float) -> None: ...


def test_wait_for_room_is_no_part_of_a_messages_time() -> None:
    clock = Clock()
    results: list[tuple[float, Result]] = []
    publisher = TimedPublisher(
        clock,
        NoWay(),
        "images",
        window=1,
        confirm_timeout=2,
        on_result=lambda result: results.append((clock.now, result)),
    )
    with ThreadPoolExecutor(1) as other:
        assert publisher.publish("first", b"") == 0
        with pytest.raises(WindowFull, match="1 of 1 messages"):
            publisher.publish("second", b"", timeout=0)
        second = other.submit(publisher.publish, "second", b"")
        wait_until(lambda: publisher._waiters, 30)  # it waits from the first second on
        clock.pass_by(2)
        assert second.result(30) == 1  # the first one is given up: there is room
        clock.pass_by(1.9)
        assert publisher.flush(timeout=0.2).pending == 1
        clock.pass_by(0.1)
        assert publisher.flush().pending == 0
    assert [(at, result.number, result.outcome) for at, result in results] == [
        (1_002, 0, Outcome.REFUSED),
        (1_004, 1, Outcome.REFUSED),
    ]
    publisher.close()


def test_attempts_to_connect_give_a_message_no_more_time() -> None:
    clock = Clock()
    settled: list[float] = []
    publisher = TimedPublisher(
        clock,
        NoWay(on_attempt=lambda: clock.pass_by(3)),
        "images",
        confirm_timeout=10,
        on_result=lambda _: settled.append(clock.now),
    )
    publisher.publish("key", b"")
    assert publisher.flush().refused == 1
    assert settled == [1_012]  # the fourth attempt, the first one after the deadline
    publisher.close()


def test_what_others_publish_meanwhile_is_not_pending_in_a_flush_that_got_all_it_waited_for() -> (
    None
):
    clock = Clock()
    publisher = TimedPublisher(clock, NoWay(), "images", confirm_timeout=2)
    publisher.publish("mine", b"")
    with ThreadPoolExecutor(1) as other:
        flushed = other.submit(publisher.flush, PATIENCE)
        wait_until(lambda: publisher._waiters, PATIENCE)
        clock.pass_by(1)
        publisher.publish("another's", b"")
        clock.pass_by(1)
        report = flushed.result(PATIENCE)
    assert (report.refused, report.pending) == (1, 0)
    with pytest.raises(NotStored):
        report.raise_for_failures()
    report = publisher.flush(timeout=0)
    assert report == Report(pending=1)
    with pytest.raises(PerhapsNotStored):
        report.raise_for_failures()
    clock.pass_by(1)
    assert [each.number for each in publisher.flush(PATIENCE).not_stored] == [1]
    publisher.close()
