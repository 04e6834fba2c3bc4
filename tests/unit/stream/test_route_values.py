"""Consumers read from a near replica; from the leader only if there is no other."""

from __future__ import annotations

import random
from collections import Counter

from sharding.stream.protocol.constants import Broker
from sharding.stream.routes.near_replicas import Placement, consumer_candidates
from sharding.stream.routes.values import StreamRoute

A, B, C, D = (Broker(host, 5552) for host in "abcd")
ROUTE = StreamRoute("s", A, (B, C, D))
ANYWHERE = Placement()


def candidates(placement: Placement, seed: int = 0, route: StreamRoute = ROUTE) -> list[Broker]:
    return consumer_candidates(route, placement, random.Random(seed))


def test_leader_comes_last_and_every_replica_before_it() -> None:
    for seed in range(50):
        found = candidates(ANYWHERE, seed)
        assert found[-1] == A
        assert sorted(found[:-1]) == [B, C, D]


def test_replicas_of_equal_distance_share_the_consumers() -> None:
    first = Counter(candidates(ANYWHERE, seed)[0] for seed in range(300))
    assert set(first) == {B, C, D}
    assert min(first.values()) > 60


def test_own_host_comes_before_own_zone_before_all_others() -> None:
    placement = Placement(frozenset({"d", "here"}), {"here": "east", "c": "east", "b": "west"})
    for seed in range(20):
        assert candidates(placement, seed) == [D, C, B, A]


def test_leader_is_last_even_on_the_own_host() -> None:
    assert candidates(Placement(frozenset({"a"}), {"a": "east"}))[-1] == A


def test_hosts_are_compared_by_name_without_regard_to_case() -> None:
    assert candidates(Placement(frozenset({"D"})))[0] == D
    assert candidates(Placement(frozenset({"Here"}), {"here": "east", "C": "east"}))[0] == C


def test_host_in_no_zone_is_far_from_everything() -> None:
    placement = Placement(frozenset({"here"}), {"b": "east"})
    assert {candidates(placement, seed)[0] for seed in range(50)} == {B, C, D}


def test_leader_serves_a_stream_without_replicas_unless_one_is_required() -> None:
    alone = StreamRoute("s", A)
    assert candidates(ANYWHERE, route=alone) == [A]
    assert candidates(Placement(require_replica=True), route=alone) == []
    assert A not in candidates(Placement(require_replica=True))


def test_replicas_serve_while_there_is_no_leader() -> None:
    assert sorted(candidates(ANYWHERE, route=StreamRoute("s", None, (B, C)))) == [B, C]
    assert candidates(ANYWHERE, route=StreamRoute("s", None)) == []
