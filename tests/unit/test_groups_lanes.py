"""Messages of one key run one after another, whatever becomes of them; other keys go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sharding.groups.delivery import (
    BatchFailed,
    Dead,
    Delivery,
    Done,
    GivenBack,
    Outcome,
    Why,
)
from sharding.groups.foreman import Foreman, Hung
from sharding.groups.lanes import Job, Ticket
from sharding.groups.options import GroupOptions, Retry

RETRY = Retry(attempts=3, first_delay=1, factor=2, jitter=0)
FAILURE = ValueError("no\nsecond line")


class Bench:
    """A foreman whose time is a number, and a list of what became of which message."""

    def __init__(self, **options: object) -> None:
        self.now = 0.0
        self.ends: dict[str, Outcome] = {}
        given = {"retry": RETRY, **options}
        self.foreman = Foreman(
            GroupOptions(**given),  # type: ignore[arg-type]  # checked when it runs
            chance=lambda: 0.5,
            buried=lambda ticket: self.foreman.bury(ticket, self.now),
        )

    def add(self, *names: str, shard: str = "s") -> None:
        """A name is its key and a number: "a1"."""
        for name in names:
            delivery = Delivery(name.encode(), name[0], shard)
            self.foreman.submit(name[0], delivery, self._note(name), self.now)

    def _note(self, name: str) -> Callable[[Outcome], None]:
        def note(outcome: Outcome) -> None:
            assert name not in self.ends, "told twice"
            self.ends[name] = outcome

        return note

    def job(self) -> Job | None:
        return self.foreman.next_job(self.now)

    def begin(self) -> tuple[list[str], Job]:
        job = self.job()
        assert job is not None
        return bodies(job.tickets), job

    def finish(self, job: Job, end: BaseException | Hung | None = None) -> None:
        self.tell(self.foreman.finish(job, end, self.now))

    def tell(self, settled: list[tuple[Ticket, Outcome]]) -> None:
        for ticket, outcome in settled:
            ticket.on_done(outcome)

    def run(self, end: BaseException | Hung | None = None) -> list[str]:
        names, job = self.begin()
        self.finish(job, end)
        return names


def bodies(tickets: list[Ticket]) -> list[str]:
    return [ticket.delivery.body.decode() for ticket in tickets]


def test_keys_take_turns_and_each_keeps_its_order() -> None:
    bench = Bench()
    bench.add("a1", "a2", "b1", "a3")
    assert [bench.run() for _ in range(4)] == [["a1"], ["b1"], ["a2"], ["a3"]]
    assert bench.job() is None
    assert set(bench.ends.values()) == {Done()}


def test_messages_of_one_key_are_never_at_work_together() -> None:
    bench = Bench(parallelism=3)
    bench.add("a1", "a2", "b1")
    assert bench.begin()[0] == ["a1"]
    assert bench.begin()[0] == ["b1"]
    assert bench.job() is None


def test_the_same_key_in_two_shards_is_two_lanes() -> None:
    bench = Bench(parallelism=2)
    bench.add("a1", shard="s")
    bench.add("a2", shard="t")
    assert [bench.begin()[0], bench.begin()[0]] == [["a1"], ["a2"]]


def test_a_key_waits_for_the_next_attempt_and_others_go_on() -> None:
    bench = Bench()
    bench.add("a1", "a2", "b1")
    assert bench.run(FAILURE) == ["a1"]
    assert bench.run() == ["b1"]
    assert bench.job() is None
    assert bench.foreman.next_time(bench.now) == 1
    bench.now = 1
    names, job = bench.begin()
    assert names == ["a1"]
    assert job.tickets[0].delivery.attempt == 2
    bench.finish(job)
    assert bench.run() == ["a2"]
    assert bench.foreman.counters["retried"] == 1


def test_a_message_is_dead_after_its_last_attempt_and_its_key_waits_for_the_burial() -> None:
    bench = Bench()
    bench.add("a1", "a2")
    for _ in range(3):
        assert bench.run(FAILURE) == ["a1"]
        bench.now += 10
    dead = bench.ends["a1"]
    assert isinstance(dead, Dead)
    assert (dead.why, dead.error, dead.attempts) == (Why.FAILED, "ValueError: no", 3)
    assert bench.job() is None
    assert bench.foreman.in_hand == 2
    dead.buried()
    assert bench.run() == ["a2"]


def test_nothing_is_ever_dead_where_dead_letters_have_no_place() -> None:
    bench = Bench(dead_letter=None)
    bench.add("a1")
    for _ in range(50):
        assert bench.run(FAILURE) == ["a1"]
        bench.now += 31
    assert bench.ends == {}


def test_a_handler_that_hangs_is_not_tried_again() -> None:
    bench = Bench()
    bench.add("a1")
    bench.run(Hung(7))
    dead = bench.ends["a1"]
    assert isinstance(dead, Dead)
    assert (dead.why, dead.attempts) == (Why.TIMEOUT, 1)
    assert "7 s" in dead.error


def test_a_batch_waits_until_it_is_full_or_its_time_has_come() -> None:
    bench = Bench(batch_size=3, batch_wait=5)
    bench.add("a1", "b1")
    assert bench.job() is None
    assert bench.foreman.next_time(bench.now) == 5
    bench.add("a2")
    assert bench.run() == ["a1", "b1", "a2"]
    bench.add("a3")
    bench.now = 5
    assert bench.run() == ["a3"]


def test_batches_at_work_together_share_no_key() -> None:
    bench = Bench(batch_size=2, batch_wait=0, parallelism=3)
    bench.add("a1", "a2", "a3", "b1", "c1")
    assert bench.begin()[0] == ["a1", "a2"]
    assert bench.begin()[0] == ["b1", "c1"]
    assert bench.job() is None


def test_a_batch_that_keeps_failing_is_tried_one_by_one() -> None:
    bench = Bench(batch_size=3, batch_wait=0)
    bench.add("a1", "a2", "b1")
    for _ in range(3):
        assert bench.run(FAILURE) == ["a1", "a2", "b1"]
        bench.now += 10
    assert bench.run() == ["a1"]
    assert bench.run(FAILURE) == ["b1"]  # keys take turns
    assert bench.run() == ["a2"]
    for _ in range(2):
        bench.now += 10
        assert bench.run(FAILURE) == ["b1"]
    dead = bench.ends["b1"]
    assert isinstance(dead, Dead)
    assert dead.attempts == 6
    assert bench.ends["a1"] == bench.ends["a2"] == Done()


def test_what_a_batch_handler_says_is_done_is_done() -> None:
    bench = Bench(batch_size=3, batch_wait=0)
    bench.add("a1", "a2", "b1")
    bench.run(BatchFailed(done=1))
    assert bench.ends == {"a1": Done()}
    bench.now = 10
    assert bench.run() == ["a2", "b1"]


def test_a_batch_that_gets_further_counts_its_attempts_anew() -> None:
    bench = Bench(batch_size=9, batch_wait=0)
    bench.add(*(f"a{n}" for n in range(9)))
    for left in range(9, 0, -1):
        assert len(bench.run(BatchFailed(done=1))) == left
        bench.now += 100
    assert set(bench.ends.values()) == {Done()}


def test_a_batch_handler_can_not_do_more_than_it_got() -> None:
    bench = Bench(batch_size=2, batch_wait=0)
    bench.add("a1", "a2")
    bench.run(BatchFailed(done=99))
    assert set(bench.ends.values()) == {Done()}
    assert bench.foreman.in_hand == 0


def test_a_batch_that_hangs_is_tried_one_by_one() -> None:
    bench = Bench(batch_size=2, batch_wait=0)
    bench.add("a1", "b1")
    bench.run(Hung(1))
    assert bench.ends == {}
    assert [bench.run(), bench.run()] == [["a1"], ["b1"]]


def test_a_released_shard_gives_back_what_is_not_running_and_then_what_fails() -> None:
    bench = Bench(parallelism=2)
    bench.add("a1", "a2", "b1", "c1")
    bench.run(FAILURE)  # a1 waits for its second attempt
    _, running = bench.begin()
    bench.add("d1", shard="t")
    calls: list[str] = []
    settled, at_once = bench.foreman.release("s", lambda: calls.append("released"))
    bench.tell(settled)
    assert not at_once
    assert set(bench.ends) == {"a1", "a2", "c1"}
    assert set(bench.ends.values()) == {GivenBack()}
    assert bench.foreman.take_released() == []
    bench.finish(running, FAILURE)
    assert bench.ends["b1"] == GivenBack()
    for call in bench.foreman.take_released():
        call()
    assert calls == ["released"]
    assert bench.run() == ["d1"]
    assert bench.foreman.in_hand == 0


def test_a_shard_taken_again_waits_for_the_old_message_of_the_same_key() -> None:
    bench = Bench(parallelism=2)
    bench.add("a1")
    _, old = bench.begin()
    bench.foreman.release("s", lambda: None)
    bench.foreman.accept("s")
    bench.ends.clear()
    delivery = Delivery(b"a1", "a", "s", redelivered=True)
    bench.foreman.submit("a", delivery, lambda _: None, bench.now)
    assert bench.job() is None
    bench.finish(old, FAILURE)  # given back: its lock was lost
    assert bench.ends == {"a1": GivenBack()}
    assert bench.run() == ["a1"]


def test_nothing_of_a_shard_whose_lease_ran_out_is_begun() -> None:
    bench = Bench()
    bench.foreman.set_lease("s", 5)
    bench.add("a1", "b1")
    assert bench.run(FAILURE) == ["a1"]
    bench.now = 5
    assert bench.job() is None
    bench.add("c1", shard="t")
    assert bench.run() == ["c1"]
    bench.foreman.set_lease("s", 9)
    assert [bench.run(), bench.run()] == [["a1"], ["b1"]]


@pytest.mark.parametrize("size", [1, 4])
def test_stopping_gives_everything_back_that_is_not_running(size: int) -> None:
    bench = Bench(batch_size=size, batch_wait=0)
    bench.add("a1", "b1", "c1", "d1", "e1")
    names, running = bench.begin()
    bench.tell(bench.foreman.stop())
    assert set(bench.ends) == {"a1", "b1", "c1", "d1", "e1"} - set(names)
    bench.finish(running, FAILURE)
    assert set(bench.ends.values()) == {GivenBack()}
    assert bench.foreman.in_hand == 0
