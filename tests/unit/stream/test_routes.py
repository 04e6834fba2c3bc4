"""The route cache's rules (DESIGN point 8), each with a clock of our own."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

from sharding.errors import InvalidInput
from sharding.stream.options import RouteOptions
from sharding.stream.protocol.constants import Broker, Code
from sharding.stream.routes.pressure import Pressure
from sharding.stream.routes.rules import BATCH_BYTES, RouteState
from sharding.stream.routes.values import Finding, Kind, Missing, Partitions, StreamRoute, Target
from tests.machine import PROJECT

A, B, C = Broker("a", 5552), Broker("b", 5552), Broker("c", 5552)
NO_PUSHES = RouteOptions(pushes=False)


def stream(name: str) -> Target:
    return Target(Kind.STREAM, name)


def led_by(leader: Broker | None, *replicas: Broker) -> Callable[[str], Finding]:
    return lambda name: StreamRoute(name, leader, replicas)


def missing(name: str) -> Finding:
    return Missing(name, Code.NO_SUCH_STREAM)


class Cluster:
    """Answers what the state asks, and keeps the time."""

    def __init__(self, options: RouteOptions = NO_PUSHES, seed: int = 1) -> None:
        self.state = RouteState(options, random.Random(seed))
        self.now = 1_000.0
        self.answer = led_by(A, B, C)
        self.queries: list[tuple[float, list[str]]] = []
        self.armed: list[tuple[float, str]] = []
        self.reachable = True

    def use(self, *names: str) -> list[Finding | None]:
        """Have all these asked for and answered, and return what is then known."""
        for name in names:
            self.state.use(stream(name), self.now)
        self.work()
        return [self.state.known(stream(name), self.now) for name in names]

    def known(self, name: str) -> Finding | None:
        return self.state.known(stream(name), self.now)

    def work(self) -> None:
        """Do everything that is due now."""
        self.state.forget(self.now)
        while query := self.state.next_query(self.now):
            self.queries.append((self.now, [target.name for target in query]))
            if self.reachable:
                self.state.answered(
                    {target.name: self.answer(target.name) for target in query}, self.now
                )
            else:
                self.state.failed(self.now)
        while (armed := self.state.next_arm(self.now)) is not None:
            self.armed.append((self.now, armed))
            self.state.arm_succeeded(armed, self.now)

    def run(self, seconds: float, using: Iterable[str] = ()) -> None:
        """Let time pass, from one thing that is due to the next."""
        names, end = list(using), self.now + seconds
        while (at := self.state.wake_at()) <= end:
            self.now = max(self.now, at)
            self.work()
            for name in names:
                self.state.known(stream(name), self.now)
        self.now = end

    def calm(self) -> None:
        """Until nothing is asked on account of what happened before."""
        self.run(5)
        self.queries.clear()
        self.armed.clear()

    def counted(self, name: str) -> int:
        return self.state.counters[name]


# Memory


def test_known_route_is_answered_from_memory() -> None:
    cluster = Cluster()
    assert cluster.use("s") == [StreamRoute("s", A, (B, C))]
    cluster.calm()
    for _ in range(1_000):
        cluster.use("s")
    assert cluster.queries == []
    assert cluster.counted("hits") == 1_000


def test_missing_name_is_answered_from_memory() -> None:
    cluster = Cluster()
    cluster.answer = missing
    for _ in range(1_000):
        assert cluster.use("s") == [missing("s")]
        cluster.run(0.005)
    assert len(cluster.queries) == 1
    assert cluster.counted("hits_missing") == 999


def test_new_name_is_asked_for_at_once_also_amid_a_storm() -> None:
    cluster = Cluster()
    cluster.use("s")
    for _ in range(20):
        cluster.state.suspect("s", cluster.now)
        cluster.run(0.5)
    cluster.queries.clear()
    assert cluster.use("new") == [StreamRoute("new", A, (B, C))]
    assert cluster.queries == [(cluster.now, ["new"])]


def test_name_nobody_used_for_five_minutes_is_forgotten() -> None:
    cluster = Cluster(RouteOptions())
    cluster.use("unused", "used")
    cluster.run(301, using=["used"])
    assert len(cluster.state) == 1
    assert cluster.counted("forgotten") == 1
    cluster.queries.clear()
    cluster.armed.clear()
    cluster.state.disconnected(cluster.now)
    cluster.state.pushed("unused", cluster.now, 0.0)
    cluster.run(60, using=["used"])
    assert {name for _, names in cluster.queries for name in names} == {"used"}
    assert {name for _, name in cluster.armed} == {"used"}
    assert cluster.counted("pushes_unused") == 1


def test_nothing_is_due_when_nothing_is_remembered() -> None:
    cluster = Cluster(RouteOptions())
    assert cluster.state.wake_at() == inf
    cluster.use("s")
    cluster.run(301)
    assert cluster.state.wake_at() == inf
    assert cluster.use("s") == [StreamRoute("s", A, (B, C))]


def test_memory_is_bounded_and_the_least_used_goes_first() -> None:
    cluster = Cluster(RouteOptions(max_names=3))
    cluster.use("a", "b", "c")
    cluster.known("a")
    cluster.use("d")
    assert len(cluster.state) == 3
    assert cluster.counted("evicted") == 1
    cluster.calm()
    cluster.use("a", "c", "d")
    assert cluster.queries == []


# The poll


def test_everything_in_use_is_polled_every_thirty_seconds_or_a_little_earlier() -> None:
    cluster = Cluster()
    cluster.use("s", "t")
    cluster.calm()
    began = cluster.now
    cluster.run(280, using=["s", "t"])
    gaps = [after - before for (before, _), (after, _) in pairwise(cluster.queries)]
    assert all(sorted(names) == ["s", "t"] for _, names in cluster.queries)
    assert all(22.5 <= gap <= 30 for gap in gaps)
    assert len({round(gap, 3) for gap in gaps}) == len(gaps), "no jitter"
    assert cluster.queries[0][0] - began <= 30
    assert cluster.counted("polls") == len(cluster.queries)


def test_poll_sees_a_missing_name_appear_and_a_known_one_move() -> None:
    cluster = Cluster()
    cluster.answer = missing
    cluster.use("s")
    cluster.answer = led_by(A, B)
    cluster.run(31)
    assert cluster.known("s") == StreamRoute("s", A, (B,))
    cluster.answer = led_by(C, B)
    cluster.run(31)
    assert cluster.known("s") == StreamRoute("s", C, (B,))
    assert cluster.counted("changes") == 2


def test_known_answer_stays_in_use_while_the_poll_asks() -> None:
    cluster = Cluster()
    cluster.use("s")
    cluster.now += 30
    assert cluster.state.next_query(cluster.now)
    assert cluster.known("s") == StreamRoute("s", A, (B, C))


# News


def test_push_has_the_stream_asked_for_within_a_moment_and_not_handed_out_before() -> None:
    cluster = Cluster(RouteOptions())
    cluster.use("s")
    cluster.calm()
    cluster.answer = led_by(B, C)
    cluster.state.pushed("s", cluster.now, 0.0)
    assert cluster.known("s") is None
    cluster.run(0.05)
    assert cluster.known("s") == StreamRoute("s", B, (C,))


def test_pushed_stream_that_is_gone_is_told_from_one_that_moved_by_asking() -> None:
    cluster = Cluster(RouteOptions())
    cluster.use("s")
    cluster.calm()
    cluster.answer = missing
    cluster.state.pushed("s", cluster.now, 0.0)
    cluster.run(0.05)
    assert cluster.known("s") == missing("s")


def test_suspected_route_is_not_handed_out_until_it_was_asked_for_anew() -> None:
    cluster = Cluster()
    cluster.use("s")
    cluster.calm()
    cluster.state.suspect("s", cluster.now)
    assert cluster.known("s") is None
    cluster.run(0.05)
    assert cluster.known("s") is not None
    assert cluster.counted("suspicions") == 1


def test_suspicion_that_comes_while_a_query_is_under_way_asks_again() -> None:
    cluster = Cluster()
    cluster.state.use(stream("s"), cluster.now)
    assert cluster.state.next_query(cluster.now)
    cluster.state.suspect("s", cluster.now)
    cluster.state.answered({"s": StreamRoute("s", A, (B,))}, cluster.now)
    assert cluster.known("s") is None
    cluster.run(0.1)
    assert cluster.known("s") is not None


def test_suspicions_of_some_do_not_keep_others_waiting() -> None:
    cluster = Cluster()
    cluster.use("s")
    cluster.calm()
    cluster.state.suspect("s", cluster.now)
    arrived = cluster.now
    cluster.run(0.1)
    cluster.state.suspect("s", cluster.now)
    assert cluster.state.known(stream("s"), cluster.now, arrived) == StreamRoute("s", A, (B, C))
    assert cluster.state.known(stream("s"), cluster.now, cluster.now) is None


def test_leader_that_is_still_named_after_its_end_is_looked_at_again() -> None:
    cluster = Cluster()
    cluster.use("s")
    cluster.calm()
    cluster.state.suspect("s", cluster.now)
    cluster.run(0.06)
    assert cluster.known("s") == StreamRoute("s", A, (B, C)), "not yet known to the broker"
    cluster.answer = led_by(B, C)
    cluster.run(0.5)
    assert cluster.known("s") == StreamRoute("s", B, (C,))


def test_suspicion_repeated_for_ever_costs_one_query_in_two_seconds() -> None:
    cluster = Cluster()
    cluster.use("s")
    cluster.calm()
    for _ in range(1_000):
        cluster.state.suspect("s", cluster.now)
        cluster.run(0.01)
    assert len(cluster.queries) <= 9


def test_node_that_led_a_thousand_streams_restarts_for_a_few_batched_queries() -> None:
    names = [f"stream-{number}" for number in range(1_000)]
    cluster = Cluster(RouteOptions(arms_per_second=10_000))
    cluster.use(*names)
    cluster.run(10)
    cluster.calm()
    cluster.answer = led_by(None)
    for number, name in enumerate(names):  # the news trickle in over a second
        cluster.state.pushed(name, cluster.now, 0.0)
        cluster.state.suspect(name, cluster.now)
        cluster.run(0.001)
        if number == 500:
            cluster.answer = led_by(B, C)
    cluster.run(8)
    assert all(cluster.known(name) == StreamRoute(name, B, (C,)) for name in names)
    assert len(cluster.queries) <= 12
    assert all(len(names) <= 500 for _, names in cluster.queries)


def test_news_of_one_name_are_not_held_up_by_a_storm_about_another() -> None:
    cluster = Cluster()
    cluster.use("calm", "stormy")
    cluster.calm()
    for _ in range(1_000):
        cluster.state.suspect("stormy", cluster.now)
        cluster.run(0.01, using=["calm"])
    cluster.state.suspect("calm", cluster.now)
    cluster.run(0.25)
    assert cluster.known("calm") is not None


def test_many_new_streams_one_after_another_each_have_their_replicas_found_soon() -> None:
    cluster = Cluster()
    for number in range(50):
        cluster.answer = led_by(A)
        cluster.use(f"stream-{number}")
        cluster.answer = led_by(A, B)
        cluster.run(0.25)
        assert not cluster.state.settling(stream(f"stream-{number}"))


def test_callers_share_the_query_under_way() -> None:
    cluster = Cluster()
    for _ in range(200):
        cluster.state.use(stream("s"), cluster.now)
    assert cluster.state.next_query(cluster.now) == (stream("s"),)
    for _ in range(200):
        cluster.state.use(stream("s"), cluster.now)
        assert cluster.state.next_query(cluster.now) == ()
    assert cluster.counted("queries") == 1


def test_names_wanted_during_a_query_go_together_in_the_next() -> None:
    cluster = Cluster()
    cluster.state.use(stream("first"), cluster.now)
    cluster.state.next_query(cluster.now)
    for name in "abc":
        cluster.state.use(stream(name), cluster.now)
    cluster.state.answered({"first": missing("first")}, cluster.now)
    assert cluster.state.next_query(cluster.now) == (stream("a"), stream("b"), stream("c"))


def test_query_is_bounded_in_bytes() -> None:
    cluster = Cluster()
    cluster.use(*(f"{number:0>255}" for number in range(400)))
    sizes = [sum(len(name) + 2 for name in names) for _, names in cluster.queries]
    assert max(sizes) <= BATCH_BYTES
    assert len(sizes) == 3


def test_lost_locator_has_all_that_was_armed_asked_for_and_armed_again() -> None:
    names = [f"stream-{number}" for number in range(20)]
    cluster = Cluster(RouteOptions())
    cluster.use(*names)
    cluster.calm()
    cluster.state.disconnected(cluster.now)
    assert cluster.known(names[0]) is not None, "the known answer stays in use meanwhile"
    cluster.run(2)
    assert len(cluster.queries[0][1]) == 20
    assert len(cluster.queries) <= 3
    assert sorted(name for _, name in cluster.armed) == sorted(names)


def test_failed_query_is_tried_again_after_growing_pauses() -> None:
    cluster = Cluster()
    cluster.reachable = False
    cluster.use("s")
    cluster.run(20)
    times = [at for at, _ in cluster.queries]
    pauses = [round(after - before, 3) for before, after in pairwise(times)]
    assert pauses[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert cluster.counted("failures") == len(times)
    before = len(cluster.queries)
    cluster.use("another")
    assert len(cluster.queries) == before, "a new name does not get round the pause"
    cluster.reachable = True
    cluster.run(5)
    assert cluster.use("s", "another") == [
        StreamRoute(name, A, (B, C)) for name in ("s", "another")
    ]


def test_known_routes_outlive_an_unreachable_cluster() -> None:
    cluster = Cluster()
    cluster.use("s")
    cluster.reachable = False
    cluster.run(120, using=["s"])
    assert cluster.known("s") == StreamRoute("s", A, (B, C))


# Elections and new streams


def test_stream_without_leader_is_asked_for_again_some_times_then_by_the_poll() -> None:
    cluster = Cluster()
    cluster.answer = led_by(None)
    cluster.use("s")
    cluster.run(20)
    assert len(cluster.queries) == 1 + RouteOptions().leader_rounds
    cluster.answer = led_by(A, B)
    cluster.run(15)
    assert cluster.known("s") == StreamRoute("s", A, (B,))


def test_leader_somebody_waits_for_is_asked_for_all_the_time_but_at_a_bounded_rate() -> None:
    cluster = Cluster()
    cluster.answer = led_by(None)
    cluster.use("s")
    cluster.run(10)
    cluster.queries.clear()
    for _ in range(1_000):
        cluster.state.insist(stream("s"), cluster.now)
        cluster.run(0.01)
    assert 5 <= len(cluster.queries) <= 9


def test_waiting_for_one_leader_asks_for_all_streams_without_one_in_the_same_query() -> None:
    cluster = Cluster(RouteOptions(pushes=False, poll_interval=3600))
    cluster.answer = led_by(None)
    names = [f"s-{n}" for n in range(100)]
    cluster.use(*names)
    cluster.run(60)  # the rounds that need nobody to wait are over
    cluster.queries.clear()
    cluster.state.insist(stream("s-7"), cluster.now)
    cluster.run(5)
    ((_, asked),) = cluster.queries
    assert sorted(asked) == sorted(names)


@pytest.mark.parametrize(("seconds", "most"), [(10, 10), (20, 15), (30, 20)])
def test_elections_that_take_long_cost_callers_in_turn_one_query_in_two_seconds(
    seconds: int, most: int
) -> None:
    cluster = Cluster(RouteOptions(poll_interval=3600))
    names = [f"s-{n}" for n in range(100)]
    cluster.use(*names)
    cluster.calm()
    killed_at, when = cluster.now, random.Random(3)
    led_at = {name: killed_at + seconds * when.uniform(0.5, 1) for name in names}
    cluster.answer = lambda name: led_by(B if cluster.now >= led_at[name] else None, C)(name)
    for name in names:
        cluster.state.pushed(name, cluster.now, 0.0)
    for name in names:
        while not isinstance(found := cluster.known(name), StreamRoute) or found.leader is None:
            if found is not None:
                cluster.state.insist(stream(name), cluster.now)
            cluster.run(max(0.001, cluster.state.wake_at() - cluster.now))
    assert cluster.now - killed_at < seconds + 2, "none is found long after it was elected"
    cluster.run(10)
    assert len(cluster.queries) <= most


def test_waiting_for_one_leader_costs_one_query_however_many_have_none() -> None:
    cluster = Cluster(RouteOptions(pushes=False, poll_interval=3600, batch_names=10))
    cluster.answer = led_by(None)
    cluster.use(*(f"s-{n}" for n in range(100)))
    cluster.run(60)
    cluster.queries.clear()
    cluster.state.insist(stream("s-99"), cluster.now)
    cluster.run(5)
    ((_, asked),) = cluster.queries
    assert asked[0] == "s-99"
    assert len(asked) == 10


def test_replicas_of_a_new_stream_are_looked_for_soon_after_its_leader() -> None:
    cluster = Cluster()
    cluster.answer = led_by(A)
    cluster.use("s")
    assert cluster.state.settling(stream("s"))
    cluster.answer = led_by(A, B, C)
    cluster.run(0.05)
    assert cluster.known("s") == StreamRoute("s", A, (B, C))
    assert not cluster.state.settling(stream("s"))


def test_replicas_listed_one_by_one_are_found_by_a_second_look() -> None:
    cluster = Cluster()
    cluster.answer = led_by(A, B)
    cluster.use("s")
    cluster.answer = led_by(A, B, C)
    cluster.run(0.05)
    assert cluster.known("s") == StreamRoute("s", A, (B, C))


def test_stream_that_never_has_replicas_is_not_asked_for_without_end() -> None:
    cluster = Cluster()
    cluster.answer = led_by(A)
    cluster.use("s")
    cluster.run(20)
    assert len(cluster.queries) == 1 + RouteOptions().replica_rounds
    assert not cluster.state.settling(stream("s"))


# Arming


def test_every_stream_with_a_leader_is_armed_once() -> None:
    cluster = Cluster(RouteOptions())
    cluster.use("s", "t")
    cluster.run(29, using=["s", "t"])
    assert sorted(name for _, name in cluster.armed) == ["s", "t"]


def test_stream_without_leader_missing_or_with_pushes_off_is_not_armed() -> None:
    for options, answer in (
        (RouteOptions(), missing),
        (RouteOptions(), led_by(None)),
        (NO_PUSHES, led_by(A, B)),
    ):
        cluster = Cluster(options)
        cluster.answer = answer
        cluster.use("s")
        cluster.run(40)
        assert cluster.armed == []


def test_arming_is_used_up_by_a_push_and_done_again_at_a_bounded_rate() -> None:
    cluster = Cluster(RouteOptions())
    cluster.use("s")
    for _ in range(1_000):  # a stream that changes a hundred times a second
        if cluster.armed and cluster.counted("pushes") < len(cluster.armed):
            cluster.state.pushed("s", cluster.now, 0.0)
        cluster.run(0.01)
    times = [at for at, _ in cluster.armed]
    assert 5 <= len(times) <= 11
    assert all(after - before >= 1 for before, after in pairwise(times))


def test_change_between_the_answer_and_the_arming_is_found() -> None:
    cluster = Cluster(RouteOptions(arms_per_second=0.1))
    cluster.use("s", "t")
    cluster.run(5, using=["s", "t"])
    cluster.answer = led_by(B, C)
    cluster.run(7, using=["s", "t"])
    assert [name for _, name in cluster.armed] == ["s", "t"]
    assert cluster.known("t") == StreamRoute("t", B, (C,))


def test_many_streams_are_armed_at_a_bounded_rate() -> None:
    cluster = Cluster(RouteOptions())
    cluster.use(*(f"stream-{number}" for number in range(300)))
    cluster.run(0.999)
    assert 95 <= len(cluster.armed) <= 101
    cluster.run(4)
    assert len(cluster.armed) == 300


def test_stream_that_changed_before_it_was_armed_is_asked_for_again() -> None:
    cluster = Cluster(RouteOptions())
    cluster.use("s")
    cluster.calm()
    cluster.state.arm_refused("s", cluster.now)
    assert cluster.known("s") is None
    cluster.run(2)
    assert len(cluster.queries) == 2, "and looked at once more"
    assert [name for _, name in cluster.armed] == ["s"]


def test_arming_that_fails_pauses_all_arming_and_is_done_again_long_before_the_poll() -> None:
    cluster = Cluster(RouteOptions())
    cluster.use("s")
    cluster.calm()
    cluster.state.arm_failed("s", cluster.now)
    failed_at = cluster.now
    cluster.use("t")
    cluster.run(3, using=["s", "t"])
    assert sorted(name for _, name in cluster.armed) == ["s", "t"]
    assert all(at >= failed_at + 1 for at, _ in cluster.armed)


def test_pushes_are_ignored_above_ninety_percent_and_the_poll_does_the_work() -> None:
    cluster = Cluster(RouteOptions())
    cluster.use("s")
    cluster.calm()
    cluster.answer = led_by(B, C)
    cluster.state.pushed("s", cluster.now, 0.91)
    cluster.run(5)
    assert cluster.queries == []
    assert cluster.known("s") == StreamRoute("s", A, (B, C))
    assert cluster.counted("pushes_ignored") == 1
    cluster.run(25, using=["s"])
    assert cluster.known("s") == StreamRoute("s", B, (C,))
    assert [name for _, name in cluster.armed] == ["s"], "armed again"
    cluster.calm()
    cluster.answer = led_by(C, B)
    cluster.state.pushed("s", cluster.now, 0.9)
    cluster.run(0.1)
    assert cluster.known("s") == StreamRoute("s", C, (B,))


# Super streams


def test_partitions_are_cached_polled_and_suspected_like_streams() -> None:
    state = RouteState(NO_PUSHES, random.Random(1))
    target = Target(Kind.SUPER_STREAM, "invoices")
    state.use(target, 0.0)
    assert state.next_query(0.0) == (target,)
    state.answered({"invoices": Partitions("invoices", ("invoices-0",))}, 0.0)
    assert state.known(target, 1.0) == Partitions("invoices", ("invoices-0",))
    assert state.next_query(1.0) == ()
    assert state.next_query(30.0) == (target,)
    state.answered({"invoices": Partitions("invoices", ("invoices-0", "invoices-1"))}, 30.0)
    assert state.known(target, 30.0) == Partitions("invoices", ("invoices-0", "invoices-1"))
    state.suspect("invoices", 40.0)
    assert state.known(target, 40.0) is None
    assert state.next_query(41.0) == (target,)
    assert state.counters["partition_queries"] == 3
    assert state.counters["queries"] == 0


def test_stream_and_super_stream_of_one_name_are_two_things() -> None:
    state = RouteState(NO_PUSHES, random.Random(1))
    targets = Target(Kind.SUPER_STREAM, "both"), stream("both")
    for target in targets:
        state.use(target, 0.0)
    assert state.next_query(0.0) == (stream("both"),)
    state.answered({"both": missing("both")}, 0.0)
    assert state.next_query(0.0) == (targets[0],)
    state.answered({"both": Partitions("both", ("p",))}, 0.0)
    assert state.known(targets[0], 0.0) == Partitions("both", ("p",))
    assert state.known(targets[1], 0.0) == missing("both")


def test_suspected_partition_has_its_super_stream_asked_for() -> None:
    cluster = Cluster(RouteOptions(pushes=False, poll_interval=3600))
    invoices = Target(Kind.SUPER_STREAM, "invoices")
    cluster.state.use(invoices, cluster.now)
    cluster.answer = lambda name: Partitions(name, ("i-0", "i-1"))
    cluster.work()
    cluster.calm()
    cluster.answer = lambda name: Partitions(name, ("i-0",))
    cluster.state.suspect("i-1", cluster.now)  # nobody has asked for its own route
    assert cluster.state.known(invoices, cluster.now) is None
    cluster.run(1)
    assert cluster.state.known(invoices, cluster.now) == Partitions("invoices", ("i-0",))


def test_partition_that_goes_away_has_its_super_stream_asked_for() -> None:
    state = RouteState(NO_PUSHES, random.Random(1))
    target = Target(Kind.SUPER_STREAM, "invoices")
    state.use(target, 0.0)
    state.next_query(0.0)
    state.answered({"invoices": Partitions("invoices", ("p0", "p1"))}, 0.0)
    state.use(stream("p1"), 1.0)
    state.next_query(1.0)
    state.answered({"p1": missing("p1")}, 1.0)
    assert state.known(target, 1.0) is None
    assert state.next_query(2.0) == (target,)


# Options, pressure, imports


def test_senseless_options_are_refused_by_name() -> None:
    for name, value in (
        ("poll_interval", 0),
        ("forget_after", -1),
        ("poll_jitter", 1.5),
        ("batch_names", 0),
        ("coalesce", float("nan")),
    ):
        with pytest.raises(InvalidInput, match=name):
            RouteOptions(**{name: value})  # type: ignore[arg-type]


def machine(root: Path, *, available: int = 800, idle: int = 0, busy: int = 0) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1000 kB\nMemAvailable: {available} kB\n")
    (root / "proc/stat").write_text(f"cpu {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")


def test_pressure_is_the_fullest_of_memory_and_cpu(tmp_path: Path) -> None:
    now = 0.0
    machine(tmp_path)
    pressure = Pressure(tmp_path, lambda: now)
    assert pressure() == pytest.approx(0.2)
    now = 1.0
    machine(tmp_path, idle=5, busy=95)
    assert pressure() == pytest.approx(0.95)
    now = 1.1
    machine(tmp_path, idle=1_000, busy=95)
    assert pressure() == pytest.approx(0.95), "measured over half a second at least"
    now = 2.0
    machine(tmp_path, available=30, idle=1_000, busy=95)
    assert pressure() == pytest.approx(0.97)
    now = 100.0
    machine(tmp_path, idle=1_000, busy=9_999)
    assert pressure() == pytest.approx(0.2), "what was busy a minute ago says nothing about now"


def test_pressure_knows_the_limits_of_a_container(tmp_path: Path) -> None:
    now = 0.0
    machine(tmp_path)
    (tmp_path / "proc/self/cgroup").write_text("0::/app\n")
    group = tmp_path / "sys/fs/cgroup/app"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("900\n")
    (group / "memory.stat").write_text("anon 500\ninactive_file 400\n")
    (group / "cpu.max").write_text("50000 100000\n")
    (group / "cpu.stat").write_text("usage_usec 0\n")
    pressure = Pressure(tmp_path, lambda: now)
    assert pressure() == pytest.approx(0.5), "cached files are given up when memory is wanted"
    now = 1.0
    (group / "cpu.stat").write_text("usage_usec 480000\n")
    assert pressure() == pytest.approx(0.96)


def test_pressure_of_a_machine_that_tells_nothing_is_none(tmp_path: Path) -> None:
    assert Pressure(tmp_path)() == 0.0


@pytest.mark.parametrize("module", ["values", "rules", "cache"])
def test_routes_can_be_imported_first(module: str) -> None:
    subprocess.run(
        [sys.executable, "-c", f"import sharding.stream.routes.{module}"], cwd=PROJECT, check=True
    )
