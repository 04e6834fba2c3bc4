"""Keys move as little as they can, and shards share the slots evenly.

The bounds come from statistics. The weights drawn from a name are as good as random, so each of S
slots goes to one of n shards with probability p = 1/n, and the number a shard gets is binomial:
mean S·p, standard deviation √(S·p·(1−p)). By chance five deviations are exceeded once in a million
comparisons (once in 60,000 where only ten or so slots are expected, since that tail is longer). The
tests below make some 1,000 comparisons, on examples that are the same in every run: they pass for
good or not at all, and a broken bound means an uneven deal rather than bad luck.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import sqrt

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sharding import QUEUE_SLOTS, Shard, ShardMap, ShardName, SlotTable
from tests.property.strategies import logical_names, shard_names
from tests.support.maps import IMAGES, nodes, owner_names

SIGMAS = 5
few = settings(max_examples=20)  # a table of 40 shards takes some 20 ms


@st.composite
def shard_lists(draw: st.DrawFn, min_size: int = 1) -> list[str]:
    """Up to 40 shards of some queue, in any order."""
    logical, size = draw(logical_names), draw(st.integers(min_size, 40))
    names = [str(ShardName(logical, f"rabbit@rmq{index // 2}", index % 2)) for index in range(size)]
    draw(st.randoms(use_true_random=False)).shuffle(names)
    return names


def owners(names: list[str]) -> list[str]:
    return [names[owner] for owner in SlotTable.rendezvous(names).owners]


def is_binomial(count: int, trials: int, p: float) -> bool:
    return abs(count - trials * p) <= SIGMAS * sqrt(trials * p * (1 - p))


@few
@given(shard_lists(), shard_names.map(str))
def test_key_keeps_its_shard_when_another_joins(names: list[str], newcomer: str) -> None:
    assume(newcomer not in names)
    before, after = owners(names), owners([*names, newcomer])
    won = [old for old, new in zip(before, after, strict=True) if new != old]
    assert after.count(newcomer) == len(won)  # whatever changed went to the newcomer
    assert is_binomial(len(won), QUEUE_SLOTS, 1 / (len(names) + 1))


@few
@given(shard_lists(), shard_names.map(str))
def test_a_newcomer_takes_from_every_shard_alike(names: list[str], newcomer: str) -> None:
    assume(newcomer not in names)
    before, after = owners(names), owners([*names, newcomer])
    won = Counter(old for old, new in zip(before, after, strict=True) if new != old)
    drawn = sum(won.values())
    for name, held in Counter(before).items():
        # `drawn` of S slots are drawn, `held` of them belong to this shard: hypergeometric, with
        # mean drawn·q for q = held/S and variance drawn·q·(1−q)·(S−drawn)/(S−1).
        q = held / QUEUE_SLOTS
        variance = drawn * q * (1 - q) * (QUEUE_SLOTS - drawn) / (QUEUE_SLOTS - 1)
        assert abs(won[name] - drawn * q) <= SIGMAS * sqrt(variance)


@few
@given(shard_lists(min_size=2), st.data())
def test_key_keeps_its_shard_when_another_leaves(names: list[str], data: st.DataObject) -> None:
    leaver = data.draw(st.sampled_from(names))
    before, after = owners(names), owners([name for name in names if name != leaver])
    for old, new in zip(before, after, strict=True):
        assert new == old or old == leaver


@few
@given(shard_lists())
def test_slots_are_shared_evenly(names: list[str]) -> None:
    counts = Counter(owners(names))
    assert all(is_binomial(counts[name], QUEUE_SLOTS, 1 / len(names)) for name in names)


@few
@given(shard_lists())
def test_the_order_of_the_list_plays_no_part(names: list[str]) -> None:
    assert owners(names) == owners(sorted(names)) == owners(names[::-1])


@few
@given(shard_lists(min_size=2), st.data())
def test_an_absent_shard_s_keys_go_where_they_would_if_it_left_and_come_home(
    names: list[str], data: st.DataObject
) -> None:
    away = data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=len(names) - 1))
    shards = tuple(Shard(name, "rabbit@a") for name in names)
    whole = ShardMap("images", 1, shards, nodes("a"), IMAGES)
    left = replace(whole, shards=tuple(shard for shard in shards if shard.name not in away))
    absent = replace(
        whole, shards=tuple(replace(shard, available=shard.name not in away) for shard in shards)
    )
    home = replace(absent, shards=tuple(replace(s, available=True) for s in absent.shards))

    assert owner_names(absent) == owner_names(left)
    assert owner_names(home) == owner_names(whole)
    for key in ("", "user-42", "grüße"):
        assert absent.route(key) == left.route(key)
        assert home.route(key) == whole.route(key)
