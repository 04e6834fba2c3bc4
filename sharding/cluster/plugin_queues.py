"""Shards that are in the broker already, read from the management API: the plugin's, or our own.

Their names say what they are (`ShardName`), so a running system of the plugin can be taken over
with its queues and their messages, and a client that may not use the map log can still route. Where
the log was lost, what is bound says which names were sharded, and by which shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sharding.cluster.management import ClusterView
from sharding.errors import InvalidInput
from sharding.maps.naming import SHARDS_KEY, ShardName, shards_exchange
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
    queue_arguments: Mapping[str, Any] = field(default_factory=dict)

    def policy(self) -> Policy:
        """The policy that would have made them, under the name that `warren policy set` uses."""
        exact = Policy.exactly(
            self.logical, self.shards_per_node, name=self.logical, durable=self.durable
        )
        return replace(exact, queue_arguments=self.queue_arguments)


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


@dataclass(frozen=True, slots=True)
class Sharded:
    """What the queues and bindings of a virtual host say of the names that are sharded there."""

    found: tuple[FoundShards, ...]
    left: Mapping[str, str]
    """Names that have queues like shards and are not taken for sharded, and why."""


def sharded_names(
    queues: Sequence[Mapping[str, Any]], bindings: Iterable[Mapping[str, Any]]
) -> Sharded:
    """Pure: from what the management API says.

    A name is sharded if an exchange leads to its shards; these are the queues that are bound under
    their own names. A queue that no map has had any more may be bound still, and is taken in.
    """
    bound: set[tuple[str, str, str]] = {
        (str(each["source"]), str(each["destination"]), str(each["routing_key"]))
        for each in bindings
    }
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for queue in queues:
        if (name := ShardName.parse(queue["name"])) is not None:
            by_name.setdefault(name.logical, []).append(queue)
    found, left = [], {}
    for logical, own in sorted(by_name.items()):
        behind = shards_exchange(logical)
        taken = [each for each in own if (behind, each["name"], each["name"]) in bound]
        if not any((name, behind, SHARDS_KEY) in bound for name in (logical, f"warren: {logical}")):
            left[logical] = "no exchange leads to its shards"
        elif not taken:
            left[logical] = f"none of its queues is bound to {behind!r}"
        else:
            found.append(replace(found_in(taken, logical), queue_arguments=_arguments(taken)))
    return Sharded(tuple(found), left)


def _arguments(queues: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments that all of these queues have."""
    first, *others = [dict(queue.get("arguments") or {}) for queue in queues]
    same = {key: value for key, value in first.items() if all(o.get(key) == value for o in others)}
    if same.get("x-queue-type") == "classic":  # as it is without
        del same["x-queue-type"]
    return same
