"""What a workshop decides, without its threads or tasks: which job next, what after it. Pure.

The workshop asks for a job, runs the handler, and says how it ended; it gets back which messages
are settled, and how. Nothing here locks: one caller at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from sharding.groups.delivery import (
    BatchFailed,
    Dead,
    Delivery,
    Done,
    GivenBack,
    OnDone,
    Outcome,
    Why,
    first_line,
)
from sharding.groups.lanes import Job, Lanes, Ticket
from sharding.groups.options import GroupOptions
from sharding.groups.retrying import Again, Bury, OneByOne, after_failure

Settled = tuple[Ticket, Outcome]
OnReleased = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Hung:
    """How a job ended whose handler took too long."""

    seconds: float


class Foreman:
    """`buried` is called with a ticket when its dead letter is stored; it must reach `bury`."""

    def __init__(
        self,
        options: GroupOptions,
        chance: Callable[[], float],
        buried: Callable[[Ticket], None],
    ) -> None:
        self._options = options
        self._chance = chance
        self._buried = buried
        self._lanes = Lanes(options.batch_size, options.batch_wait)
        self._in_hand = 0
        self._out: dict[Ticket, None] = {}  # with a handler, or being buried
        self._refused: set[str] = set()
        self._forsaken: set[Ticket] = set()
        self._releases: list[tuple[set[Ticket], OnReleased]] = []
        self._stopping = False
        self.counters: Counter[str] = Counter(
            dict.fromkeys(("handled", "failed", "retried", "hung", "dead", "requeued"), 0)
        )

    @property
    def in_hand(self) -> int:
        """Messages that are submitted and not settled."""
        return self._in_hand

    def submit(self, lane: Hashable, delivery: Delivery, on_done: OnDone, now: float) -> None:
        self._in_hand += 1
        self._lanes.add(lane, delivery, on_done, now)

    def set_lease(self, shard: str, until: float | None) -> None:
        self._lanes.set_lease(shard, until)

    def next_job(self, now: float) -> Job | None:
        job = self._lanes.next_job(now)
        if job is not None:
            job.tries += 1
            self._out.update(dict.fromkeys(job.tickets))
            for ticket in job.tickets:
                ticket.tries += 1
                if ticket.tries > 1:
                    ticket.delivery = replace(ticket.delivery, attempt=ticket.tries)
        return job

    def next_time(self, now: float) -> float | None:
        return self._lanes.next_time(now)

    def finish(self, job: Job, end: BaseException | Hung | None, now: float) -> list[Settled]:
        """Settle what can be settled of a job, and put the rest where it belongs."""
        done = len(job.tickets)
        if end is not None:
            self.counters["hung" if isinstance(end, Hung) else "failed"] += 1
            done = min(end.done, done) if isinstance(end, BatchFailed) else 0
        settled = [self._settle(ticket, Done(), now) for ticket in job.tickets[:done]]
        self.counters["handled"] += done
        rest = Job(job.tickets[done:], 0 if done else job.tries)
        if not rest.tickets or end is None:
            return settled
        leaving = {ticket for ticket in rest.tickets if self._is_leaving(ticket)}
        settled += [self._settle(t, GivenBack(), now) for t in rest.tickets if t in leaving]
        rest.tickets = [ticket for ticket in rest.tickets if ticket not in leaving]
        return settled + (self._after_failure(rest, end, now) if rest.tickets else [])

    def release(self, shard: str, on_released: OnReleased) -> tuple[list[Settled], bool]:
        """Begin no more messages of a shard; what is not running is given back.

        Also tells whether nothing of it is in hand any more; if something is, `on_released` is
        among what `take_released` returns when that is settled.
        """
        self._refused.add(shard)
        settled = [self._give_back(ticket) for ticket in self._lanes.drop(shard)]
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

    def bury(self, ticket: Ticket, now: float) -> None:
        """The dead letter is stored; its key goes on."""
        self._settle(ticket, Done(), now)

    def _is_leaving(self, ticket: Ticket) -> bool:
        return self._stopping or ticket in self._forsaken

    def _after_failure(self, job: Job, end: BaseException | Hung, now: float) -> list[Settled]:
        verdict = after_failure(
            self._options.retry,
            tries=max(job.tries, 1),
            size=len(job.tickets),
            hung=isinstance(end, Hung),
            buries=self._options.dead_letter is not None,
            chance=self._chance(),
        )
        if not isinstance(verdict, Bury):
            for ticket in job.tickets:
                del self._out[ticket]
        if isinstance(verdict, Again):
            self.counters["retried"] += len(job.tickets)
            self._lanes.again(job, now + verdict.delay)
            return []
        if isinstance(verdict, OneByOne):
            self.counters["retried"] += len(job.tickets)
            self._lanes.alone(job.tickets, now)
            return []
        ticket = job.tickets[0]
        self.counters["dead"] += 1
        if isinstance(end, Hung):
            why, error = Why.TIMEOUT, f"the handler did not return within {end.seconds:g} s"
        else:
            why, error = Why.FAILED, first_line(end)
        return [(ticket, Dead(why, error, ticket.tries, lambda: self._buried(ticket)))]

    def _settle(self, ticket: Ticket, outcome: Outcome, now: float) -> Settled:
        self._in_hand -= 1
        del self._out[ticket]
        self._forsaken.discard(ticket)
        for running, _ in self._releases:
            running.discard(ticket)
        self._lanes.free(ticket, now)
        if isinstance(outcome, GivenBack):
            self.counters["requeued"] += 1
        return ticket, outcome

    def _give_back(self, ticket: Ticket) -> Settled:
        """For what the lanes have dropped already."""
        self._in_hand -= 1
        self.counters["requeued"] += 1
        return ticket, GivenBack()
