"""Consumers spread evenly: the first choice, claims of others, and the way out of a herd."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sharding.cluster.topology import Claims
from sharding.maps.consumer_spread import Looks, better_shard, is_even, least_consumers


def test_fewest_consumers_win_and_of_equals_the_first() -> None:
    assert least_consumers({"a": 2, "b": 1, "c": 1}, Counter()) == "b"
    assert least_consumers({"a": 0, "b": 0}, Counter()) == "a"


def test_shard_that_does_not_answer_is_not_chosen() -> None:
    assert least_consumers({"a": None, "b": 5}, Counter()) == "b"
    assert least_consumers({"a": None}, Counter()) is None


def test_consumers_on_their_way_are_counted_until_they_arrive() -> None:
    claims = Claims()
    counts = {"a": 0, "b": 0}
    assert [claims.choose(counts) for _ in range(4)] == ["a", "b", "a", "b"]
    claims.settle("a")
    claims.settle("a")
    assert claims.choose(counts) == "a"


def test_nobody_moves_for_a_difference_of_one() -> None:
    assert all(
        better_shard("a", {"a": 2, "b": 1}, random.Random(n).random) is None for n in range(100)
    )
    assert is_even({"a": 2, "b": 1, "c": None})
    assert not is_even({"a": 3, "b": 1})


@pytest.mark.parametrize("clients", [2, 8, 16, 64])
def test_herd_ends_evenly_although_each_decides_alone(clients: int) -> None:
    chance = random.Random(clients)
    shards = ["a", "b", "c", "d"]
    places = ["a"] * clients
    for _ in range(200):
        counts: dict[str, int | None] = {shard: places.count(shard) for shard in shards}
        if is_even(counts):
            break
        # All of them look at the same count: the worst case.
        places = [better_shard(place, counts, chance.random) or place for place in places]
    assert is_even({shard: places.count(shard) for shard in shards})


def test_a_new_consumer_is_looked_after_until_counts_stay_even() -> None:
    even, uneven = {"a": 1, "b": 1}, {"a": 3, "b": 1}
    looks = Looks()
    for counts, moved in (
        *((uneven, True), (even, False), (even, False), (uneven, False)),
        *((even, False), (even, True), (even, False), (even, False), (even, False)),
    ):
        assert looks.pause(chance=0.5) is not None
        looks.seen(counts, moved)
    assert looks.pause(chance=0.5) is None


def test_a_consumer_is_not_looked_after_for_ever() -> None:
    looks = Looks()
    pauses = []
    while (pause := looks.pause(chance=1.0)) is not None:
        pauses.append(pause)
        looks.seen({"a": None}, moved=False)  # silence is no evenness
    assert pauses == [0.5] * 20
