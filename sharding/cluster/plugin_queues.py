"""Shards that are in the broker already: the plugin's queues, read from the management API.

Their names say what they are (`ShardName`), so a running system of the plugin can be taken over
with its queues and their messages, and a client that may not use the map log can still route.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharding.cluster.management import ClusterView
from sharding.errors import InvalidInput
from sharding.maps.naming import ShardName
from sharding.maps.planning import Member
from sharding.maps.policy import Policy
from sharding.maps.shard_map import Shard, ShardMap
from sharding.maps.slots import MAX_SHARDS


@dataclass(frozen=True, slots=True)
class FoundShards:
    """The shard queues of one logical queue, as they are."""

    logical: str
    shards: tuple[Shard, ...]
    messages: int
    shards_per_node: int
    durable: bool

    def policy(self) -> Policy:
        """The policy that would have made them, under the name that `warren policy set` uses."""
        return Policy.exactly(
            self.logical, self.shards_per_node, name=self.logical, durable=self.durable
        )


def find_shards(view: ClusterView, vhost: str, logical: str) -> FoundShards:
    """Ask the management API for the queues that are named as shards of `logical`."""
    return found_in(view.ask("GET", "queues", vhost), logical)


def found_in(queues: Iterable[Mapping[str, Any]], logical: str) -> FoundShards:
    own = []
    for queue in queues:
        name = ShardName.parse(queue["name"])
        if name is not None and name.logical == logical:
            own.append((name, queue))
    if not own:
        raise InvalidInput(
            "logical queue", f"must have queues named 'sharding: {logical} - <node> - <n>'", logical
        )
    own.sort(key=lambda found: (found[0].node, found[0].index))
    return FoundShards(
        logical=logical,
        shards=tuple(Shard(str(name), queue.get("node") or name.node) for name, queue in own),
        messages=sum(int(queue.get("messages") or 0) for _, queue in own),
        shards_per_node=min(max(name.index for name, _ in own) + 1, MAX_SHARDS),
        durable=all(bool(queue.get("durable")) for _, queue in own),
    )


def map_of_found(found: FoundShards, members: Sequence[Member], exchange: str = "") -> ShardMap:
    """A map made from what is there, for clients without a log.

    Two clients that look at different moments may make different maps, which the log would rule
    out; keys then go to different shards until both have looked again.
    """
    return ShardMap(
        logical=found.logical,
        epoch=1,
        shards=found.shards,
        nodes=tuple(member.node for member in members),
        policy=found.policy(),
        exchange=exchange,
    )
