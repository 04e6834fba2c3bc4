"""Shards are shared fairly, whoever comes and goes, and no more of them move than must."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sharding.groups.sharing.assignment import decide, fair_shares

Held = dict[str, frozenset[str]]


@st.composite
def groups(draw: st.DrawFn) -> tuple[Held, list[str]]:
    """Some workers, some shards, and any distribution of a part of these."""
    shards = [f"s{n}" for n in range(draw(st.integers(1, 30)))]
    workers = [f"w{n}" for n in range(draw(st.integers(1, 9)))]
    owners = draw(
        st.lists(st.sampled_from([*workers, None]), min_size=len(shards), max_size=len(shards))
    )
    held = {
        worker: frozenset(s for s, owner in zip(shards, owners, strict=True) if owner == worker)
        for worker in workers
    }
    return held, shards


def settle(held: Held, shards: list[str], chance: random.Random, stale: bool) -> tuple[Held, int]:
    """Let workers act one after another, in random order, on what they have heard; count moves.

    Where `stale`, a worker hears of another's change only now and then.
    """
    moves = 0
    views: dict[str, Held] = {worker: dict(held) for worker in held}
    held = dict(held)
    for turn in range(200):
        before = dict(held)
        for me in chance.sample(sorted(held), len(held)):
            for other in held:
                if other == me or not stale or turn % 4 == 3 or chance.random() < 0.5:
                    views[me][other] = held[other]
            decision = decide(me, views[me], shards)
            held[me] -= decision.give_up
            moves += len(decision.give_up)
            # The broker's lock: what another holds can't be taken.
            locked = frozenset[str]().union(*held.values())
            held[me] |= frozenset(decision.take) - locked
        if held == before and turn % 4 == 3:
            return held, moves
    raise AssertionError(f"not settled: {held}")


def check_fair(held: Held, shards: list[str]) -> None:
    loads = [len(mine) for mine in held.values()]
    assert max(loads) - min(loads) <= 1
    assert sorted(shard for mine in held.values() for shard in mine) == sorted(shards)


@given(groups(), st.randoms(use_true_random=False))
def test_every_shard_is_held_once_and_loads_differ_by_one_at_most(
    group: tuple[Held, list[str]], chance: random.Random
) -> None:
    held, shards = group
    settled, _ = settle(held, shards, chance, stale=False)
    check_fair(settled, shards)


@given(groups(), st.randoms(use_true_random=False))
def test_views_that_lag_behind_end_in_the_same(
    group: tuple[Held, list[str]], chance: random.Random
) -> None:
    held, shards = group
    settled, _ = settle(held, shards, chance, stale=True)
    check_fair(settled, shards)


@given(groups(), st.randoms(use_true_random=False))
def test_no_more_shards_move_than_must(
    group: tuple[Held, list[str]], chance: random.Random
) -> None:
    held, shards = group
    _, moves = settle(held, shards, chance, stale=False)
    least, more = divmod(len(shards), len(held))
    # The cheapest fair end: as many as possible of the greatest holders keep one more.
    greatest = sorted(map(len, held.values()), reverse=True)
    must = sum(max(0, load - least - (rank < more)) for rank, load in enumerate(greatest))
    assert moves == must


@given(groups(), st.data())
def test_what_has_settled_stays_until_somebody_comes_or_goes(
    group: tuple[Held, list[str]], data: st.DataObject
) -> None:
    held, shards = group
    chance = random.Random(data.draw(st.integers()))
    settled, _ = settle(held, shards, chance, stale=False)
    again, moves = settle(settled, shards, chance, stale=True)
    assert (again, moves) == (settled, 0)
    gone = data.draw(st.sampled_from(sorted(settled)))
    left = {worker: mine for worker, mine in settled.items() if worker != gone}
    if left:
        after, moves = settle(left, shards, chance, stale=False)
        check_fair(after, shards)
        assert moves == 0  # only what the one that went had held moved


@given(groups())
def test_two_with_the_same_view_never_reach_for_the_same_shard(
    group: tuple[Held, list[str]],
) -> None:
    held, shards = group
    takes = [shard for me in held for shard in decide(me, held, shards).take]
    assert len(takes) == len(set(takes))
    assert not set(takes) & frozenset[str]().union(*held.values())


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), min_size=1), st.integers(0, 99))
def test_shares_add_up_and_differ_by_one_at_most(loads: dict[str, int], shards: int) -> None:
    shares = fair_shares(loads, shards)
    assert sum(shares.values()) == shards
    assert max(shares.values()) - min(shares.values()) <= 1
