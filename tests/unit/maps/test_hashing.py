"""Keys are hashed as the other stream clients hash them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharding import InvalidInput, Key, SlotTable, murmur3

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "vectors" / "murmur3.json").read_text()
)


@pytest.mark.parametrize(("key", "expected"), VECTORS["raw"].items())
def test_hash_is_the_published_one(key: str, expected: int) -> None:
    assert murmur3(key) == expected


@pytest.mark.parametrize(("key", "partition"), VECTORS["partition_of_3"].items())
def test_partition_is_the_one_other_clients_choose(key: str, partition: int) -> None:
    table = SlotTable.identity(3)
    assert table.shard_of(key) == table.slot_of(key) == partition


def test_hash_is_unsigned() -> None:
    assert murmur3("brave") > 2**31


@pytest.mark.parametrize("key", ["", "hello", "grüße", "😀", "a\0b"])
def test_text_and_its_bytes_in_any_form_have_the_same_hash(key: str) -> None:
    data = key.encode()
    forms: list[Key] = [data, bytearray(data), memoryview(data), memoryview(bytearray(data))]
    assert {murmur3(form) for form in forms} == {murmur3(key)}


def test_a_memoryview_is_hashed_by_what_it_shows() -> None:
    assert murmur3(memoryview(b"h-e-l-l-o")[::2]) == murmur3("hello")


def test_bytes_need_not_be_utf8() -> None:
    assert murmur3(b"\xff\xfe") != murmur3(b"\xff\xff")


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidInput, match="UTF-8") as caught:
        murmur3("user-\ud800")
    assert caught.value.field == "key"


@pytest.mark.parametrize("key", [None, 42, 1.5, True, ["hello"], object()])
def test_a_key_that_is_neither_text_nor_bytes_is_refused(key: Any) -> None:
    with pytest.raises(InvalidInput, match="must be text or bytes") as caught:
        murmur3(key)
    assert caught.value.field == "key"
