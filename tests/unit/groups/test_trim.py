"""A shard that is left at one place: all before it is handled here, nothing after it."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from sharding.groups.handling.delivery import Delivery, Done, Failed, GivenBack, Outcome
from sharding.groups.handling.scheduler import Job, Scheduler
from sharding.groups.options import GroupOptions, Retry

RETRY = Retry(attempts=5, first_delay=1, factor=1, jitter=0)


class Shard:
    """Messages 0, 1, 2, … of one shard, each with a key, and what became of them."""

    def __init__(self, keys: str, **options: int) -> None:
        self.ends: dict[int, Outcome] = {}
        self.scheduler = Scheduler(
            GroupOptions(retry=RETRY, batch_wait=0, **options),  # type: ignore[arg-type]  # checked at run time
            chance=lambda: 0.5,
            on_stored=lambda _: None,
        )
        for number, key in enumerate(keys):
            delivery = Delivery(b"", key, "s", offset=number)
            self.scheduler.submit(key, delivery, partial(self.ends.__setitem__, number), 0)

    def finish(self, job: Job, end: Failed | None = None, now: float = 0) -> None:
        for ticket, outcome in self.scheduler.finish(job, end, now):
            ticket.on_done(outcome)

    def trim(self) -> None:
        for ticket, outcome in self.scheduler.trim("s"):
            ticket.on_done(outcome)

    def work(self, now: float = 0) -> None:
        while (job := self.scheduler.next_job(now)) is not None:
            self.finish(job, now=now)

    def handled(self) -> list[int]:
        return sorted(number for number, end in self.ends.items() if isinstance(end, Done))


@given(st.text("abc", min_size=1, max_size=20), st.integers(0, 20), st.integers(1, 4))
def test_what_is_handled_after_trimming_has_no_hole(keys: str, jobs: int, batch: int) -> None:
    shard = Shard(keys, batch_size=batch)
    for _ in range(jobs):
        job = shard.scheduler.next_job(10)
        if job is not None:
            shard.finish(job, now=10)
    shard.trim()
    shard.work(now=20)
    handled = shard.handled()
    assert handled == list(range(len(handled)))
    given_back = [number for number, end in shard.ends.items() if isinstance(end, GivenBack)]
    assert sorted(given_back) == list(range(len(handled), len(keys)))
    assert shard.scheduler.in_hand == 0


def test_what_waits_for_its_next_attempt_is_tried_again_and_what_came_later_given_back() -> None:
    shard = Shard("abbc")
    first = shard.scheduler.next_job(0)
    assert first is not None
    shard.finish(first, Failed("ValueError"))
    second = shard.scheduler.next_job(0)
    assert second is not None
    shard.trim()
    assert shard.ends == {2: GivenBack(), 3: GivenBack()}
    shard.finish(second)
    shard.work(now=2)
    assert shard.handled() == [0, 1]


def test_shard_of_which_nothing_was_begun_is_given_back_whole() -> None:
    shard = Shard("abc")
    shard.trim()
    assert shard.ends == dict.fromkeys(range(3), GivenBack())
    assert shard.scheduler.next_job(0) is None
