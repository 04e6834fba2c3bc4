"""What changed between two shard maps, in words, for logs and for people."""

from __future__ import annotations

from sharding.errors import InvalidInput
from sharding.policy import Policy
from sharding.shard_map import ShardMap


def difference(old: ShardMap, new: ShardMap) -> list[str]:
    """What changed between two maps of one logical queue, in words; empty if nothing did."""
    if old.logical != new.logical:
        raise InvalidInput(
            "shard_map.logical", f"must be {old.logical!r} in both maps", new.logical
        )
    return [
        *([f"epoch {old.epoch} → {new.epoch}"] if old.epoch != new.epoch else []),
        *([f"kind {old.kind} → {new.kind}"] if old.kind != new.kind else []),
        *([f"exchange {old.exchange} → {new.exchange}"] if old.exchange != new.exchange else []),
        *_policy_changes(old.policy, new.policy),
        *_node_changes(old, new),
        *_shard_changes(old, new),
        *_moved_slots(old, new),
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
