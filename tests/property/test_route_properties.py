"""Whatever happens in whatever order, the route cache asks in bounds, and ends up right."""

from __future__ import annotations

import random
from collections import Counter
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.stream.connections.node_search import Tries
from sharding.stream.options import RouteOptions
from sharding.stream.protocol.constants import Broker, Code
from sharding.stream.routes.near_replicas import Placement, consumer_candidates
from sharding.stream.routes.rules import RouteState
from sharding.stream.routes.values import Finding, Kind, Missing, StreamRoute, Target

NODES = [Broker(host, 5552) for host in "abc"]
NAMES = ["s", "t", "u"]

names = st.sampled_from(NAMES)
leaders = st.sampled_from([*NODES, None])
routes = st.builds(StreamRoute, names, leaders, st.lists(st.sampled_from(NODES)).map(tuple))
findings: st.SearchStrategy[Finding] = routes | st.builds(
    Missing, names, st.just(Code.NO_SUCH_STREAM)
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("use"), names),
        st.tuples(st.just("suspect"), names),
        st.tuples(st.just("push"), names, st.sampled_from([0.0, 0.95])),
        st.tuples(st.just("disconnect")),
        st.tuples(st.just("change"), findings),
        st.tuples(st.just("down"), st.booleans()),
        st.tuples(st.just("wait"), st.floats(0, 40)),
    ),
    max_size=40,
)


class Cluster:
    """What is really there, and how often it was asked."""

    def __init__(self) -> None:
        self.options = RouteOptions()
        self.state = RouteState(self.options, random.Random(0))
        self.now = 0.0
        self.truth: dict[str, Finding] = {name: Missing(name, 2) for name in NAMES}
        self.down = False
        self.queries: list[float] = []
        self.arms: list[tuple[float, str]] = []

    def apply(self, step: tuple[object, ...]) -> None:
        match step:
            case ("use", str(name)):
                self.state.use(Target(Kind.STREAM, name), self.now)
            case ("suspect", str(name)):
                self.state.suspect(name, self.now)
            case ("push", str(name), float(pressure)):
                self.state.pushed(name, self.now, pressure)
            case ("disconnect",):
                self.state.disconnected(self.now)
            case ("change", StreamRoute() | Missing() as finding):
                self.truth[_name(finding)] = finding
            case ("down", bool(down)):
                self.down = down
            case ("wait", float(seconds)):
                self.run(seconds)
        self.work()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while (at := self.state.wake_at()) <= end:
            self.now = max(self.now, at)
            self.work()
        self.now = end

    def work(self) -> None:
        self.state.forget(self.now)
        while query := self.state.next_query(self.now):
            assert 1 <= len(query) <= self.options.batch_names
            self.queries.append(self.now)
            if self.down:
                self.state.failed(self.now)
            else:
                self.state.answered({name: self.truth[name] for _, name in query}, self.now)
        while (name := self.state.next_arm(self.now)) is not None:
            self.arms.append((self.now, name))
            self.state.arm_succeeded(name, self.now)


def _name(finding: Finding) -> str:
    return finding.stream if isinstance(finding, StreamRoute) else finding.name  # type: ignore[union-attr]


def most_in_a_window(times: list[float], seconds: float) -> int:
    return max((sum(t <= u < t + seconds for u in times) for t in times), default=0)


@settings(max_examples=150)
@given(steps)
def test_questions_stay_within_bounds_and_the_truth_is_known_after_a_poll(
    happenings: list[tuple[object, ...]],
) -> None:
    cluster = Cluster()
    for step in happenings:
        cluster.apply(step)
    # News: one in two seconds, and one for each name after a calm of four. One for the poll, and
    # one for each name at its first use.
    uses = sum(step[0] == "use" for step in happenings)
    assert most_in_a_window(cluster.queries, 10) <= 9 + 3 * len(NAMES) + 1 + uses
    for name in NAMES:
        assert most_in_a_window([at for at, armed in cluster.arms if armed == name], 0.999) <= 1
    cluster.down = False
    for name in NAMES:
        cluster.state.use(Target(Kind.STREAM, name), cluster.now)
    cluster.run(36)
    for name in NAMES:
        assert cluster.state.known(Target(Kind.STREAM, name), cluster.now) == cluster.truth[name]


@settings(max_examples=150)
@given(steps)
def test_time_always_comes_to_rest(happenings: list[tuple[object, ...]]) -> None:
    """Nothing is due at the very moment that everything due was done: no busy loop."""
    cluster = Cluster()
    for step in happenings:
        cluster.apply(step)
        assert cluster.state.wake_at() > cluster.now
    cluster.run(1_000)
    assert cluster.state.wake_at() == inf, "unused, all is forgotten"


@given(routes, st.sets(st.sampled_from("abc")), st.booleans(), st.randoms(use_true_random=False))
def test_candidates_are_the_streams_nodes_each_once_with_the_leader_last(
    route: StreamRoute, own: set[str], require_replica: bool, rng: random.Random
) -> None:
    route = StreamRoute(route.stream, route.leader, tuple(dict.fromkeys(route.replicas)))
    placement = Placement(frozenset(own), {"a": "x", "b": "x"}, require_replica)
    found = consumer_candidates(route, placement, rng)
    assert max(Counter(found).values(), default=1) == 1
    replicas = set(route.replicas) - {route.leader}
    last = {route.leader} - {None} if not require_replica else set()
    assert set(found) == replicas | last
    assert not last or found[-1] == route.leader
    distances = [placement.distance(node) for node in found if node != route.leader]
    assert distances == sorted(distances)


@given(st.lists(st.sampled_from([*NODES, None]), max_size=100), st.integers(1, 20))
def test_search_behind_a_balancer_ends_and_accepts_more_as_it_goes_on(
    reached: list[Broker | None], per_node: int
) -> None:
    tries = Tries(per_node)
    rng = random.Random(0)
    waited = 0.0
    for node in reached:
        if tries.are_used_up:
            break
        if node is None:
            tries.failures += 1
        else:
            tries.seen[node] += 1
        waited += tries.pause(rng)
    assert tries.count <= per_node * len(NODES)
    assert waited <= tries.count * 0.5
    assert 1 <= tries.good_enough <= 1 + tries.count
