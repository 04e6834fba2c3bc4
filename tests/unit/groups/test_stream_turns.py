"""A partition changes hands: the broker's question waits for what is in hand, not for its thread.

The stream and its connection are in memory; threads, time and handlers are real.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from math import inf
from typing import Any, cast

import pytest

from sharding.groups.handling.delivery import Dead, Delivery
from sharding.groups.handling.threads import HandlerThreads
from sharding.groups.options import Retry
from sharding.groups.streams.options import MAX_HANDOVER, StreamGroupOptions
from sharding.groups.streams.partition import Begins, Changes, Ends, Lost, PartitionReader, Shared
from sharding.groups.streams.progress import Counts
from sharding.groups.streams.worker import _COUNTED as COUNTED
from sharding.stream.consumer.inbox import Inbox, Lane
from sharding.stream.errors import StreamNotFound, refusal
from sharding.stream.protocol.constants import NEXT, Code, OffsetSpec
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.fake_streams import FakeCluster


class DeadLetterStore:
    """Stores a letter when it is told to."""

    def __init__(self) -> None:
        self.letters: list[tuple[Delivery, Dead, Callable[[], None]]] = []

    def store(
        self,
        delivery: Delivery,
        dead: Dead,
        then: Callable[[], None],
        still: Callable[[], bool],  # noqa: ARG002
    ) -> None:
        self.letters.append((delivery, dead, then))

    def store_all(self) -> None:
        for _, dead, then in self.letters:
            then()
            dead.stored()


class Worker:
    """A reader of the fake cluster's stream; message 3 is at work until `let_go` is set.

    One that is `stuck` is at work until the end.
    """

    def __init__(self, *sizes: int, slow: int = 3, stuck: int = -1, **options: Any) -> None:
        self.cluster = FakeCluster(*sizes)
        self.handled: list[int] = []
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.dead_letters = DeadLetterStore()
        self._slow = slow
        self._stuck = stuck
        self._ends = threading.Event()
        chosen = StreamGroupOptions(
            **{"store_every_seconds": 1e6, "handover_timeout": MAX_HANDOVER, **options}
        )
        self.runner = HandlerThreads(self._handle, chosen)
        self.counts = Counts(COUNTED)
        self.shared = Shared(
            replace(self.cluster.access, clock=time.monotonic),
            chosen,
            chosen.reading("joe"),
            self.runner,
            self.dead_letters,
            self.counts,
            "s.members",
            lambda: None,
        )
        self.reader = PartitionReader("s", self.shared)
        self.reader.start()
        wait_until(lambda: self.cluster.clients and self.client.subscribed, PATIENCE)

    @property
    def client(self) -> Any:
        return self.cluster.client

    @property
    def stored(self) -> int | None:
        return self.cluster.stream.stored.get("joe")

    def take_turn(self) -> None:
        self.client.make_active(0, True)
        wait_until(lambda: self.reader.active, PATIENCE)

    def wait_for_work(self, in_hand: int) -> None:
        """Until the slow message is at work, and so many with it are submitted."""
        assert self.begun.wait(PATIENCE)
        wait_until(lambda: self.runner.counters["in_hand"] == in_hand, PATIENCE)

    def _handle(self, delivery: Delivery) -> None:
        offset = cast(int, delivery.offset)
        if offset == self._slow and not self.let_go.is_set():
            self.begun.set()
            assert self.let_go.wait(PATIENCE)
        if offset == self._stuck:
            assert self._ends.wait(2 * PATIENCE)
        if delivery.body == b"666":
            raise ValueError("poison")
        self.handled.append(offset)

    def close(self) -> None:
        self.let_go.set()
        self._ends.set()
        self.reader.stop(time.monotonic() + PATIENCE)
        assert self.reader.join(time.monotonic() + PATIENCE)
        self.runner.stop(1)


@pytest.fixture
def make() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def new(*sizes: int, **options: Any) -> Worker:
        made.append(Worker(*sizes, **options))
        return made[-1]

    yield new
    for worker in made:
        worker.close()


def test_the_answer_waits_for_what_is_at_work_and_the_offset_is_stored_before_it(
    make: Callable[..., Worker],
) -> None:
    worker = make(10)
    worker.take_turn()
    worker.wait_for_work(in_hand=7)
    stored_at_answer: list[int | None] = []
    asked = worker.client.handlers[0].on_activity(False)
    asked.add_done_callback(lambda _: stored_at_answer.append(worker.stored))
    wait_until(lambda: worker.runner.counters["requeued"] == 6, PATIENCE)
    assert not asked.done(), "the reading thread got a future at once, and no answer yet"
    worker.let_go.set()
    assert asked.result(PATIENCE) == NEXT
    assert worker.handled == [0, 1, 2, 3], "what was not begun is another's"
    wait_until(lambda: stored_at_answer, PATIENCE)  # a future wakes who waits before it calls back
    assert stored_at_answer == [3]
    wait_until(lambda: not worker.reader.active, PATIENCE)
    assert worker.counts.all()["released"] == 1


def test_a_handler_that_takes_too_long_is_not_waited_for(make: Callable[..., Worker]) -> None:
    worker = make(10, handover_timeout=0.2)
    worker.take_turn()
    worker.wait_for_work(in_hand=7)
    asked = worker.client.handlers[0].on_activity(False)
    assert asked.result(PATIENCE) == NEXT
    assert worker.stored == 2, "the one at work is not passed"
    assert worker.counts.all()["late_handovers"] == 1


@pytest.mark.parametrize(
    ("handlers_left", "least", "most"),
    [(3 * PATIENCE, 2 * PATIENCE, inf), (0.0, 0.0, PATIENCE)],
    ids=["until the deadline", "some of its own when handlers took all the time"],
)
def test_the_offset_of_a_handover_has_time_to_be_stored(
    make: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
    handlers_left: float,
    least: float,
    most: float,
) -> None:
    left: list[float] = []

    def store(*arguments: Any) -> None:
        deadline, clock = arguments[4:6]
        left.append(deadline - clock())

    monkeypatch.setattr("sharding.groups.streams.partition.store_offset_surely", store)
    worker = make(10)
    worker.take_turn()
    worker.wait_for_work(in_hand=7)
    wait_until(lambda: worker.stored is not None, PATIENCE)
    worker.let_go.set()  # what is handled from here on is not stored before the end
    wait_until(lambda: worker.handled == list(range(10)), PATIENCE)
    worker.reader.stop(time.monotonic() + handlers_left)
    assert worker.reader.join(time.monotonic() + PATIENCE)
    (given,) = left
    assert least < given < most


def test_an_offset_is_stored_in_time_though_the_thread_slept_with_nothing_to_store(
    make: Callable[..., Worker],
) -> None:
    worker = make(10, store_every_seconds=0.1, heartbeat=3600)
    worker.take_turn()
    worker.wait_for_work(in_hand=7)
    wait_until(lambda: worker.stored == 2, PATIENCE)
    worker.let_go.set()
    wait_until(lambda: worker.stored == 9, PATIENCE)


def test_an_offset_is_stored_in_time_though_the_thread_waits_for_room(
    make: Callable[..., Worker],
) -> None:
    worker = make(200, stuck=5, store_every_seconds=0.1, heartbeat=3600, prefetch=100)
    worker.take_turn()
    assert worker.begun.wait(PATIENCE)
    wait_until(lambda: worker.stored == 2, PATIENCE)
    worker.let_go.set()  # two more are handled: too few to hand in others instead
    wait_until(lambda: worker.stored == 4, PATIENCE)


def test_a_new_turn_goes_on_after_what_others_stored_and_after_what_was_handled_here(
    make: Callable[..., Worker],
) -> None:
    worker = make(10, slow=-1)
    worker.take_turn()
    wait_until(lambda: worker.handled == list(range(10)), PATIENCE)
    worker.client.make_active(0, False)
    wait_until(lambda: not worker.reader.active, PATIENCE)
    worker.cluster.stream.stored["joe"] = 4  # as after a leader that had not replicated it yet
    worker.cluster.stream.append(5)
    worker.take_turn()
    wait_until(lambda: worker.handled == list(range(15)), PATIENCE)
    assert worker.client.answered[-1] == (True, OffsetSpec.at(10))


def test_a_lost_connection_ends_the_turn_without_storing(make: Callable[..., Worker]) -> None:
    worker = make(10)
    worker.take_turn()
    worker.wait_for_work(in_hand=7)
    stored = worker.stored
    worker.client.lose()
    wait_until(lambda: worker.runner.counters["requeued"] == 6, PATIENCE)
    worker.let_go.set()
    wait_until(lambda: worker.counts.all()["lost"] == 1, PATIENCE)
    assert worker.stored == stored, "another may have stored a later one by now"
    assert worker.handled == [0, 1, 2, 3]


def test_what_was_handled_before_a_turn_was_lost_is_stored_when_it_is_won_back(
    make: Callable[..., Worker],
) -> None:
    worker = make(10, slow=-1)
    worker.take_turn()
    wait_until(lambda: worker.handled == list(range(10)), PATIENCE)
    lost = worker.client
    lost.lose()
    wait_until(lambda: not worker.reader.active, PATIENCE)
    worker.cluster.stream.stored["joe"] = 4  # the connection was lost before more arrived
    worker.cluster.run()
    wait_until(lambda: worker.client is not lost and worker.client.subscribed, PATIENCE)
    worker.take_turn()
    wait_until(lambda: worker.stored == 9, PATIENCE, lambda: f"stored {worker.stored}")
    assert worker.handled == list(range(10))


@pytest.mark.parametrize("asked", [True, False], ids=["by the broker", "by the worker itself"])
def test_a_handover_stores_what_got_lost_on_its_way_to_be_stored(
    make: Callable[..., Worker], asked: bool
) -> None:
    worker = make(10, slow=-1, store_every_messages=1)
    worker.take_turn()
    wait_until(lambda: worker.stored == 9, PATIENCE)
    worker.cluster.stream.stored["joe"] = 4
    if asked:
        worker.client.make_active(0, False)
        wait_until(lambda: not worker.reader.active, PATIENCE)
    else:
        worker.reader.stop(time.monotonic() + PATIENCE)
        assert worker.reader.join(time.monotonic() + PATIENCE)
    assert worker.stored == 9


def test_a_turn_in_which_nothing_was_handled_stores_nothing(make: Callable[..., Worker]) -> None:
    worker = make(10, slow=-1, offset=10)
    worker.take_turn()
    worker.client.make_active(0, False)
    wait_until(lambda: not worker.reader.active, PATIENCE)
    assert worker.stored is None, "where a group begins is its options' until it has begun"


def test_an_offset_passes_a_dead_letter_only_when_that_is_stored(
    make: Callable[..., Worker],
) -> None:
    worker = make(666, 3, slow=-1, store_every_messages=1, retry=Retry(attempts=1))
    worker.take_turn()
    wait_until(lambda: worker.dead_letters.letters, PATIENCE)
    wait_until(lambda: worker.stored == 665, PATIENCE, lambda: f"stored {worker.stored}")
    worker.dead_letters.store_all()
    wait_until(lambda: worker.stored == 668, PATIENCE, lambda: f"stored {worker.stored}")


def test_a_stream_that_is_gone_ends_the_reader_with_that(make: Callable[..., Worker]) -> None:
    worker = make(10, slow=-1)
    worker.take_turn()
    worker.cluster.no_stream = refusal("Route", Code.NO_SUCH_STREAM, "s")
    worker.client.lose()
    worker.cluster.run()
    wait_until(lambda: not worker.reader.alive, PATIENCE)
    assert isinstance(worker.reader.failure, StreamNotFound)


class TestChanges:
    def changes(self) -> tuple[Changes, list[None]]:
        woken: list[None] = []
        lane, inbox = Lane("s"), Inbox(10)
        return Changes(lane, inbox, lambda: woken.append(None)), woken

    def test_are_taken_in_the_order_they_came(self) -> None:
        changes, woken = self.changes()
        begins = changes.changed(True, cast(Any, None), lambda _: None)
        ends = changes.changed(False, cast(Any, None), lambda _: None)
        changes.ended()
        assert len(woken) == 3
        first, second, third = (changes.next() for _ in range(3))
        assert isinstance(first, Begins)
        assert first.answer is begins
        assert second == Ends(cast(Future[OffsetSpec], ends))
        assert third == Lost()
        assert changes.next() is None

    def test_are_answered_at_once_when_nobody_takes_them_any_more(self) -> None:
        changes, _ = self.changes()
        waiting = changes.changed(False, cast(Any, None), lambda _: None)
        changes.close()
        assert isinstance(waiting, Future)
        assert waiting.result(0) == NEXT
        assert changes.changed(True, cast(Any, None), lambda _: None) == NEXT
