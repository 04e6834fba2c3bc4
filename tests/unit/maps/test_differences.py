"""What changed between two maps is said in words, whatever it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sharding import Address, InvalidInput, Node, Policy, ShardKind, ShardMap, difference
from sharding.maps.differences import state_difference
from sharding.maps.map_log import State
from tests.support.maps import owner_names, queue_map, stream_map

OLD = queue_map("abc")
SHARD_A = OLD.shards[0].name


def moved(old: ShardMap, new: ShardMap) -> str:
    pairs = zip(owner_names(old), owner_names(new), strict=True)
    count = sum(before != after for before, after in pairs)
    return f"{count} of 16384 slots ({count / 16384:.1%}) have a new owner"


def with_first_node(node: Node) -> ShardMap:
    return replace(OLD, nodes=(node, *OLD.nodes[1:]))


def test_equal_maps_have_no_difference() -> None:
    assert difference(OLD, queue_map("abc")) == []


def test_the_order_of_queue_shards_is_no_difference() -> None:
    assert difference(OLD, replace(OLD, shards=OLD.shards[::-1])) == []


def test_another_epoch_is_told() -> None:
    assert difference(OLD, replace(OLD, epoch=5)) == ["epoch 1 → 5"]


def test_a_node_that_joins_is_told_with_its_shard_and_its_slots() -> None:
    new = queue_map("abcd")
    assert difference(OLD, new) == [
        "node rabbit@d joined",
        "shard 'sharding: images - rabbit@d - 0' added on rabbit@d",
        moved(OLD, new),
    ]


def test_a_node_that_leaves_is_told_with_its_shard_and_its_slots() -> None:
    new = queue_map("bc")
    assert difference(OLD, new) == [
        "node rabbit@a left",
        f"shard '{SHARD_A}' removed",
        moved(OLD, new),
    ]


def test_a_shard_that_changes_its_node_is_told_and_no_key_moves() -> None:
    new = replace(OLD, shards=(replace(OLD.shards[0], node="rabbit@b"), *OLD.shards[1:]))
    assert difference(OLD, new) == [f"shard '{SHARD_A}' moved from rabbit@a to rabbit@b"]


def test_a_shard_that_goes_away_and_comes_back_is_told() -> None:
    new = replace(OLD, shards=(replace(OLD.shards[0], available=False), *OLD.shards[1:]))
    assert difference(OLD, new) == [f"shard '{SHARD_A}' is away", moved(OLD, new)]
    assert difference(new, OLD) == [f"shard '{SHARD_A}' is back", moved(OLD, new)]


@pytest.mark.parametrize(
    ("node", "line"),
    [
        (
            Node("rabbit@a", (Address("a2", 5672), Address("::1", 5673)), "token-a"),
            "node rabbit@a is now at a2:5672, [::1]:5673",
        ),
        (Node("rabbit@a", (), "token-a"), "node rabbit@a is now at no known address"),
        (Node("rabbit@a", (Address("a", 5672),)), "node rabbit@a has another reply token"),
    ],
)
def test_a_node_that_is_found_elsewhere_is_told(node: Node, line: str) -> None:
    assert difference(OLD, with_first_node(node)) == [line]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda p: replace(p, shards_per_node=2), "policy shards_per_node: 1 → 2"),
        (lambda p: replace(p, name="new"), "policy name: 'pictures' → 'new'"),
        (lambda p: replace(p, pattern="i"), "policy pattern: '^images$' → 'i'"),
        (lambda p: replace(p, priority=1), "policy priority: 0 → 1"),
        (lambda p: replace(p, routing_key="k"), "policy routing_key: None → 'k'"),
        (lambda p: replace(p, durable=False), "policy durable: True → False"),
        (lambda p: replace(p, queue_arguments={"x": 1}), "policy queue_arguments: {} → {'x': 1}"),
        (lambda p: replace(p, on_unavailable="move"), "policy on_unavailable: 'fail' → 'move'"),
    ],
)
def test_a_changed_policy_is_told_by_field(change: Callable[..., object], line: str) -> None:
    new = replace(OLD, policy=change(OLD.policy))  # type: ignore[arg-type]
    assert difference(OLD, new) == [line]


def test_another_number_of_partitions_is_told() -> None:
    assert difference(stream_map(2), stream_map(3)) == [
        "shard 'invoices-2' added on rabbit@a",
        "partitions 2 → 3: most keys move",
    ]


def test_another_order_of_partitions_is_told() -> None:
    old = stream_map(4)
    new = replace(old, shards=(old.shards[1], old.shards[0], *old.shards[2:]))
    assert difference(old, new) == ["2 of 4 slots (50.0%) have a new owner"]


def test_another_kind_is_told() -> None:
    lines = difference(stream_map(), replace(stream_map(), kind=ShardKind.QUEUE))
    assert lines[0] == "kind stream → queue"


def test_maps_of_different_queues_are_not_compared() -> None:
    with pytest.raises(InvalidInput, match="must be 'images' in both maps; found 'invoices'"):
        difference(OLD, stream_map())


def test_change_of_the_log_is_told_by_policy_and_name() -> None:
    policy = Policy.exactly("images", 1, name="images")
    empty = State(0, {}, {})
    one = State(1, {"images": policy}, {"images": queue_map("ab")})
    two = State(2, {}, {"images": queue_map("abc", epoch=2)})
    assert state_difference(empty, one) == [
        "the policy 'images' is set",
        "images has 2 shards, epoch 1",
    ]
    cleared, changed = state_difference(one, two)
    assert cleared == "the policy 'images' is cleared"
    assert changed.startswith("images: epoch 1 → 2; node rabbit@c joined")
    assert state_difference(two, empty) == ["images is sharded no more"]
    assert state_difference(two, two) == []


def test_a_change_of_the_log_is_told_without_the_slots_of_any_map() -> None:
    """Every client told of every map, and had no time left for its heartbeats."""
    before, after = queue_map("ab"), queue_map("abc", epoch=2)
    assert state_difference(State(1, {}, {"images": before}), State(2, {}, {"images": after}))
    assert not {"table"} & {*vars(before), *vars(after)}
