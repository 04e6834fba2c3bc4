"""The slot algorithm is pinned: a naive second implementation and committed vectors say the same.

`tests/vectors/slots.json` was written by the naive implementation below, which follows the prose of
`sharding/maps/slots.py` and shares no code with it but mmh3. If a test here fails, the algorithm
has changed, and with it the shard of keys in every running system: repair the code, not the file.
To add cases run `python -m tests.unit.maps.test_slot_vectors`, and see that no old line changes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mmh3
import pytest

from sharding import SlotTable

FILE = Path(__file__).parents[2] / "vectors" / "slots.json"
SLOTS = 16_384

SHARD_LISTS = {
    "one shard": ["sharding: images - rabbit@rmq0 - 0"],
    "three nodes": [f"sharding: images - rabbit@rmq{node} - 0" for node in range(3)],
    "three nodes, two shards each": [
        f"sharding: images - rabbit@rmq{node} - {index}" for node in range(3) for index in range(2)
    ],
    "twelve, names not ASCII and with dashes": [
        f"sharding: {logical} - rabbit@{host} - 0"
        for logical in ("grüße", "画像", "a - b", "a - b - rabbit@x - 1")
        for host in ("rmq0", "ø", "z.example.org")
    ],
    "fifty, listed backwards": [
        f"sharding: orders - rabbit@rmq{node} - {index}"
        for node in reversed(range(10))
        for index in reversed(range(5))
    ],
}
KEYS = [
    *("", " ", "a", "b", "hello", "brave", "hello1", "hello2", "user-42", "user-43", "USER-42"),
    *("grüße", "gru\u0308ße", "ключ", "鍵", "😀", "a\0b", "line\nbreak", "0", "1", "-1", "3.14"),
    *("invoices.eu.berlin", "#", "*", "x" * 255, "x" * 256, "y" * 1_000, "é" * 100, "end"),
]


def naive_owners(names: list[str]) -> list[str]:
    """The owner of each slot: the greatest weight; of equal ones the smallest name by UTF-8."""
    streams = {name: hashlib.shake_128(name.encode("utf-8")).digest(4 * SLOTS) for name in names}
    owners = []
    for slot in range(SLOTS):
        best_name, best_weight = "", -1
        for name in sorted(names, key=lambda name: name.encode("utf-8")):
            weight = int.from_bytes(streams[name][4 * slot : 4 * slot + 4], "big")
            if weight > best_weight:
                best_name, best_weight = name, weight
        owners.append(best_name)
    return owners


def naive_slot(key: str) -> int:
    return mmh3.hash(key.encode("utf-8"), seed=104729, signed=False) % SLOTS


def checksum(owners: list[str]) -> str:
    return hashlib.sha256("\n".join(owners).encode("utf-8")).hexdigest()


def vectors() -> dict[str, Any]:
    """What the naive implementation says; this is what the file holds."""
    tables = {title: naive_owners(names) for title, names in SHARD_LISTS.items()}
    return {
        "algorithm": "see sharding/maps/slots.py; owners_sha256 is over the owners' names in the "
        "order of the slots, joined by newlines, as UTF-8",
        "slots": {key: naive_slot(key) for key in KEYS},
        "tables": [
            {
                "title": title,
                "shards": SHARD_LISTS[title],
                "owners_sha256": checksum(owners),
                "owner_of_key": {key: owners[naive_slot(key)] for key in KEYS},
            }
            for title, owners in tables.items()
        ],
    }


COMMITTED: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
each_table = pytest.mark.parametrize("table", COMMITTED["tables"], ids=lambda table: table["title"])


def test_the_vectors_are_those_of_the_naive_implementation() -> None:
    assert vectors() == COMMITTED


def test_keys_have_the_committed_slots() -> None:
    table = SlotTable.rendezvous(["any"])
    assert {key: table.slot_of(key) for key in COMMITTED["slots"]} == COMMITTED["slots"]


@each_table
def test_keys_have_the_committed_owners(table: dict[str, Any]) -> None:
    names = table["shards"]
    slots = SlotTable.rendezvous(names)
    owners = {key: names[slots.shard_of(key)] for key in table["owner_of_key"]}
    assert owners == table["owner_of_key"]


@each_table
def test_every_slot_has_the_committed_owner(table: dict[str, Any]) -> None:
    names = table["shards"]
    owners = [names[owner] for owner in SlotTable.rendezvous(names).owners]
    assert checksum(owners) == table["owners_sha256"]


if __name__ == "__main__":
    FILE.write_text(json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n", "utf-8")
