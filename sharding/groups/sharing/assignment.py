"""Who should hold how many shards, and what a worker takes and leaves because of it. Pure.

Every worker decides for itself, from what it has heard of the others. The rules of the shares
(those of one worker's look stand above `Assignment`):

1. With S shards and M workers, S mod M workers hold one shard more than the others, S div M. Those
   that hold most now are the ones, so that the least has to move; equals are told apart by id.
2. Whoever holds more than its share gives up the surplus. Which ones, a hash of their names says:
   names sort by node, and a worker should not end with the shards of one node only.
3. Free shards are dealt to those that hold less than their share, one to each in turn, so that two
   workers with the same view never reach for the same shard.
4. Nobody takes what another is heard to hold. A worker that stops has no share, and its shards are
   dealt as it gives them up. The broker's lock is the truth anyway: views that
   differ cost an attempt or a move, and never two readers of one shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from sharding.backoff import Backoff
from sharding.groups.options import WAIT_SHARE, GroupOptions
from sharding.maps.slots import murmur3


@dataclass(frozen=True, slots=True)
class Decision:
    give_up: frozenset[str] = frozenset()
    take: tuple[str, ...] = ()


def decide(
    me: str,
    held: Mapping[str, frozenset[str]],
    shards: Iterable[str],
    kept: Set[str] = frozenset(),
    departing: Set[str] = frozenset(),
) -> Decision:
    """What `me` should do. `held` says of each worker, `me` included, which shards it holds.

    `shards` are those that exist as far as `me` knows; one that somebody holds exists as well. Of
    its own, `me` gives up none that are `kept`. What is `departing` will be free soon: those that
    stay share it out too, and wait for it.

    >>> decide("b", {"a": frozenset({"s1", "s2", "s3"}), "b": frozenset()}, ["s1", "s2", "s3"])
    Decision(give_up=frozenset(), take=())
    >>> len(decide("a", {"a": frozenset({"s1", "s2", "s3"}), "b": frozenset()}, []).give_up)
    1
    >>> decide("b", {"a": frozenset({"s1", "s2"}), "b": frozenset()}, ["s1", "s2", "s3"]).take
    ('s3',)
    >>> decide("b", {"b": frozenset({"s1"})}, ["s1", "s2", "s3"], departing={"s3"}).take
    ('s2',)
    """
    taken = frozenset(departing).union(*held.values())
    every = taken | frozenset(shards)
    shares = fair_shares({worker: len(mine) for worker, mine in held.items()}, len(every))
    surplus = len(held[me]) - shares[me]
    if surplus > 0:
        return Decision(give_up=frozenset(in_hashed_order(held[me] - kept)[:surplus]))
    return Decision(take=tuple(_dealt(me, held, shares, in_hashed_order(every - taken))))


def fair_shares(loads: Mapping[str, int], shards: int) -> dict[str, int]:
    """How many shards each worker should hold.

    >>> fair_shares({"a": 12, "b": 0, "c": 0, "d": 0, "e": 0}, 12)
    {'a': 3, 'b': 3, 'c': 2, 'd': 2, 'e': 2}
    """
    least, more = divmod(shards, len(loads))
    ranked = sorted(loads, key=lambda worker: (-loads[worker], worker))
    return {worker: least + (rank < more) for rank, worker in enumerate(ranked)}


def still_to_leave(give_up: Set[str], leaving: Set[str]) -> list[str]:
    """Which shards to begin to give up, where some are being given up already.

    Those may be others than the ones decided now, since leaving takes time and shares change
    meanwhile; it is the number that counts.

    >>> still_to_leave({"a", "b"}, {"c"})
    ['a']
    >>> still_to_leave({"a", "b"}, {"c", "d", "e"})
    []
    """
    missing = max(0, len(give_up) - len(leaving))
    return in_hashed_order(give_up - leaving)[:missing]


def in_hashed_order(names: Iterable[str]) -> list[str]:
    """The same order for everybody, and one in which a node's shards do not stand together."""
    return sorted(names, key=lambda name: (murmur3(name), name))


def _dealt(
    me: str, held: Mapping[str, frozenset[str]], shares: Mapping[str, int], free: list[str]
) -> list[str]:
    room = {worker: shares[worker] - len(held[worker]) for worker in sorted(shares)}
    dealt: list[str] = []
    while free and any(left > 0 for left in room.values()):
        for worker in room:
            if room[worker] > 0 and free:
                shard = free.pop(0)
                room[worker] -= 1
                if worker == me:
                    dealt.append(shard)
    return dealt


REFUSALS_WORTH_A_WARNING = 30


class Attempts:
    """Attempts at one shard keep an interval between them. One that did not answer counts as away
    until the next attempt is due; one that nobody took for long may be taken by anybody.
    """

    def __init__(self, interval: float, patience: float) -> None:
        self._interval = interval
        self._patience = patience
        self._not_before: dict[str, float] = {}
        self._away: set[str] = set()
        self._refusals: Counter[str] = Counter()
        self._free_since: dict[str, float] = {}

    def begin(self, shard: str, now: float) -> None:
        self._not_before[shard] = now + self._interval
        self._away.discard(shard)

    def is_due(self, shard: str, now: float) -> bool:
        return now >= self._not_before.get(shard, now)

    def is_away(self, shard: str, now: float) -> bool:
        return shard in self._away and not self.is_due(shard, now)

    def taken(self, shard: str) -> None:
        self._not_before.pop(shard, None)
        self._refusals.pop(shard, None)

    def not_answered(self, shard: str) -> None:
        self._away.add(shard)

    def refused(self, shard: str) -> bool:
        """Somebody else has it; whether that has gone on for so long that it should be said."""
        self._refusals[shard] += 1
        return self._refusals[shard] == REFUSALS_WORTH_A_WARNING

    def overdue(self, free: Iterable[str], now: float) -> list[str]:
        """Of the shards that nobody holds, those that whoever should take them does not take."""
        self._free_since = {shard: self._free_since.get(shard, now) for shard in free}
        return [shard for shard, since in self._free_since.items() if now - since > self._patience]


class Unwanted:
    """Shards that nobody else took for long, so that this worker did: others may not reach them.

    They are kept. Given up as surplus, such a shard would be unread again until it is overdue, and
    then be surplus again. They are offered once in a while, each time later: the others may be able
    to take them by now.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._pauses = Backoff(first, longest, spread=0)
        self._offers: Counter[str] = Counter()
        self._until: dict[str, float] = {}

    def take(self, shard: str, now: float) -> None:
        self._offers[shard] += 1
        self._until[shard] = now + self._pauses.pause(self._offers[shard], chance=1)

    def kept(self, held_by_others: Iterable[str], now: float) -> frozenset[str]:
        for shard in self._until.keys() & set(held_by_others):  # so somebody takes it
            del self._until[shard], self._offers[shard]
        return frozenset(shard for shard, until in self._until.items() if now < until)


# One worker's look: what it takes and leaves now. Workers of queues and of streams both drive it,
# by saying what there is and what they have, and by doing what it says. The rules:
#
# 1. Shares are counted over the shards that can be read now. One whose node is away, or that did
#    not answer the last attempt, is left out until the next attempt is due: it can be in nobody's
#    share, and the others' loads have to be even without it.
# 2. What exists no more is left.
# 3. Of what is held beyond the share, as many are left as are not being left already, by rule 2 or
#    since an earlier look.
# 4. What is dealt to this worker is tried, with `take_interval` between two attempts. So is what
#    has been free for three times `member_timeout`, by whoever sees it: the one that should take
#    it can't, or sees others than we do. That one is kept, though it be surplus (`Unwanted`).
# 5. Nothing is tried that is held, asked for or waited for, nor before it has been left entirely.
#
# The broker has two kinds of lock, and `Hands` says with which this worker has to do:
#
# * An exclusive consumer (queues) is a question with an answer: taken, refused, or none in time.
#   A worker is `asking` until then. It can't take the question back; if the shard should be
#   another's by the time it is taken, it is surplus at the next look. A refusal moves no shares:
#   whoever holds the shard will announce it, or give it up, or is no worker at all.
# * A single active consumer (streams) has a line, and nobody in it is refused. A worker is
#   `in_line` from its attempt until its turn comes: that is no load, and not announced. It steps
#   out as soon as the shard is not dealt to it any more; else the broker would give it the shard
#   some day against all shares. It looks for the shard's node by itself as long as it stands there,
#   so that none is ever away.


class Cause(StrEnum):
    """Why a shard is left."""

    GONE = "it exists no more"
    SURPLUS = "another worker has room for it"
    ANOTHERS = "it is another's"


@dataclass(frozen=True, slots=True)
class Hands:
    """What a worker has to do with which shards, at one moment."""

    held: Set[str] = frozenset()
    """The lock is this worker's, also while it is leaving."""
    leaving: Set[str] = frozenset()
    """Being left: held still, or not any more, or a line that it steps out of."""
    asking: Set[str] = frozenset()
    in_line: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Moves:
    """What a worker should begin now. What it leaves it holds, or stands in line for."""

    take: tuple[str, ...] = ()
    leave: Mapping[str, Cause] = field(default_factory=dict)


class Assignment:
    """What has to be kept from look to look. `attempts` is to be told what became of them, where
    there is an answer.
    """

    def __init__(self, me: str, options: GroupOptions) -> None:
        self._me = me
        timeout = options.member_timeout
        self.attempts = Attempts(options.take_interval, patience=3 * timeout)
        self._unwanted = Unwanted(first=100 * timeout, longest=1200 * timeout)

    def look(
        self,
        now: float,
        shards: Set[str],
        mine: Hands,
        others: Mapping[str, frozenset[str]],
        away: Set[str] = frozenset(),
        departing: Set[str] = frozenset(),
    ) -> Moves:
        """What follows from the `shards` that exist, of which some are `away`, from what the others
        hold, and what those hold who are `departing`; whatever is to be taken counts as tried from
        here on.
        """
        held, attempts = frozenset(mine.held), self.attempts
        there = frozenset(each for each in shards - away if not attempts.is_away(each, now))
        taken = frozenset(departing).union(*others.values())
        kept = self._unwanted.kept(taken, now)
        decision = decide(self._me, {**others, self._me: held}, there, kept, departing)

        leave = dict.fromkeys((held | mine.in_line) - shards - mine.leaving, Cause.GONE)
        leaving = held & (mine.leaving | leave.keys())
        leave |= dict.fromkeys(still_to_leave(decision.give_up, leaving), Cause.SURPLUS)

        overdue = attempts.overdue(there - held - taken, now)
        wanted = dict.fromkeys([*decision.take, *overdue])
        lines = mine.in_line - wanted.keys() - mine.leaving - leave.keys()
        leave |= dict.fromkeys(lines, Cause.ANOTHERS)

        busy = held | mine.leaving | mine.asking | mine.in_line
        take = tuple(each for each in wanted if each not in busy and attempts.is_due(each, now))
        for shard in take:
            attempts.begin(shard, now)
            if shard not in decision.take and shard not in kept:
                self._unwanted.take(shard, now)
        return Moves(take, leave)


# When a shard of a queue is taken again, though it stays with its worker. The rules:
#
# 1. The broker gives a consumer `consumer_timeout` for each message, counted from its delivery,
#    whether it is begun or waits here for its turn, for its next attempt or for its dead letter to
#    be stored. Then it closes the channel, in the middle of whatever runs.
# 2. A shard is taken again when something of it has waited for two fifths of that time. It is
#    looked at every tenth, so none waits for longer than half.
# 3. What a handler is at work on does not count: it can't be given back. So handlers have the other
#    half, and only one that takes longer than that may lose its shard.
# 4. So nothing is begun, or tried again, that is in hand for two fifths already (the scheduler's
#    rule 5). One that fails again and again would be at work whenever somebody looks.

LOOK_SHARE = 0.1


class Renewals:
    """Which shards to take again, of a worker that looks as often as it likes."""

    def __init__(self, consumer_timeout: float | None) -> None:
        self._consumer_timeout = consumer_timeout
        self._next_look = float("-inf")

    def is_time_to_look(self, now: float) -> bool:
        """To ask for all that waits costs something, so it is not done at each look."""
        if self._consumer_timeout is None or now < self._next_look:
            return False
        self._next_look = now + self._consumer_timeout * LOOK_SHARE
        return True

    def due(self, now: float, waiting_since: Mapping[str, float]) -> list[str]:
        if self._consumer_timeout is None:
            return []
        longest = self._consumer_timeout * WAIT_SHARE
        return [shard for shard, since in waiting_since.items() if now - since >= longest]
