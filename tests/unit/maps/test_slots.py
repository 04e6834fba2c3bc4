"""Slot tables: what they refuse, and who wins when weights are equal."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sharding import QUEUE_SLOTS, InvalidInput, SlotTable
from sharding.maps import slots


class FakeShake:
    """Weights of few different bytes, so that many first bytes and whole weights are equal."""

    def __init__(self, name: bytes) -> None:
        self._random = random.Random(name)

    def digest(self, length: int) -> bytes:
        return bytes(self._random.choices((0, 1, 254, 255), k=length))


class EqualShake(FakeShake):
    def digest(self, length: int) -> bytes:
        return bytes(length)


def test_a_partition_owns_the_slot_of_its_number() -> None:
    assert list(SlotTable.identity(5).owners) == [0, 1, 2, 3, 4]


def test_a_queue_has_16384_slots_however_many_shards_it_has() -> None:
    assert QUEUE_SLOTS == 16_384
    assert {len(SlotTable.rendezvous(names).owners) for names in ["a", "abc"]} == {QUEUE_SLOTS}


def test_of_equal_weights_the_smallest_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "shake_128", EqualShake)
    names = ["é", "z", "b", "B", "😀"]
    assert set(SlotTable.rendezvous(names).owners) == {names.index("B")}


@pytest.mark.parametrize("shards", [1, 2, 5, 15, 16, 17, 26])
def test_weights_that_begin_alike_are_compared_whole(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "shake_128", FakeShake)
    names = list("qwertyuiopasdfghjklzxcvbnm"[:shards])
    weights = {name: FakeShake(name.encode()).digest(4 * QUEUE_SLOTS) for name in names}
    expected = [
        max(sorted(names), key=lambda name: weights[name][4 * slot : 4 * slot + 4])
        for slot in range(QUEUE_SLOTS)
    ]
    assert [names[owner] for owner in SlotTable.rendezvous(names).owners] == expected


@pytest.mark.parametrize("shards", [0, -1, 4_097, True, 2.0, "3", None])
def test_a_number_of_shards_that_makes_no_sense_is_refused(shards: Any) -> None:
    with pytest.raises(InvalidInput, match="must be 1 to 4096") as caught:
        SlotTable.identity(shards)
    assert caught.value.field == "shards"


def test_an_empty_list_of_shards_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must be 1 to 4096"):
        SlotTable.rendezvous([])


def test_two_shards_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must have different names"):
        SlotTable.rendezvous(["a", "b", "a"])


@pytest.mark.parametrize("name", ["", "\ud800", None, 1])
def test_a_shard_without_a_proper_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        SlotTable.rendezvous(["a", name])
    assert caught.value.field == "shard"


@pytest.mark.parametrize("key", [None, 7, "\ud800"])
def test_a_key_that_has_no_hash_has_no_slot(key: Any) -> None:
    table = SlotTable.identity(3)
    for lookup in (table.slot_of, table.shard_of):
        with pytest.raises(InvalidInput):
            lookup(key)
