"""Messages of one key run one after another, whatever becomes of them; other keys go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sharding.groups.handling.delivery import (
    BatchFailed,
    Dead,
    Delivery,
    Done,
    Failed,
    GivenBack,
    Outcome,
    Why,
    failure_of,
)
from sharding.groups.handling.scheduler import Hung, Job, NotBegun, Scheduler, Ticket
from sharding.groups.options import GroupOptions, Retry
from sharding.groups.streams.options import StreamGroupOptions

RETRY = Retry(attempts=3, first_delay=1, factor=2, jitter=0)
FAILURE = failure_of(ValueError("no\nsecond line"))


class Runner:
    """A scheduler whose time is a number, and a list of what became of which message."""

    def __init__(self, **options: object) -> None:
        self.now = 0.0
        self.ends: dict[str, Outcome] = {}
        given = {"retry": RETRY, "consumer_timeout": None, **options}
        self.scheduler = Scheduler(
            GroupOptions(**given),  # type: ignore[arg-type]  # checked when it runs
            chance=lambda: 0.5,
            on_stored=lambda ticket: self.scheduler.stored(ticket, self.now),
        )

    def add(self, *names: str, shard: str = "s") -> None:
        """A name is its key and a number: "a1"."""
        for name in names:
            delivery = Delivery(name.encode(), name[0], shard)
            self.scheduler.submit(name[0], delivery, self._note(name), self.now)

    def _note(self, name: str) -> Callable[[Outcome], None]:
        def note(outcome: Outcome) -> None:
            assert name not in self.ends, "told twice"
            self.ends[name] = outcome

        return note

    def job(self) -> Job | None:
        return self.scheduler.next_job(self.now)

    def begin(self) -> tuple[list[str], Job]:
        job = self.job()
        assert job is not None
        return bodies(job.tickets), job

    def finish(self, job: Job, end: Failed | Hung | NotBegun | None = None) -> None:
        self.tell(self.scheduler.finish(job, end, self.now))

    def tell(self, settled: list[tuple[Ticket, Outcome]]) -> None:
        for ticket, outcome in settled:
            ticket.on_done(outcome)

    def run(self, end: Failed | Hung | None = None) -> list[str]:
        names, job = self.begin()
        self.finish(job, end)
        return names


def bodies(tickets: list[Ticket]) -> list[str]:
    return [ticket.delivery.body.decode() for ticket in tickets]


def test_keys_take_turns_and_each_keeps_its_order() -> None:
    runner = Runner()
    runner.add("a1", "a2", "b1", "a3")
    assert [runner.run() for _ in range(4)] == [["a1"], ["b1"], ["a2"], ["a3"]]
    assert runner.job() is None
    assert set(runner.ends.values()) == {Done()}


def test_messages_of_one_key_are_never_at_work_together() -> None:
    runner = Runner(parallelism=3)
    runner.add("a1", "a2", "b1")
    assert runner.begin()[0] == ["a1"]
    assert runner.begin()[0] == ["b1"]
    assert runner.job() is None


def test_the_same_key_in_two_shards_is_two_lanes() -> None:
    runner = Runner(parallelism=2)
    runner.add("a1", shard="s")
    runner.add("a2", shard="t")
    assert [runner.begin()[0], runner.begin()[0]] == [["a1"], ["a2"]]


def test_a_key_waits_for_the_next_attempt_and_others_go_on() -> None:
    runner = Runner()
    runner.add("a1", "a2", "b1")
    assert runner.run(FAILURE) == ["a1"]
    assert runner.run() == ["b1"]
    assert runner.job() is None
    assert runner.scheduler.next_time(runner.now) == 1
    runner.now = 1
    names, job = runner.begin()
    assert names == ["a1"]
    assert job.deliveries()[0].attempt == 2
    runner.finish(job)
    assert runner.run() == ["a2"]
    assert runner.scheduler.counters["retried"] == 1


def test_what_a_handler_does_to_its_delivery_is_its_own_affair() -> None:
    runner = Runner()
    runner.add("a1")
    _, job = runner.begin()
    (given,) = job.deliveries()
    object.__setattr__(given, "shard", None)
    object.__delattr__(given, "body")
    runner.finish(job, FAILURE)
    runner.now += 10
    assert runner.run() == ["a1"]


def test_a_batch_that_lies_about_what_is_done_has_done_nothing() -> None:
    runner = Runner(batch_size=2)
    runner.add("a1", "b1")
    runner.now += 10
    lie = BatchFailed(1)
    lie.done = "two"  # type: ignore[assignment]
    _, job = runner.begin()
    runner.finish(job, failure_of(lie))
    assert not runner.ends


def test_a_message_is_dead_after_its_last_attempt_and_its_key_waits_for_the_burial() -> None:
    runner = Runner()
    runner.add("a1", "a2")
    for _ in range(3):
        assert runner.run(FAILURE) == ["a1"]
        runner.now += 10
    dead = runner.ends["a1"]
    assert isinstance(dead, Dead)
    assert (dead.why, dead.error, dead.attempts) == (Why.FAILED, "ValueError: no", 3)
    assert runner.job() is None
    assert runner.scheduler.in_hand == 2
    dead.stored()
    assert runner.run() == ["a2"]


def test_nothing_is_ever_dead_where_dead_letters_have_no_place() -> None:
    runner = Runner(dead_letter=None)
    runner.add("a1")
    for _ in range(50):
        assert runner.run(FAILURE) == ["a1"]
        runner.now += 31
    assert runner.ends == {}


def test_a_handler_that_hangs_is_not_tried_again() -> None:
    runner = Runner()
    runner.add("a1")
    runner.run(Hung(7))
    dead = runner.ends["a1"]
    assert isinstance(dead, Dead)
    assert (dead.why, dead.attempts) == (Why.TIMEOUT, 1)
    assert "7 s" in dead.error


def test_a_batch_waits_until_it_is_full_or_its_time_has_come() -> None:
    runner = Runner(batch_size=3, batch_wait=5)
    runner.add("a1", "b1")
    assert runner.job() is None
    assert runner.scheduler.next_time(runner.now) == 5
    runner.add("a2")
    assert runner.run() == ["a1", "b1", "a2"]
    runner.add("a3")
    runner.now = 5
    assert runner.run() == ["a3"]


def test_batches_at_work_together_share_no_key() -> None:
    runner = Runner(batch_size=2, batch_wait=0, parallelism=3)
    runner.add("a1", "a2", "a3", "b1", "c1")
    assert runner.begin()[0] == ["a1", "a2"]
    assert runner.begin()[0] == ["b1", "c1"]
    assert runner.job() is None


def test_a_batch_that_keeps_failing_is_tried_one_by_one() -> None:
    runner = Runner(batch_size=3, batch_wait=0)
    runner.add("a1", "a2", "b1")
    for _ in range(3):
        assert runner.run(FAILURE) == ["a1", "a2", "b1"]
        runner.now += 10
    assert runner.run() == ["a1"]
    assert runner.run(FAILURE) == ["b1"]  # keys take turns
    assert runner.run() == ["a2"]
    for _ in range(2):
        runner.now += 10
        assert runner.run(FAILURE) == ["b1"]
    dead = runner.ends["b1"]
    assert isinstance(dead, Dead)
    assert dead.attempts == 6
    assert runner.ends["a1"] == runner.ends["a2"] == Done()


def test_what_a_batch_handler_says_is_done_is_done() -> None:
    runner = Runner(batch_size=3, batch_wait=0)
    runner.add("a1", "a2", "b1")
    runner.run(failure_of(BatchFailed(done=1)))
    assert runner.ends == {"a1": Done()}
    runner.now = 10
    assert runner.run() == ["a2", "b1"]


def test_a_batch_that_gets_further_counts_its_attempts_anew() -> None:
    runner = Runner(batch_size=9, batch_wait=0)
    runner.add(*(f"a{n}" for n in range(9)))
    for left in range(9, 0, -1):
        assert len(runner.run(failure_of(BatchFailed(done=1)))) == left
        runner.now += 100
    assert set(runner.ends.values()) == {Done()}


def test_a_batch_handler_can_not_do_more_than_it_got() -> None:
    runner = Runner(batch_size=2, batch_wait=0)
    runner.add("a1", "a2")
    runner.run(failure_of(BatchFailed(done=99)))
    assert set(runner.ends.values()) == {Done()}
    assert runner.scheduler.in_hand == 0


def test_a_batch_that_hangs_is_tried_one_by_one() -> None:
    runner = Runner(batch_size=2, batch_wait=0)
    runner.add("a1", "b1")
    runner.run(Hung(1))
    assert runner.ends == {}
    assert [runner.run(), runner.run()] == [["a1"], ["b1"]]


def test_a_released_shard_gives_back_what_is_not_running_and_then_what_fails() -> None:
    runner = Runner(parallelism=2)
    runner.add("a1", "a2", "b1", "c1")
    runner.run(FAILURE)  # a1 waits for its second attempt
    _, running = runner.begin()
    runner.add("d1", shard="t")
    calls: list[str] = []
    settled, at_once = runner.scheduler.release("s", lambda: calls.append("released"))
    runner.tell(settled)
    assert not at_once
    assert set(runner.ends) == {"a1", "a2", "c1"}
    assert set(runner.ends.values()) == {GivenBack()}
    assert runner.scheduler.take_released() == []
    runner.finish(running, FAILURE)
    assert runner.ends["b1"] == GivenBack()
    for call in runner.scheduler.take_released():
        call()
    assert calls == ["released"]
    assert runner.run() == ["d1"]
    assert runner.scheduler.in_hand == 0


def test_a_shard_taken_again_waits_for_the_old_message_of_the_same_key() -> None:
    runner = Runner(parallelism=2)
    runner.add("a1")
    _, old = runner.begin()
    runner.scheduler.release("s", lambda: None)
    runner.scheduler.accept("s")
    runner.ends.clear()
    delivery = Delivery(b"a1", "a", "s", redelivered=True)
    runner.scheduler.submit("a", delivery, lambda _: None, runner.now)
    assert runner.job() is None
    runner.finish(old, FAILURE)  # given back: its lock was lost
    assert runner.ends == {"a1": GivenBack()}
    assert runner.run() == ["a1"]


def test_nothing_of_a_shard_whose_lease_ran_out_is_begun() -> None:
    runner = Runner()
    runner.scheduler.set_lease("s", 5)
    runner.add("a1", "b1")
    assert runner.run(FAILURE) == ["a1"]
    runner.now = 5
    assert runner.job() is None
    runner.add("c1", shard="t")
    assert runner.run() == ["c1"]
    runner.scheduler.set_lease("s", 9)
    assert [runner.run(), runner.run()] == [["a1"], ["b1"]]


@pytest.mark.parametrize("size", [1, 4])
def test_stopping_gives_everything_back_that_is_not_running(size: int) -> None:
    runner = Runner(batch_size=size, batch_wait=0)
    runner.add("a1", "b1", "c1", "d1", "e1")
    names, running = runner.begin()
    runner.tell(runner.scheduler.stop())
    assert set(runner.ends) == {"a1", "b1", "c1", "d1", "e1"} - set(names)
    runner.finish(running, FAILURE)
    assert set(runner.ends.values()) == {GivenBack()}
    assert runner.scheduler.in_hand == 0


def test_what_no_handler_is_at_work_on_waits_since_it_came() -> None:
    runner = Runner()
    assert runner.scheduler.waiting_since() == {}
    runner.now = 1
    runner.add("a1")
    runner.now = 2
    runner.add("a2", "b1", shard="other")
    assert runner.scheduler.waiting_since() == {"s": 1, "other": 2}
    _, first = runner.begin()
    assert runner.scheduler.waiting_since() == {"other": 2}
    runner.finish(first, FAILURE)  # it waits for its next attempt
    assert runner.scheduler.waiting_since() == {"s": 1, "other": 2}


def test_what_is_stored_as_a_dead_letter_waits_too() -> None:
    runner = Runner(retry=Retry(attempts=1))
    runner.add("a1")
    _, job = runner.begin()
    [(ticket, dead)] = runner.scheduler.finish(job, FAILURE, 5)
    assert runner.scheduler.waiting_since() == {"s": 0}
    assert isinstance(dead, Dead)
    dead.stored()
    assert runner.scheduler.waiting_since() == {}
    assert ticket.tries == 1


def test_attempts_go_on_where_they_were_when_a_shard_is_taken_anew() -> None:
    runner = Runner()
    came_again = Delivery(b"a1", "a", "s", redelivered=True)
    runner.add("a1", "a2")
    _, job = runner.begin()
    runner.finish(job, FAILURE)
    runner.tell(runner.scheduler.release("s", lambda: None)[0])
    runner.tell(runner.scheduler.release("s", lambda: None)[0])  # the reader does so once more
    assert runner.ends == {"a1": GivenBack(), "a2": GivenBack()}
    runner.scheduler.accept("s")
    for delivery in (came_again, replace(came_again, body=b"a2")):
        runner.scheduler.submit("a", delivery, lambda _: None, runner.now)
    attempts = []
    for _ in range(2):
        runner.now += 10
        _, job = runner.begin()
        attempts.append(job.deliveries()[0].attempt)
        settled = runner.scheduler.finish(job, FAILURE, runner.now)
    assert attempts == [2, 3]
    [(_, dead)] = settled
    assert isinstance(dead, Dead)
    assert dead.attempts == 3
    dead.stored()
    names, job = runner.begin()
    assert (names, job.tickets[0].delivery.attempt) == (["a2"], 1)


def test_attempts_of_another_message_are_not_taken_for_those_of_the_one_before() -> None:
    runner = Runner()
    runner.add("a1")
    _, job = runner.begin()
    runner.tell(runner.scheduler.release("s", lambda: None)[0])
    runner.finish(job, FAILURE)  # it ran when the shard was left
    runner.scheduler.accept("s")
    runner.add("a2")
    _, job = runner.begin()
    assert job.tickets[0].delivery.attempt == 1


def test_a_message_in_hand_for_too_long_is_not_tried_again_before_its_shard_is_taken_anew() -> None:
    """A handler that fails after a while was at work whenever somebody looked for what waits: the
    broker took the shard away in the middle of it."""
    runner = Runner(consumer_timeout=100)
    runner.add("a1", "a2")
    _, job = runner.begin()
    runner.now = 39
    runner.add("b1")
    runner.finish(job, FAILURE)
    runner.now = 41
    assert runner.run() == ["b1"]
    assert runner.job() is None
    assert runner.scheduler.waiting_since() == {"s": 0}

    runner.tell(runner.scheduler.release("s", lambda: None)[0])
    runner.scheduler.accept("s")
    again = Delivery(b"a1", "a", "s", redelivered=True)
    runner.scheduler.submit("a", again, lambda _: None, runner.now)
    _, job = runner.begin()
    assert [each.attempt for each in job.deliveries()] == [2]


@pytest.mark.parametrize(
    ("renewed", "while_running"), [(0, False), (1, False), (3, False), (1, True), (3, True)]
)
def test_a_shard_that_is_taken_anew_uses_up_no_attempt_early(
    renewed: int, while_running: bool
) -> None:
    runner = Runner()
    runner.add("a1")
    runner.now = 10
    _, job = runner.begin()
    if not while_running:
        runner.finish(job, FAILURE)  # so the next attempt is due at 11
    for _ in range(renewed):
        runner.ends.clear()
        runner.tell(runner.scheduler.release("s", lambda: None)[0])
        if while_running and runner.scheduler.in_hand:
            runner.finish(job, FAILURE)
        assert runner.ends == {"a1": GivenBack()}
        runner.scheduler.accept("s")
        again = Delivery(b"a1", "a", "s", redelivered=True)
        runner.scheduler.submit("a", again, runner._note("a1"), runner.now)
        runner.ends.clear()
        runner.add("b1")  # another key is not held up by it
        assert runner.run() == ["b1"]
        runner.now += 0.2
    runner.add("a2")
    assert runner.job() is None, "its key waits as before"
    assert runner.scheduler.next_time(runner.now) == 11
    runner.now = 11
    assert [runner.run(), runner.run()] == [["a1"], ["a2"]]


def test_where_the_broker_waits_for_ever_a_message_may_be_tried_so_late() -> None:
    for options in (GroupOptions(consumer_timeout=None), StreamGroupOptions(consumer_timeout=100)):
        assert options.longest_wait is None


def test_what_could_not_be_begun_in_time_was_not_tried() -> None:
    runner = Runner()
    runner.scheduler.set_lease("s", 5)
    runner.add("a1", "a2")
    _, job = runner.begin()
    assert runner.scheduler.may_begin(job, runner.now)
    runner.now = 6
    assert not runner.scheduler.may_begin(job, runner.now)
    runner.finish(job, NotBegun())
    assert runner.job() is None
    runner.scheduler.set_lease("s", 10)
    names, job = runner.begin()
    assert (names, [each.attempt for each in job.deliveries()]) == (["a1"], [1])

    runner.scheduler.release("s", lambda: None)
    assert not runner.scheduler.may_begin(job, runner.now)
    runner.finish(job, NotBegun())
    assert runner.ends["a1"] == GivenBack()
