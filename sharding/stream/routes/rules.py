"""When to ask the cluster where things live: the rules of the route cache, without clock or I/O.

A name is remembered from its first use until nobody has used it for `forget_after`. Meanwhile it is
asked for

* at once, when nothing is known of it yet: somebody waits;
* by the poll, every `poll_interval`, together with everything else remembered. A name that does not
  exist is polled too, and between polls "does not exist" is answered from memory;
* in a *round*, after news: a push from the broker, a suspicion (a node answered "not leader", a
  connection was lost), a lost locator, an answer that names no leader or no replicas yet. A round
  waits `coalesce` for more news; the gap between rounds doubles while news go on, to a longer one
  for names that were in a round just before. So a node that led a thousand streams costs a few
  queries, a suspicion that never ends one in two seconds, and neither holds up other names.

One query is under way at a time, and whoever wants one of its names waits for its answer. News that
come meanwhile may be younger than the answer, so they ask again. After a failure nothing is asked
for a while that doubles. A push or a suspicion makes the known answer *doubted*: it is not handed
out until it was asked for again. Polls and lost locators leave it in use.

A stream with a leader is armed for a push: one at a time, at a bounded rate, each stream at most
once in `rearm_interval`. A push uses the arming up. Above `pressure_limit` a push is dropped, and
the stream is armed again after the next poll.

Not safe for threads: `cache` has the lock. Every time is passed in.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from sharding.backoff import Backoff
from sharding.stream.options import RouteOptions
from sharding.stream.routes.values import (
    Change,
    Finding,
    Kind,
    Missing,
    Partitions,
    StreamRoute,
    Target,
    leader_of,
)

BATCH_BYTES = 48 * 1024
"""The most bytes of names in one query: far below any frame size that brokers agree on."""


class Rounds:
    """When the next round of questions about news goes out.

    The first waits for more news. The gap between rounds doubles while news go on, up to
    `gap_max`, and starts again after a calm.
    """

    def __init__(self, wait: float, gap: float, gap_max: float) -> None:
        self.calm = 2 * gap_max
        self._wait = wait
        self._first_gap = self._gap = gap
        self._gap_max = gap_max
        self._next_at = inf
        self._last = -inf

    def next_at(self, now: float) -> float:
        """When news that come now are asked about."""
        if self._next_at == inf:
            calm = now - self._last >= self.calm
            self._gap = self._first_gap if calm else min(2 * self._gap, self._gap_max)
            self._next_at = max(now + self._wait, self._last + self._gap)
        return self._next_at

    def begin(self, now: float) -> bool:
        """Whether the round goes out now; news from here on belong to the next one."""
        if now < self._next_at:
            return False
        self._next_at = inf
        self._last = now
        return True


class Pause:
    """Nothing is asked for a while after a failure; the while doubles with each further one."""

    def __init__(self, options: RouteOptions) -> None:
        self._options = options
        self._failures = 0
        self.until = -inf

    def failed(self, now: float) -> None:
        self._failures += 1
        backoff = Backoff(self._options.retry_delay, self._options.retry_delay_max, spread=0)
        self.until = now + backoff.pause(self._failures, chance=1)

    def succeeded(self) -> None:
        self._failures = 0


class ArmQueue:
    """The streams that wait to be armed, each not before its time, all together at a rate."""

    def __init__(self, options: RouteOptions) -> None:
        self._options = options
        self._waiting: list[tuple[float, str]] = []
        self._free_at = -inf

    def add(self, stream: str, not_before: float) -> None:
        heapq.heappush(self._waiting, (not_before, stream))

    def take(self, now: float) -> str | None:
        """The next stream whose time has come; the caller says with `used` if it arms it."""
        if now < self.next_at():
            return None
        return heapq.heappop(self._waiting)[1]

    def used(self, now: float) -> None:
        self._free_at = now + 1 / self._options.arms_per_second

    def pause(self, now: float) -> None:
        self._free_at = now + self._options.rearm_interval

    def next_at(self) -> float:
        return max(self._waiting[0][0], self._free_at) if self._waiting else inf


def batch(due: Sequence[Target], options: RouteOptions) -> tuple[Target, ...]:
    """What of all that is due goes into one query: streams together, super streams one by one."""
    streams = [target for target in due if target.kind is Kind.STREAM][: options.batch_names]
    if not streams:
        return tuple(due[:1])
    size = 0
    for count, target in enumerate(streams):
        size += len(target.name.encode()) + 2
        if size > BATCH_BYTES and count:
            return tuple(streams[:count])
    return tuple(streams)


@dataclass(slots=True)
class _Entry:
    used_at: float
    round_at: float = -inf
    """The last round that asked for it."""
    rounds: int = 0
    """How often it was asked for again because the answer lacks a leader or replicas."""
    finding: Finding | None = None
    asked_at: float = -inf
    """When the query that found it went out."""
    doubted: bool = False
    settling: bool = False
    armed: bool = False
    to_be_armed: bool = False
    arm_after: float = -inf


class RouteState:
    """What is remembered, and what is to be asked next. `counters` counts every decision."""

    def __init__(self, options: RouteOptions, rng: random.Random) -> None:
        self.counters: Counter[str] = Counter()
        self._options = options
        self._rng = rng
        self._entries: OrderedDict[Target, _Entry] = OrderedDict()  # the least used first
        self._super_streams: set[Target] = set()
        self._leaderless: dict[Target, None] = {}  # a set that keeps its order
        self._due: dict[Target, float] = {}
        self._in_flight: frozenset[Target] = frozenset()
        self._asked_at = -inf
        self._poll_at = inf
        gap = options.round_gap
        self._rounds = Rounds(options.coalesce, gap, options.round_gap_max)
        # What was asked a moment ago is not news yet: the first of these takes its time as well.
        self._repeats = Rounds(2 * gap, 2 * gap, options.repeat_gap_max)
        self._pause = Pause(options)
        self._arms = ArmQueue(options)

    def __len__(self) -> int:
        return len(self._entries)

    # What callers do

    def use(self, target: Target, now: float) -> None:
        """Somebody wants this name: it is in use from now on."""
        entry = self._entries.get(target)
        if entry is None:
            self._remember(target, now)
            self.counters["misses"] += 1
        elif entry.finding is None or entry.doubted:
            self.counters["waits"] += 1
        elif isinstance(entry.finding, Missing):
            self.counters["hits_missing"] += 1
        else:
            self.counters["hits"] += 1

    def known(self, target: Target, now: float, since: float = inf) -> Finding | None:
        """What may be handed out now; None if an answer has to come first.

        Who has waited `since` then takes any answer that was asked for later, also one that is
        doubted again: else the suspicions of some would keep others waiting for ever.
        """
        entry = self._entries.get(target) or self._remember(target, now)
        entry.used_at = now
        self._entries.move_to_end(target)
        return None if entry.doubted and entry.asked_at < since else entry.finding

    def settling(self, target: Target) -> bool:
        """Whether the answer lacks a leader or replicas, and is soon asked for again."""
        entry = self._entries.get(target)
        return entry is not None and entry.settling

    def insist(self, target: Target, now: float) -> None:
        """Somebody waits for a better answer than the known one: have a round ask for it.

        The same query asks for the other streams without a leader, as many as it holds: after an
        election that took long one would else be asked for after another.
        """
        if target not in self._entries or target in self._in_flight or target in self._due:
            return
        self._ask_in_round(target, now)
        at = self._due[target]
        others = (other for other in self._leaderless if other != target)
        for other in batch([target, *others], self._options)[1:]:
            if other not in self._in_flight:
                self._entries[other].round_at = at
                self._ask(other, at)

    def suspect(self, name: str, now: float) -> None:
        """What was answered for this name turned out wrong."""
        self.counters["suspicions"] += 1
        for kind in Kind:
            self._doubt(Target(kind, name), now)
        self._recheck_super_streams_of(name, now)

    # What the broker tells

    def pushed(self, stream: str, now: float, pressure: float) -> None:
        """The broker says that a stream changed; not how."""
        target = Target(Kind.STREAM, stream)
        entry = self._entries.get(target)
        self.counters["pushes"] += 1
        if entry is None:
            self.counters["pushes_unused"] += 1
            return
        entry.armed = False
        if pressure > self._options.pressure_limit:
            self.counters["pushes_ignored"] += 1
        else:
            self._doubt(target, now)

    def disconnected(self, now: float) -> None:
        """The connection that was armed is gone: what changes from here on is not told."""
        self.counters["disconnects"] += 1
        for target, entry in self._entries.items():
            if entry.armed:
                entry.armed = False
                self._ask_in_round(target, now)

    # Queries

    def next_query(self, now: float) -> tuple[Target, ...]:
        """What to ask for now, in one query: streams, or one super stream; empty if nothing."""
        if now >= self._poll_at:
            self._poll(now)
        if self._in_flight or now < self._pause.until:
            return ()
        query = batch([target for target, at in self._due.items() if at <= now], self._options)
        if not query:
            return ()
        for target in query:
            del self._due[target]
        self._in_flight = frozenset(query)
        self._asked_at = now
        self.counters["rounds"] += self._rounds.begin(now)
        self.counters["repeats"] += self._repeats.begin(now)
        kind = "queries" if query[0].kind is Kind.STREAM else "partition_queries"
        self.counters[kind] += 1
        self.counters["names_asked"] += len(query)
        return query

    def answered(self, findings: Mapping[str, Finding], now: float) -> list[Change]:
        """The query under way was answered, by name; returns what is otherwise than before."""
        asked, self._in_flight = self._in_flight, frozenset()
        changes: list[Change] = []
        self._pause.succeeded()
        for target in asked:
            entry = self._entries.get(target)
            if entry is None:
                continue  # dropped meanwhile
            if (finding := findings.get(target.name)) is None:
                self._ask_in_round(target, now)
                continue
            if entry.finding is not None and entry.finding != finding:
                changes.append((entry.finding, finding))
            self._learn(target, entry, finding, now)
        self.counters["changes"] += len(changes)
        return changes

    def failed(self, now: float) -> None:
        """The query under way failed: its names stay due."""
        asked, self._in_flight = self._in_flight, frozenset()
        self.counters["failures"] += 1
        self._pause.failed(now)
        for target in asked:
            if target in self._entries:
                self._ask(target, now)

    # Arming

    def next_arm(self, now: float) -> str | None:
        """A stream to arm now, if the rate allows one; taken as armed until told otherwise."""
        while (stream := self._arms.take(now)) is not None:
            entry = self._entries.get(Target(Kind.STREAM, stream))
            if entry is None or not entry.to_be_armed:
                continue
            entry.to_be_armed = False
            if entry.armed or entry.doubted or leader_of(entry.finding) is None:
                continue
            entry.armed = True
            entry.arm_after = now + self._options.rearm_interval
            self._arms.used(now)
            self.counters["arms"] += 1
            return stream
        return None

    def arm_succeeded(self, stream: str, now: float) -> None:
        """A change since the last answer and before the arming would not be told: look again."""
        target = Target(Kind.STREAM, stream)
        if target in self._entries:
            self._ask_in_round(target, now)

    def arm_refused(self, stream: str, now: float) -> None:
        """The stream had changed before it was armed: as good as a push."""
        self.counters["arms_refused"] += 1
        self._disarm(stream)
        self._doubt(Target(Kind.STREAM, stream), now)

    def arm_failed(self, stream: str, now: float) -> None:
        """No answer, as during an election: this stream and all others are armed after a pause."""
        self.counters["arms_failed"] += 1
        self._arms.pause(now)
        target = Target(Kind.STREAM, stream)
        if (entry := self._entries.get(target)) is not None:
            entry.armed = False
            self._queue_arming(target, entry, now)

    # Time

    def forget(self, now: float) -> None:
        """Drop what nobody has used for long enough."""
        while self._entries:
            target, entry = next(iter(self._entries.items()))
            if now - entry.used_at < self._options.forget_after:
                return
            self._drop(target)
            self.counters["forgotten"] += 1

    def wake_at(self) -> float:
        """When there may be something to do next; infinite if nothing is remembered."""
        if not self._entries:
            return inf
        oldest = next(iter(self._entries.values()))
        due = inf if self._in_flight else min(self._due.values(), default=inf)
        return min(
            self._poll_at,
            max(due, self._pause.until),
            self._arms.next_at(),
            oldest.used_at + self._options.forget_after,
        )

    # Within

    def _remember(self, target: Target, now: float) -> _Entry:
        if len(self._entries) >= self._options.max_names:
            self._drop(next(iter(self._entries)))
            self.counters["evicted"] += 1
        if not self._entries:
            self._schedule_poll(now)
        entry = _Entry(now)
        self._entries[target] = entry
        if target.kind is Kind.SUPER_STREAM:
            self._super_streams.add(target)
        self._ask(target, now)
        return entry

    def _drop(self, target: Target) -> None:
        del self._entries[target]
        self._due.pop(target, None)
        self._super_streams.discard(target)
        self._leaderless.pop(target, None)

    def _schedule_poll(self, now: float) -> None:
        early = self._rng.random() * self._options.poll_jitter
        self._poll_at = now + self._options.poll_interval * (1 - early)

    def _poll(self, now: float) -> None:
        self._schedule_poll(now)
        self.counters["polls"] += 1
        for target in self._entries:
            if target not in self._in_flight:
                self._ask(target, now)

    def _ask(self, target: Target, at: float) -> None:
        self._due[target] = min(at, self._due.get(target, inf))

    def _ask_in_round(self, target: Target, now: float) -> None:
        if target in self._due:
            return
        entry = self._entries[target]
        again = now - entry.round_at < self._repeats.calm
        entry.round_at = (self._repeats if again else self._rounds).next_at(now)
        self._ask(target, entry.round_at)

    def _doubt(self, target: Target, now: float) -> None:
        entry = self._entries.get(target)
        if entry is None or (entry.finding is None and target not in self._in_flight):
            return  # nothing is known that could be wrong; the next answer is news in itself
        entry.doubted = True
        entry.rounds = 0
        self._ask_in_round(target, now)

    def _learn(self, target: Target, entry: _Entry, finding: Finding, now: float) -> None:
        before, entry.finding = entry.finding, finding
        entry.asked_at = self._asked_at
        changed = before != finding
        was_doubted = entry.doubted
        if target not in self._due:
            entry.doubted = False
        if isinstance(finding, Missing) and not isinstance(before, Missing):
            self._recheck_super_streams_of(target.name, now)
        self._leaderless.pop(target, None)
        if isinstance(finding, StreamRoute) and finding.leader is None:
            self._leaderless[target] = None  # at the end: the others have their turn first
        if leader_of(before) != leader_of(finding):
            entry.armed = False
        if (changed or was_doubted) and isinstance(finding, StreamRoute):
            # Have a second look: a leader that just ended is named for some more moments, and the
            # replicas of a new one are listed one by one.
            self._ask_in_round(target, now)
        self._settle(target, entry, now)
        self._queue_arming(target, entry, now)

    def _settle(self, target: Target, entry: _Entry, now: float) -> None:
        finding = entry.finding
        if not isinstance(finding, StreamRoute) or (finding.leader and finding.replicas):
            entry.settling = False
            entry.rounds = 0
            return
        options = self._options
        entry.settling = entry.rounds < (
            options.leader_rounds if finding.leader is None else options.replica_rounds
        )
        if entry.settling:
            entry.rounds += 1
            self._ask_in_round(target, now)

    def _queue_arming(self, target: Target, entry: _Entry, now: float) -> None:
        waits = entry.armed or entry.to_be_armed or leader_of(entry.finding) is None
        if self._options.pushes and not waits:
            entry.to_be_armed = True
            self._arms.add(target.name, max(now, entry.arm_after))

    def _recheck_super_streams_of(self, stream: str, now: float) -> None:
        """A partition is gone, or may be, and its super stream with it."""
        for target in self._super_streams:
            finding = self._entries[target].finding
            if isinstance(finding, Partitions) and stream in finding.streams:
                self._doubt(target, now)

    def _disarm(self, stream: str) -> None:
        entry = self._entries.get(Target(Kind.STREAM, stream))
        if entry is not None:
            entry.armed = False
