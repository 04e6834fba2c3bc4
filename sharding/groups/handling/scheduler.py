"""Which message may run now. Pure: the time is passed in, and nothing is locked.

Every message belongs to a lane: a key of a shard. The rules:

1. A lane's messages run in the order they came. While one of them runs, waits for its next
   attempt or is being stored as a dead letter, the others of its lane wait.
2. Lanes take turns: one that has had its turn goes to the end.
3. A batch is begun when it is full, or when the lane that has been ready longest has been so for
   `batch_wait`. It may hold several messages of one lane, in order; the whole batch is one turn of
   all its lanes. What is to be tried alone is never put into a batch.
4. Messages of a shard whose lease has run out are not begun. A worker that was frozen may have
   lost its shards without knowing; its lease has run out when it wakes, and only an answer of the
   broker renews it. A shard without a lease is not bound by this.
5. A message that is in hand for `longest_wait` is not begun, nor tried again. The broker takes a
   shard away whose messages it waits for too long; this one waits until the shard is taken again.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from sharding.groups.handling.delivery import (
    Dead,
    Delivery,
    Done,
    Failed,
    GivenBack,
    OnDone,
    Outcome,
    Why,
)
from sharding.groups.options import GroupOptions, Retry

LaneId = tuple[str, Hashable]


@dataclass(slots=True, eq=False)
class Ticket:
    """One message in the runner's hands."""

    lane: LaneId
    delivery: Delivery
    on_done: OnDone
    number: int
    since: float = 0.0
    """When it was submitted."""
    tries: int = 0
    earlier: int = 0
    """How often it was tried before it was given back and came again."""
    not_before: float = 0.0
    """When its next attempt is due."""
    alone: bool = False
    end: Outcome | None = None
    """What became of it; set before anything else that follows from it."""
    told: bool = False
    """Whether its owner has heard of that."""


@dataclass(slots=True, eq=False)
class Job:
    """What one handler call gets."""

    tickets: list[Ticket]
    tries: int = 0
    """How often just these were tried together, since the last progress."""
    begun: float = 0.0
    abandoned: bool = False
    """Its handler hangs, and whatever it does is no longer heard."""

    def deliveries(self) -> list[Delivery]:
        """What the handler gets: its own, since Python lets it write into anything it is given."""
        return [replace(each.delivery, attempt=each.tries) for each in self.tickets]


@dataclass(slots=True, eq=False)
class _Lane:
    waiting: deque[Ticket] = field(default_factory=deque)
    out: set[Ticket] = field(default_factory=set)
    """Its messages that are taken and not settled; several in a batch."""


class Lanes:
    def __init__(
        self, batch_size: int, batch_wait: float, longest_wait: float | None = None
    ) -> None:
        self._batch_size = batch_size
        self._batch_wait = batch_wait
        self._longest_wait = float("inf") if longest_wait is None else longest_wait
        self._lanes: dict[LaneId, _Lane] = {}
        self._ready: dict[LaneId, float] = {}  # idle lanes with messages → since when, in turn
        self._later: list[tuple[float, int, Job]] = []
        self._leases: dict[str, float] = {}
        self._begun: dict[str, int] = {}  # by shard, the last number that was begun
        self._count = 0

    def add(
        self,
        lane: Hashable,
        delivery: Delivery,
        on_done: OnDone,
        now: float,
        earlier: int = 0,
        not_before: float = 0.0,
    ) -> Ticket:
        self._count += 1
        ticket = Ticket(
            (delivery.shard, lane), delivery, on_done, self._count, now, earlier, earlier
        )
        state = self._lanes.setdefault(ticket.lane, _Lane())
        if not_before > now and not state.out and not state.waiting:
            state.out.add(ticket)
            self.again(Job([ticket], earlier), not_before)
            return ticket
        state.waiting.append(ticket)
        if not state.out:
            self._ready.setdefault(ticket.lane, now)
        return ticket

    def set_lease(self, shard: str, until: float | None) -> None:
        if until is None:
            self._leases.pop(shard, None)
        else:
            self._leases[shard] = until

    def next_job(self, now: float) -> Job | None:
        """What to run now; its lanes are busy until `free` is called for each ticket."""
        job = self._due(now)
        if job is None:
            job = self._single(now) if self._batch_size == 1 else self._batch(now)
        if job is not None:
            job.begun = now
        return job

    def next_time(self, now: float) -> float | None:
        """When `next_job` may have something although nothing happened in between."""
        times = [at for at, _, _ in self._later[:1]]
        first = next(self._in_turn(now), None)
        if first is not None and self._batch_size > 1:
            times.append(self._ready[first] + self._batch_wait)
        future = [at for at in times if at > now]
        return min(future, default=None)

    def may_begin(self, job: Job, now: float) -> bool:
        return all(self._may_begin(ticket, now) for ticket in job.tickets)

    def again(self, job: Job, at: float) -> None:
        """Run the same job again from `at` on; its lanes stay busy."""
        for ticket in job.tickets:
            ticket.not_before = at
        self._count += 1
        heapq.heappush(self._later, (at, self._count, job))

    def alone(self, tickets: list[Ticket], now: float) -> None:
        """Put the messages of a batch back to the heads of their lanes, to be tried one by one."""
        for ticket in reversed(tickets):
            ticket.alone = True
            self._lanes[ticket.lane].waiting.appendleft(ticket)
        for ticket in tickets:
            self.free(ticket, now)

    def free(self, ticket: Ticket, now: float) -> None:
        """A message is settled; its lane goes on when all that were taken from it are."""
        state = self._lanes.get(ticket.lane)
        if state is None:
            return
        state.out.discard(ticket)
        if state.out:
            return
        if state.waiting:
            self._ready.setdefault(ticket.lane, now)
        else:
            self._lanes.pop(ticket.lane, None)

    def repair(self, out: set[Ticket], lost: Iterable[Ticket], now: float) -> None:
        """Somebody was interrupted in here: put right what depends on each other.

        `out` is with handlers or being stored, `lost` is nowhere, and goes to the head of its lane.
        """
        busy = out.union(*(job.tickets for _, _, job in self._later))
        for ticket in sorted(lost, key=lambda ticket: -ticket.number):
            self._lanes.setdefault(ticket.lane, _Lane()).waiting.appendleft(ticket)
        for id_, state in list(self._lanes.items()):
            state.out &= busy
            if state.out or not state.waiting:
                self._ready.pop(id_, None)
                if not state.out:
                    del self._lanes[id_]
            else:
                self._ready.setdefault(id_, now)
        for id_ in self._ready.keys() - self._lanes.keys():
            del self._ready[id_]

    def drop(self, shard: str) -> list[Ticket]:
        """Forget what of a shard is not running now, and return it in order."""
        dropped = [t for id_, lane in self._lanes.items() if id_[0] == shard for t in lane.waiting]
        for id_ in [each for each in self._lanes if each[0] == shard]:
            self._lanes[id_].waiting.clear()
            self._ready.pop(id_, None)
        for _, _, job in self._later:
            given = [ticket for ticket in job.tickets if ticket.lane[0] == shard]
            job.tickets = [ticket for ticket in job.tickets if ticket.lane[0] != shard]
            for ticket in given:
                self._lanes[ticket.lane].out.discard(ticket)
            dropped += given
        self._later = [entry for entry in self._later if entry[2].tickets]
        heapq.heapify(self._later)
        for id_ in [each for each in self._lanes if each[0] == shard]:
            if not self._lanes[id_].out:
                del self._lanes[id_]
        return sorted(dropped, key=lambda ticket: ticket.number)

    def trim(self, shard: str) -> list[Ticket]:
        """Forget what of a shard came after all that was begun, and return it in order."""
        begun = self._begun.get(shard, 0)
        trimmed: list[Ticket] = []
        for id_ in [each for each in self._lanes if each[0] == shard]:
            lane = self._lanes[id_]
            trimmed += [ticket for ticket in lane.waiting if ticket.number > begun]
            lane.waiting = deque(ticket for ticket in lane.waiting if ticket.number <= begun)
            if not lane.waiting:
                self._ready.pop(id_, None)
                if not lane.out:
                    del self._lanes[id_]
        return sorted(trimmed, key=lambda ticket: ticket.number)

    def __iter__(self) -> Iterator[Ticket]:
        """All that waits, for its turn or for its next attempt."""
        for lane in self._lanes.values():
            yield from lane.waiting
        for _, _, job in self._later:
            yield from job.tickets

    def drop_all(self) -> list[Ticket]:
        return [
            ticket
            for shard in dict.fromkeys(id_[0] for id_ in self._lanes)
            for ticket in self.drop(shard)
        ]

    def _due(self, now: float) -> Job | None:
        skipped = []
        found = None
        while self._later and self._later[0][0] <= now and found is None:
            entry = heapq.heappop(self._later)
            if self.may_begin(entry[2], now):
                found = entry[2]
            else:
                skipped.append(entry)
        for entry in skipped:
            heapq.heappush(self._later, entry)
        return found

    def _may_begin(self, ticket: Ticket, now: float) -> bool:
        until = self._leases.get(ticket.lane[0])
        return (until is None or now < until) and now - ticket.since < self._longest_wait

    def _in_turn(self, now: float) -> Iterator[LaneId]:
        return (lane for lane in self._ready if self._may_begin(self._lanes[lane].waiting[0], now))

    def _single(self, now: float) -> Job | None:
        lane = next(self._in_turn(now), None)
        return None if lane is None else self._alone(lane)

    def _alone(self, lane: LaneId) -> Job:
        ticket = self._take(lane)
        return Job([ticket], ticket.earlier)

    def _batch(self, now: float) -> Job | None:
        chosen: dict[LaneId, int] = {}
        room = self._batch_size
        for lane in self._in_turn(now):
            waiting = self._lanes[lane].waiting
            if waiting[0].alone:
                return self._alone(lane)
            few = [ticket.alone for ticket, _ in zip(waiting, range(room), strict=False)]
            chosen[lane] = few.index(True) if True in few else len(few)
            room -= chosen[lane]
            if not room:
                break
        if not chosen:
            return None
        if room and now < self._ready[next(iter(chosen))] + self._batch_wait:
            return None
        tickets = [self._take(lane) for lane, count in chosen.items() for _ in range(count)]
        return Job(sorted(tickets, key=lambda ticket: ticket.number))

    def _take(self, lane: LaneId) -> Ticket:
        self._ready.pop(lane, None)
        state = self._lanes[lane]
        ticket = state.waiting[0]
        state.out.add(ticket)
        state.waiting.popleft()
        self._begun[lane[0]] = max(ticket.number, self._begun.get(lane[0], 0))
        return ticket


# What to do next with messages whose handler failed. Pure.
#
# The rules:
#
# 1. A message is tried `attempts` times, with growing pauses. Its key waits, other keys go on.
# 2. A batch is tried as a batch first, `attempts` times. Then its messages are tried one by one,
#    each `attempts` times of its own, so that only the poisonous ones become dead letters. One by
#    one, the pauses of different keys run side by side.
# 3. A batch that got further (`BatchFailed(done=n)` with n > 0) counts its attempts from the
#    start: another message is at its head now.
# 4. A handler that hangs is not tried again, since it may be at work on the message still. A batch
#    that hangs is tried one by one, because only one of its messages may be at fault.
# 5. Where there is no place for dead letters, nothing is ever given up: the last pause is repeated.


@dataclass(frozen=True, slots=True)
class Again:
    """Try the same messages, as they are, after so many seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Try each message of the batch alone."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The message is a dead letter."""


Verdict = Again | OneByOne | GiveUp


def after_failure(
    retry: Retry, *, tries: int, size: int, hung: bool, has_dead_letters: bool, chance: float
) -> Verdict:
    """The verdict on `size` messages that failed together for the `tries`-th time.

    `has_dead_letters` says whether there is a place for dead letters, `chance` is a random number.
    """
    if size > 1 and (hung or tries >= retry.attempts):
        return OneByOne()
    if (hung or tries >= retry.attempts) and has_dead_letters:
        return GiveUp()
    return Again(retry.delay(tries, chance))


Settled = tuple[Ticket, Outcome]
OnReleased = Callable[[], None]


# What is decided for the threads or tasks that run handlers: which job next, what after it.
#
# They ask for a job, run the handler, and say how it ended; they get back which messages
# are settled, and how. Nothing here locks: one caller at a time.


@dataclass(frozen=True, slots=True)
class Hung:
    """How a job ended whose handler took too long."""

    seconds: float


class NotBegun:
    """How a job ended that could not be begun in time: its shard was left, or its lease ran out."""


class _Tried(NamedTuple):
    """What is known of a message that is given back, for when it comes again."""

    body: bytes
    tries: int
    not_before: float


_UNTRIED = _Tried(b"", 0, 0.0)


class Scheduler:
    """`on_stored` is called with a ticket when its dead letter is stored; it must reach
    `stored`."""

    def __init__(
        self,
        options: GroupOptions,
        chance: Callable[[], float],
        on_stored: Callable[[Ticket], None],
    ) -> None:
        self._options = options
        self._chance = chance
        self._on_stored = on_stored
        self._lanes = Lanes(options.batch_size, options.batch_wait, options.longest_wait)
        self._in_hand: dict[Ticket, None] = {}
        self._out: dict[Ticket, None] = {}  # with a handler, or being stored as a dead letter
        self._with_handler: set[Ticket] = set()
        self._refused: set[str] = set()
        self._forsaken: set[Ticket] = set()
        self._given_back: dict[str, dict[Hashable, _Tried]] = {}  # by shard and lane
        self._releases: list[tuple[set[Ticket], OnReleased]] = []
        self._stopping = False
        self.counters: Counter[str] = Counter(
            dict.fromkeys(("handled", "failed", "retried", "hung", "dead", "requeued"), 0)
        )

    @property
    def in_hand(self) -> int:
        """Messages that are submitted and not settled."""
        return len(self._in_hand)

    def counted(self, *, running: int, lost: int) -> Mapping[str, float]:
        """How many messages or calls ended in which way, and what is in hand now.

        How many handlers run, and how many are lost, only who runs them knows.
        """
        now = {"in_hand": len(self._in_hand), "running": running, "lost_threads": lost}
        return {**self.counters, **now}

    def submit(self, lane: Hashable, delivery: Delivery, on_done: OnDone, now: float) -> None:
        tried = self._given_back.get(delivery.shard, {}).pop(lane, _UNTRIED)
        if not delivery.redelivered or delivery.body != tried.body:
            tried = _UNTRIED
        ticket = self._lanes.add(lane, delivery, on_done, now, tried.tries, tried.not_before)
        self._in_hand[ticket] = None

    def set_lease(self, shard: str, until: float | None) -> None:
        self._lanes.set_lease(shard, until)

    def next_job(self, now: float) -> Job | None:
        job = self._lanes.next_job(now)
        if job is not None:
            job.tries += 1
            self._out.update(dict.fromkeys(job.tickets))
            self._with_handler.update(job.tickets)
            for ticket in job.tickets:
                ticket.tries += 1
        return job

    def may_begin(self, job: Job, now: float) -> bool:
        """Whether it may still be begun, for who takes a while between `next_job` and that."""
        left = any(self._is_leaving(ticket) for ticket in job.tickets)
        return not left and self._lanes.may_begin(job, now)

    def next_time(self, now: float) -> float | None:
        return self._lanes.next_time(now)

    def waiting_since(self) -> dict[str, float]:
        """By shard, since when the first message is in hand that no handler is at work on."""
        since: dict[str, float] = {}
        for ticket in chain(self._lanes, self._out.keys() - self._with_handler):
            shard = ticket.delivery.shard
            since[shard] = min(ticket.since, since.get(shard, ticket.since))
        return since

    def finish(self, job: Job, end: Failed | Hung | NotBegun | None, now: float) -> list[Settled]:
        """Settle what can be settled of a job, and put the rest where it belongs."""
        self._with_handler.difference_update(job.tickets)
        done = len(job.tickets)
        if isinstance(end, NotBegun):
            done = 0
            job.tries -= 1
            for ticket in job.tickets:
                ticket.tries -= 1
        elif end is not None:
            self.counters["hung" if isinstance(end, Hung) else "failed"] += 1
            done = min(end.done, done) if isinstance(end, Failed) else 0
        settled = [self._settle(ticket, Done(), now) for ticket in job.tickets[:done]]
        self.counters["handled"] += done
        rest = Job(job.tickets[done:], 0 if done else job.tries)
        if not rest.tickets or end is None:
            return settled
        leaving = {ticket for ticket in rest.tickets if self._is_leaving(ticket)}
        for ticket in leaving:
            if not isinstance(end, NotBegun):
                ticket.not_before = now + self._options.retry.delay(ticket.tries, self._chance())
            self._remember(ticket)
        settled += [self._settle(t, GivenBack(), now) for t in rest.tickets if t in leaving]
        rest.tickets = [ticket for ticket in rest.tickets if ticket not in leaving]
        if isinstance(end, NotBegun):
            self._wait_again(rest, now)
            return settled
        return settled + (self._after_failure(rest, end, now) if rest.tickets else [])

    def release(self, shard: str, on_released: OnReleased) -> tuple[list[Settled], bool]:
        """Begin no more messages of a shard; what is not running is given back.

        Also tells whether nothing of it is in hand any more; if something is, `on_released` is
        among what `take_released` returns when that is settled.
        """
        self._refused.add(shard)
        dropped = self._lanes.drop(shard)
        if dropped:
            self._given_back[shard] = {}
        for ticket in dropped:
            self._remember(ticket)
        settled = [self._give_back(ticket) for ticket in dropped]
        running = {ticket for ticket in self._out if ticket.delivery.shard == shard}
        self._forsaken |= running
        if running:
            self._releases.append((running, on_released))
        return settled, not running

    def trim(self, shard: str) -> list[Settled]:
        """Give back what of a shard came after all that was begun; the rest goes on as usual."""
        return [self._give_back(ticket) for ticket in self._lanes.trim(shard)]

    def is_released(self, shard: str) -> bool:
        return shard in self._refused

    def accept(self, shard: str) -> None:
        """Messages of a released shard may be submitted again."""
        self._refused.discard(shard)

    def take_released(self) -> list[OnReleased]:
        """What to call because the last message of a released shard was settled."""
        calls = [call for running, call in self._releases if not running]
        self._releases = [entry for entry in self._releases if entry[0]]
        return calls

    def stop(self) -> list[Settled]:
        """Begin nothing more of any shard."""
        self._stopping = True
        return [self._give_back(ticket) for ticket in self._lanes.drop_all()]

    def stored(self, ticket: Ticket, now: float) -> None:
        """The dead letter is stored; its key goes on."""
        if ticket in self._in_hand:
            self._settle(ticket, Done(), now)

    def recover(
        self, job: Job | None, running: Iterable[Job], failed: Failed, now: float
    ) -> list[Settled]:
        """Go on after a call of this class was interrupted at any place, by who works on `job`.

        Nothing that was under way is trusted. What is in hand is known, and where it should be:
        with handlers (`running`), with whoever stores dead letters, or in its lane. The answer has
        all of the job that is settled and whose owner may not have heard of it.
        """
        tickets = [] if job is None else job.tickets
        ended: list[Settled] = []
        if job is not None and self._with_handler.issuperset(tickets):  # it was not touched yet
            ended = self.finish(job, failed, now)
        self._with_handler.difference_update(tickets)
        for ticket in tickets:
            if ticket.end is not None and not ticket.told:
                if not isinstance(ticket.end, Dead):
                    self._settle(ticket, ticket.end, now)
                if all(ticket is not each for each, _ in ended):
                    ended.append((ticket, ticket.end))
        at_work = {ticket for each in running for ticket in each.tickets}
        waiting = set(self._lanes)
        lost = [
            ticket
            for ticket in self._in_hand
            if ticket.end is None and ticket not in at_work and ticket not in waiting
        ]
        for ticket in lost:
            ticket.earlier = ticket.tries  # its attempts go on
        for ticket in waiting.union(lost):
            self._out.pop(ticket, None)
            self._with_handler.discard(ticket)
        leaving = [ticket for ticket in lost if self._is_leaving(ticket)]
        self._lanes.repair(set(self._out), [t for t in lost if t not in leaving], now)
        return ended + [self._settle(ticket, GivenBack(), now) for ticket in leaving]

    def _is_leaving(self, ticket: Ticket) -> bool:
        return self._stopping or ticket in self._forsaken

    def _after_failure(self, job: Job, end: Failed | Hung, now: float) -> list[Settled]:
        verdict = after_failure(
            self._options.retry,
            tries=max(job.tries, 1),
            size=len(job.tickets),
            hung=isinstance(end, Hung),
            has_dead_letters=self._options.dead_letter is not None,
            chance=self._chance(),
        )
        if not isinstance(verdict, GiveUp):
            self.counters["retried"] += len(job.tickets)
        if isinstance(verdict, Again):
            self._wait_again(job, now + verdict.delay)
            return []
        if isinstance(verdict, OneByOne):
            for ticket in job.tickets:
                self._out.pop(ticket, None)
            self._lanes.alone(job.tickets, now)
            return []
        ticket = job.tickets[0]
        self.counters["dead"] += 1
        if isinstance(end, Hung):
            why, error = Why.TIMEOUT, f"the handler did not return within {end.seconds:g} s"
        else:
            why, error = Why.FAILED, end.error
        dead = ticket.end = Dead(why, error, ticket.tries, lambda: self._on_stored(ticket))
        return [(ticket, dead)]

    def _wait_again(self, job: Job, at: float) -> None:
        for ticket in job.tickets:
            self._out.pop(ticket, None)
        if job.tickets:
            self._lanes.again(job, at)

    def _settle(self, ticket: Ticket, outcome: Outcome, now: float) -> Settled:
        """May be done again, if it was interrupted, and begins and ends with what shows it."""
        ticket.end = outcome
        self._forsaken.discard(ticket)
        for running, _ in self._releases:
            running.discard(ticket)
        self._lanes.free(ticket, now)
        self._out.pop(ticket, None)
        if self._in_hand.pop(ticket, self) is None and isinstance(outcome, GivenBack):
            self.counters["requeued"] += 1
        return ticket, outcome

    def _remember(self, ticket: Ticket) -> None:
        """A shard that is taken again brings its messages in the old order: the first of a key is
        the one that was tried. Its attempts go on where they were, else they would have no end,
        and not before the next one is due, else they would be used up early. In batches it is not
        told which of them were its own, so there they begin again."""
        if ticket.tries and self._options.batch_size == 1:
            shard, lane = ticket.lane
            tried = self._given_back.setdefault(shard, {})
            tried[lane] = _Tried(ticket.delivery.body, ticket.tries, ticket.not_before)

    def _give_back(self, ticket: Ticket) -> Settled:
        """For what the lanes have dropped already."""
        self._in_hand.pop(ticket, None)
        self.counters["requeued"] += 1
        return ticket, GivenBack()
