"""Shard maps for tests: as many shards as wanted, on nodes of these hosts."""

from __future__ import annotations

from collections.abc import Sequence

from sharding import Address, Node, Policy, Shard, ShardKind, ShardMap, ShardName

IMAGES = Policy("pictures", "^images$", shards_per_node=1)


def queue_map(hosts: Sequence[str] = "abc", *, per_node: int = 1, epoch: int = 1) -> ShardMap:
    """A map of the queue `images` with `per_node` shards on each host."""
    shards = [
        Shard(str(ShardName("images", f"rabbit@{host}", index)), f"rabbit@{host}")
        for host in hosts
        for index in range(per_node)
    ]
    return ShardMap("images", epoch, tuple(shards), nodes(hosts), IMAGES)


def stream_map(partitions: int = 3, *, epoch: int = 1) -> ShardMap:
    """A map of the super stream `invoices`, all on one node."""
    shards = tuple(Shard(f"invoices-{index}", "rabbit@a") for index in range(partitions))
    return ShardMap("invoices", epoch, shards, nodes("a"), IMAGES, ShardKind.STREAM)


def nodes(hosts: Sequence[str]) -> tuple[Node, ...]:
    return tuple(Node(f"rabbit@{host}", (Address(host, 5672),), f"token-{host}") for host in hosts)


def owner_names(shard_map: ShardMap) -> list[str]:
    """The name of the owner of each slot."""
    return [shard_map.shards[owner].name for owner in shard_map.table.owners]
