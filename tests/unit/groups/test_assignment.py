"""What a worker takes and leaves, for both kinds of lock: look by look, and in whole groups.

Attempts at a shard are spaced; one that is away, refused or left over is treated as such.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from sharding.groups.options import GroupOptions
from sharding.groups.sharing.assignment import (
    REFUSALS_WORTH_A_WARNING,
    Assignment,
    Attempts,
    Cause,
    Hands,
    Moves,
    Renewals,
    in_hashed_order,
)
from sharding.groups.sharing.roster import Announcement, Kind, Roster

OPTIONS = GroupOptions()  # attempts a second apart; what is free for nine is anybody's
PATIENCE = 3 * OPTIONS.member_timeout
SHARDS = frozenset(f"s{n}" for n in range(12))
NOBODY: dict[str, frozenset[str]] = {}


def worker(name: str = "me") -> Assignment:
    return Assignment(name, OPTIONS)


def in_order(count: int) -> list[str]:
    return in_hashed_order(SHARDS)[:count]


# Attempts.


def test_attempts_keep_their_distance_until_one_succeeds() -> None:
    attempts = Attempts(interval=2, patience=9)
    assert attempts.is_due("s", 10)
    attempts.begin("s", 10)
    assert not attempts.is_due("s", 11.9)
    assert attempts.is_due("s", 12)
    attempts.begin("s", 12)
    attempts.taken("s")
    assert attempts.is_due("s", 12)


def test_what_does_not_answer_is_away_until_it_is_tried_again() -> None:
    attempts = Attempts(interval=2, patience=9)
    attempts.begin("s", 10)
    assert not attempts.is_away("s", 11)
    attempts.not_answered("s")
    assert attempts.is_away("s", 11)
    assert not attempts.is_away("s", 12)  # counted in, and dealt to somebody who tries
    attempts.begin("s", 12)
    assert not attempts.is_away("s", 12)


def test_a_shard_refused_for_long_is_said_once() -> None:
    attempts = Attempts(interval=2, patience=9)
    said = [attempts.refused("s") for _ in range(3 * REFUSALS_WORTH_A_WARNING)]
    assert said.count(True) == 1
    attempts.taken("s")
    assert [attempts.refused("s") for _ in range(REFUSALS_WORTH_A_WARNING)].count(True) == 1


def test_a_shard_that_nobody_takes_is_anybodys() -> None:
    attempts = Attempts(interval=2, patience=9)
    assert attempts.overdue({"s", "t"}, 10) == []
    assert attempts.overdue({"s"}, 15) == []
    assert attempts.overdue({"s", "t"}, 19.5) == ["s"]  # t was held in between


# One look, of any worker.


def test_a_worker_alone_takes_everything_and_asks_for_nothing_twice() -> None:
    me = worker()
    moves = me.look(0, SHARDS, Hands(), NOBODY)
    assert (sorted(moves.take), moves.leave) == (sorted(SHARDS), {})
    assert me.look(0.5, SHARDS, Hands(), NOBODY) == Moves()  # the interval is not over
    assert me.look(1, SHARDS, Hands(held=SHARDS), NOBODY) == Moves()


def test_what_a_newcomer_has_room_for_is_left_once() -> None:
    me = worker()
    others = {"new": frozenset[str]()}
    first = me.look(0, SHARDS, Hands(held=SHARDS), others)
    assert first == Moves(leave=dict.fromkeys(in_order(6), Cause.SURPLUS))
    still = Hands(held=SHARDS, leaving=first.leave.keys())
    assert me.look(1, SHARDS, still, others) == Moves()


def test_what_is_being_left_already_counts_whichever_it_is() -> None:
    me = worker()
    last = in_hashed_order(SHARDS)[-4:]
    moves = me.look(0, SHARDS, Hands(held=SHARDS, leaving=frozenset(last)), {"new": frozenset()})
    assert moves.leave == dict.fromkeys(in_order(2), Cause.SURPLUS)


def test_what_was_left_and_is_not_held_any_more_counts_no_longer() -> None:
    me = worker()
    left, held = in_order(1)[0], frozenset(in_hashed_order(SHARDS)[1:])
    moves = me.look(0, SHARDS, Hands(held, leaving={left}), {"new": frozenset()})
    assert moves.leave == dict.fromkeys(in_hashed_order(held)[:5], Cause.SURPLUS)


def test_a_shard_that_is_gone_is_left_in_place_of_another() -> None:
    me = worker()
    gone = in_hashed_order(SHARDS)[-1]
    others = {"other": frozenset({"t1", "t2"})}
    moves = me.look(0, frozenset(in_order(3)) | {"t1", "t2"}, Hands({*in_order(3), gone}), others)
    assert moves == Moves(leave={gone: Cause.GONE})
    again = Hands({*in_order(3), gone}, leaving={gone})
    assert me.look(1, frozenset(in_order(3)) | {"t1", "t2"}, again, others) == Moves()


def test_nothing_is_taken_before_it_has_been_left_entirely() -> None:
    me = worker()
    assert me.look(0, frozenset({"s"}), Hands(leaving={"s"}), NOBODY) == Moves()
    assert me.look(0, frozenset({"s"}), Hands(), NOBODY) == Moves(take=("s",))


def test_what_nobody_takes_is_taken_by_anybody_after_a_while() -> None:
    """Here both shards should be taken by the other one: it holds less."""
    me = worker("b")
    mine, others = Hands(held={"s1", "s2"}), {"a": frozenset[str]()}
    shards = frozenset({"s1", "s2", "s3", "s4"})
    assert me.look(0, shards, mine, others) == Moves()
    assert me.look(PATIENCE, shards, mine, others) == Moves()
    assert sorted(me.look(PATIENCE + 0.1, shards, mine, others).take) == ["s3", "s4"]
    assert me.look(PATIENCE + 0.5, shards, mine, others) == Moves()
    assert sorted(me.look(PATIENCE + 1.1, shards, mine, others).take) == ["s3", "s4"]


# Of a worker of queues: an attempt has an answer.


def test_a_question_without_an_answer_yet_is_not_asked_again_nor_taken_back() -> None:
    me = worker()
    shards = frozenset({"s"})
    assert me.look(0, shards, Hands(), NOBODY).take == ("s",)
    assert me.look(5, shards, Hands(asking={"s"}), NOBODY) == Moves()
    theirs = {"other": shards}
    assert me.look(6, shards, Hands(asking={"s"}), theirs) == Moves()


def test_what_was_taken_though_it_is_anothers_by_now_is_given_up() -> None:
    me = worker("b")
    others = {"a": frozenset({"s1"})}
    mine = Hands(held={"s2", "s3", "s4"}, asking={"s4"})  # the answer has come just now
    assert len(me.look(0, frozenset({"s1", "s2", "s3", "s4"}), mine, others).leave) == 1


def test_a_refused_shard_is_tried_again_and_keeps_its_place_in_the_shares() -> None:
    me = worker()
    shards = frozenset({"s1", "s2"})
    others = {"other": frozenset({"s2"})}
    assert me.look(0, shards, Hands(), others).take == ("s1",)
    me.attempts.refused("s1")
    assert me.look(0.9, shards, Hands(), others) == Moves()
    assert me.look(1, shards, Hands(), others).take == ("s1",)


def test_what_is_away_is_in_nobodys_share() -> None:
    me = worker()
    held, others = frozenset(in_order(4)), {"other": frozenset[str]()}
    away = SHARDS - held
    assert len(me.look(0, SHARDS, Hands(held), others, away).leave) == 2
    assert me.look(0, SHARDS, Hands(held), others).leave == {}


def test_what_did_not_answer_is_in_nobodys_share_until_it_is_tried_again() -> None:
    me = worker()
    assert me.look(0, frozenset({"s"}), Hands(), NOBODY).take == ("s",)
    me.attempts.not_answered("s")
    shards, mine = frozenset({"s", "t1", "t2"}), Hands(held={"t1", "t2"})
    others = {"other": frozenset[str]()}
    assert len(me.look(0.5, shards, mine, others).leave) == 1  # two shards for two workers
    assert me.look(1, shards, mine, others).leave == {}  # three: one of us has two


# Of a worker of streams: an attempt is a place in a line.


def test_a_place_in_line_is_kept_while_the_shard_is_dealt_to_it() -> None:
    me = worker()
    assert me.look(0, frozenset({"s"}), Hands(), NOBODY).take == ("s",)
    for now in (0.25, 1, PATIENCE, 5 * PATIENCE):
        assert me.look(now, frozenset({"s"}), Hands(in_line={"s"}), NOBODY) == Moves()


def test_a_line_is_left_when_another_has_the_shard() -> None:
    me = worker()
    others = {"other": frozenset({"s"})}
    moves = me.look(0, frozenset({"s"}), Hands(in_line={"s"}), others)
    assert moves == Moves(leave={"s": Cause.ANOTHERS})
    out = Hands(leaving={"s"})
    assert me.look(1, frozenset({"s"}), out, others) == Moves()


def test_a_place_in_line_is_no_load() -> None:
    """Else it would give up what it holds, for shards that others have yet to leave."""
    me = worker("a")
    others = {"b": frozenset({"s1", "s2"})}
    shards = frozenset({"s1", "s2", "s3", "s4"})
    mine = Hands(held={"s3"}, in_line={"s4"})
    assert me.look(0, shards, mine, others) == Moves()


def test_the_line_of_a_shard_that_is_gone_is_left_as_such() -> None:
    me = worker()
    moves = me.look(0, frozenset(), Hands(in_line={"s"}), NOBODY)
    assert moves == Moves(leave={"s": Cause.GONE})


# Whole groups: the locks are a broker's in memory, announcements are heard with a delay.


class Group:
    """Workers of one kind over twelve shards; `tick` is a quarter of a second.

    With a `lag` an announcement is heard up to so many seconds late, an answer and a goodbye take
    as long again; without one, all of them are there at the next tick.
    """

    def __init__(self, seed: int, *, lines: bool, lag: float = 1.0) -> None:
        self.lines = lines
        self.lag = lag
        self.chance = random.Random(seed)
        self.now = 100.0
        self.shards = set(SHARDS)
        self.away: set[str] = set()
        self.locks: dict[str, object] = {}
        self.waiting: dict[str, list[Worker]] = {}
        self.workers: list[Worker] = []
        self.taken: Counter[str] = Counter()

    def add(self, *names: str) -> None:
        self.workers += [Worker(name, self) for name in names]

    def tick(self) -> None:
        self.now += 0.25
        for each in self.chance.sample(self.workers, len(self.workers)):
            each.step()

    def run(self, seconds: float) -> None:
        for _ in range(int(4 * seconds)):
            self.tick()

    def later(self) -> float:
        return self.now + self.lag * self.chance.random()

    def until(self, reached: Callable[[], bool], seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.tick()
            if reached():
                return
        loads = {each.name: sorted(each.held) for each in self.workers}
        raise AssertionError(f"not after {seconds} s: {loads}")

    def is_fair(self) -> bool:
        loads = [len(each.held) for each in self.workers]
        held = sorted(shard for each in self.workers for shard in each.held)
        return max(loads) - min(loads) <= 1 and held == sorted(self.shards - self.away)

    def settle(self) -> None:
        """After half a minute it is fair, and stays as it is for longer than anybody's patience."""
        self.run(30)
        assert self.is_fair()
        taken = self.taken.total()
        self.run(PATIENCE + 3)
        assert self.taken.total() == taken
        assert self.is_fair()
        assert not any(each.in_line or each.leaving or each.asking for each in self.workers)

    def say(self, announcement: Announcement) -> None:
        for each in self.workers:
            at = self.later()
            # What one worker says stays in order.
            at = each.last[announcement.worker] = max(at, each.last.get(announcement.worker, at))
            each.unheard.append((at, announcement.dumps()))

    def unlock(self, shard: str) -> None:
        del self.locks[shard]
        line = self.waiting.get(shard)
        if line:
            line[0].given(shard)

    def kill(self, name: str) -> None:
        """The broker frees its locks; nobody is told."""
        (dead,) = [each for each in self.workers if each.name == name]
        self.workers.remove(dead)
        for line in self.waiting.values():
            if dead in line:
                line.remove(dead)
        for shard in list(dead.held):
            self.unlock(shard)

    def leave(self, name: str) -> None:
        self.kill(name)
        self.say(Announcement(name, Kind.BYE))


class Worker:
    """Does what its machine says."""

    def __init__(self, name: str, group: Group) -> None:
        self.name = name
        self.group = group
        self.assignment = worker(name)
        self.roster = Roster(name, OPTIONS.settle_time, OPTIONS.member_timeout)
        self.unheard: list[tuple[float, bytes]] = []
        self.last: dict[str, float] = {}
        self.held: set[str] = set()
        self.leaving: dict[str, float] = {}
        self.asking: dict[str, float] = {}
        self.in_line: set[str] = set()
        self.warnings: list[str] = []
        self.attempts: list[tuple[float, str]] = []
        self.does_nothing = False
        self.joined = self.told = group.now
        group.say(Announcement(name, Kind.HELLO))

    def step(self) -> None:
        group, now = self.group, self.group.now
        for at, body in [each for each in self.unheard if each[0] <= now]:
            self.unheard.remove((at, body))
            if self.roster.hear(body, now):
                self.announce()
        if now - self.told >= OPTIONS.announce_interval:
            self.announce()
        self.end_what_is_due()
        if self.does_nothing or now - self.joined < OPTIONS.settle_time:
            return
        hands = Hands(
            self.held, self.leaving.keys(), self.asking.keys(), self.in_line - self.leaving.keys()
        )
        others = self.roster.held_by_others(now)
        moves = self.assignment.look(now, group.shards, hands, others, group.away)
        for shard in moves.leave:
            assert shard in (self.held | self.in_line)
            self.leaving[shard] = group.later()
        for shard in moves.take:
            assert shard not in self.held
            self.attempts.append((now, shard))
            self.take(shard)

    def take(self, shard: str) -> None:
        group = self.group
        if not group.lines:
            self.asking[shard] = group.later()
            return
        self.in_line.add(shard)
        group.waiting.setdefault(shard, []).append(self)
        if shard not in group.locks:
            group.waiting[shard][0].given(shard)

    def given(self, shard: str) -> None:
        """The lock is its own."""
        group = self.group
        assert shard not in group.locks
        if group.lines:
            group.waiting[shard].remove(self)
            self.in_line.discard(shard)
        group.locks[shard] = self
        group.taken[shard] += 1
        self.held.add(shard)
        self.announce()

    def end_what_is_due(self) -> None:
        group, now = self.group, self.group.now
        for shard in [each for each, at in self.asking.items() if at <= now]:
            del self.asking[shard]
            if shard not in group.locks:
                self.given(shard)
                self.assignment.attempts.taken(shard)
            elif self.assignment.attempts.refused(shard):
                self.warnings.append(shard)
        for shard in [each for each, at in self.leaving.items() if at <= now]:
            del self.leaving[shard]
            if shard in self.in_line:
                self.in_line.discard(shard)
                group.waiting[shard].remove(self)
            elif shard in self.held:
                self.held.discard(shard)
                group.unlock(shard)
                self.announce()

    def announce(self) -> None:
        self.told = self.group.now
        self.group.say(Announcement(self.name, Kind.HERE, frozenset(self.held)))


both_kinds = pytest.mark.parametrize("lines", [False, True], ids=["queues", "streams"])
seeds = pytest.mark.parametrize("seed", range(4))


@both_kinds
@seeds
def test_workers_that_start_together_share_evenly(seed: int, lines: bool) -> None:
    group = Group(seed, lines=lines)
    group.add("a", "b", "c", "d", "e")
    group.settle()


@both_kinds
@seeds
def test_newcomers_get_their_share_and_no_more_moves_than_must(seed: int, lines: bool) -> None:
    group = Group(seed, lines=lines, lag=0)
    group.add("a", "b")
    group.settle()
    before = group.taken.total()
    group.add("c")
    group.settle()
    assert group.taken.total() == before + 4  # twelve for three
    group.add("d", "e", "f")
    group.settle()


@both_kinds
@seeds
def test_what_a_worker_leaves_behind_goes_to_the_others_and_nothing_else_moves(
    seed: int, lines: bool
) -> None:
    group = Group(seed, lines=lines, lag=0)
    group.add("a", "b", "c")
    group.settle()
    before = group.taken.total()
    group.leave("b")
    group.settle()
    assert group.taken.total() == before + 4


@both_kinds
@seeds
def test_the_shards_of_a_dead_worker_are_taken_when_it_counts_as_gone(
    seed: int, lines: bool
) -> None:
    group = Group(seed, lines=lines, lag=0)
    group.add("a", "b", "c")
    group.settle()
    died, before = group.now, group.taken.total()
    group.kill("a")
    group.until(lambda: group.taken.total() > before, 10)
    assert group.now - died >= OPTIONS.member_timeout - OPTIONS.announce_interval
    group.settle()
    assert group.taken.total() == before + 4


@both_kinds
@seeds
def test_a_group_settles_whoever_comes_and_goes_meanwhile(seed: int, lines: bool) -> None:
    group = Group(seed, lines=lines)
    group.add("a")
    for number in range(30):
        for _ in range(group.chance.randrange(12)):
            group.tick()
        names = [each.name for each in group.workers]
        if len(names) == 1 or group.chance.random() < 0.5:
            group.add(f"w{number}")
        elif group.chance.random() < 0.5:
            group.kill(group.chance.choice(names))
        else:
            group.leave(group.chance.choice(names))
    group.settle()


@both_kinds
@seeds
def test_shards_that_come_and_go_are_followed(seed: int, lines: bool) -> None:
    group = Group(seed, lines=lines)
    group.add("a", "b", "c")
    group.settle()
    group.shards -= set(in_order(5))
    group.settle()
    group.shards |= {f"t{n}" for n in range(9)}
    group.settle()


@seeds
def test_loads_are_even_without_the_shards_of_a_node_that_is_away(seed: int) -> None:
    group = Group(seed, lines=False)
    group.add("a", "b", "c")
    group.settle()
    group.away = set(in_order(6))
    for shard in group.away:
        (holder,) = [each for each in group.workers if shard in each.held]
        holder.held.discard(shard)  # its connection is lost
        group.unlock(shard)
    group.settle()
    group.away = set()
    group.settle()


@seeds
def test_a_shard_that_a_stranger_reads_is_asked_for_again_and_again_and_warned_of_once(
    seed: int,
) -> None:
    group = Group(seed, lines=False)
    group.locks["s3"] = "a stranger"
    group.add("a", "b", "c")
    group.run(120)
    assert sorted(shard for each in group.workers for shard in each.held) == sorted(SHARDS - {"s3"})
    asked = [at for each in group.workers for at, shard in each.attempts if shard == "s3"]
    assert 60 < len(asked) <= 3 * 120
    assert all(each.warnings in ([], ["s3"]) for each in group.workers)
    assert any(each.warnings for each in group.workers)
    group.unlock("s3")
    group.settle()


@both_kinds
@seeds
def test_what_a_worker_does_not_take_that_should_is_not_left_unread(seed: int, lines: bool) -> None:
    group = Group(seed, lines=lines)
    group.add("a", "b", "idle")
    group.workers[-1].does_nothing = True  # it announces, and takes nothing: it has no right, say
    group.until(lambda: group.taken.keys() == SHARDS, 20)
    assert not group.workers[-1].held


@both_kinds
def test_what_a_worker_can_not_take_is_read_by_the_others_on_and_on(lines: bool) -> None:
    """They gave it up as surplus as soon as they had it, and nobody read it for nine seconds: 97 %
    of the time, as long as a worker announced itself that does not reach a node."""
    group = Group(1, lines=lines)
    group.add("a", "b", "idle")
    idle = group.workers[-1]
    idle.does_nothing = True
    group.run(60)
    ticks = 4 * 120
    unread = 0
    for _ in range(ticks):
        group.tick()
        unread += len(SHARDS) - sum(len(each.held) for each in group.workers)
    assert unread < 0.1 * ticks * len(SHARDS)  # while they are offered, more and more seldom
    idle.does_nothing = False
    group.until(group.is_fair, 900)


# Taking a shard anew.


def test_shard_is_taken_anew_before_its_messages_have_waited_for_half_of_the_brokers_time() -> None:
    renewals = Renewals(consumer_timeout=100)
    since = {"old": 0.0, "young": 30.0}
    renewed: dict[str, float] = {}
    for now in range(100):
        if renewals.is_time_to_look(now):
            for shard in renewals.due(now, since):
                renewed.setdefault(shard, now)
    assert renewed.keys() == since.keys()
    assert all(40 <= at - since[shard] <= 50 for shard, at in renewed.items()), renewed


def test_shard_is_never_taken_anew_where_the_broker_has_no_such_time() -> None:
    renewals = Renewals(None)
    assert not renewals.is_time_to_look(1e9)
    assert renewals.due(1e9, {"old": 0.0}) == []
