"""What changed between two shard maps or states, in words, for logs and for people."""

from __future__ import annotations

from sharding.errors import InvalidInput
from sharding.maps.map_log import State
from sharding.maps.policy import Policy
from sharding.maps.shard_map import ShardMap


def state_difference(old: State, new: State) -> list[str]:
    """What changed between two states of the map log, a sentence for each name.

    Not which slots have moved: to know that of a thousand maps takes minutes, and who logs this
    has heartbeats to answer.
    """
    told = [
        f"the policy {name!r} is {'set' if name in new.policies else 'cleared'}"
        for name in sorted({*old.policies, *new.policies})
        if old.policies.get(name) != new.policies.get(name)
    ]
    for logical, shard_map in new.maps.items():
        before = old.maps.get(logical)
        if before is None:
            told.append(f"{logical} has {len(shard_map.shards)} shards, epoch {shard_map.epoch}")
        elif before != shard_map:
            told.append(f"{logical}: {'; '.join(_changes(before, shard_map))}")
    return [*told, *(f"{name} is sharded no more" for name in old.maps if name not in new.maps)]


def difference(old: ShardMap, new: ShardMap) -> list[str]:
    """What changed between two maps of one logical queue, in words; empty if nothing did."""
    if old.logical != new.logical:
        raise InvalidInput(
            "shard_map.logical", f"must be {old.logical!r} in both maps", new.logical
        )
    return [*_changes(old, new), *_moved_slots(old, new)]


def _changes(old: ShardMap, new: ShardMap) -> list[str]:
    """All of it that is written in the maps."""
    return [
        *([f"epoch {old.epoch} → {new.epoch}"] if old.epoch != new.epoch else []),
        *([f"kind {old.kind} → {new.kind}"] if old.kind != new.kind else []),
        *([f"exchange {old.exchange} → {new.exchange}"] if old.exchange != new.exchange else []),
        *_policy_changes(old.policy, new.policy),
        *_node_changes(old, new),
        *_shard_changes(old, new),
    ]


def _policy_changes(old: Policy, new: Policy) -> list[str]:
    before, after = old.to_json(), new.to_json()
    return [
        f"policy {field}: {before[field]!r} → {after[field]!r}"
        for field in before
        if before[field] != after[field]
    ]


def _node_changes(old: ShardMap, new: ShardMap) -> list[str]:
    before = {node.name: node for node in old.nodes}
    after = {node.name: node for node in new.nodes}
    lines = [f"node {name} left" for name in before if name not in after]
    for name, node in after.items():
        if name not in before:
            lines.append(f"node {name} joined")
            continue
        if before[name].addresses != node.addresses:
            addresses = ", ".join(map(str, node.addresses)) or "no known address"
            lines.append(f"node {name} is now at {addresses}")
        if before[name].reply_token != node.reply_token:
            lines.append(f"node {name} has another reply token")
    return lines


def _shard_changes(old: ShardMap, new: ShardMap) -> list[str]:
    before = {shard.name: shard for shard in old.shards}
    after = {shard.name: shard for shard in new.shards}
    lines = [f"shard {name!r} removed" for name in before if name not in after]
    for name, shard in after.items():
        if name not in before:
            lines.append(f"shard {name!r} added on {shard.node}")
            continue
        if before[name].node != shard.node:
            lines.append(f"shard {name!r} moved from {before[name].node} to {shard.node}")
        if before[name].available != shard.available:
            lines.append(f"shard {name!r} is {'back' if shard.available else 'away'}")
    return lines


def _moved_slots(old: ShardMap, new: ShardMap) -> list[str]:
    slots = len(new.table.owners)
    if len(old.table.owners) != slots:
        return [f"partitions {len(old.table.owners)} → {slots}: most keys move"]
    moved = sum(
        old.shards[before].name != new.shards[after].name
        for before, after in zip(old.table.owners, new.table.owners, strict=True)
    )
    return [f"{moved} of {slots} slots ({moved / slots:.1%}) have a new owner"] if moved else []
