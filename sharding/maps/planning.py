"""Which shards a logical queue should have, and the map that says so: pure decisions.

The rules are the plugin's, with the map made explicit:

* every member node has shards 0 to shards-per-node − 1;
* a shard once made stays, also when shards-per-node is lowered: its messages are not lost;
* a node that is down keeps its shards; only a node that left the cluster loses them;
* under `on_unavailable: move` the shards of a node that is down are marked away;
* a node in maintenance mode runs, but lets no client in: here it counts as one that is down. Where
  nobody can tell, what the map says of its shards stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sharding.maps.naming import ShardName
from sharding.maps.policy import OnUnavailable, Policy
from sharding.maps.shard_map import Node, Shard, ShardMap


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the cluster. One that is down is a member still; one that left is not."""

    node: Node
    running: bool
    drained: bool | None = False
    """In maintenance mode: it has closed its listeners and all connections of clients. None where
    that is not known: the management API of 3.10 does not tell."""

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def serves(self) -> bool:
        """Whether clients can work with its shards, as far as is known."""
        return self.running and not self.drained


def wanted_shards(
    logical: str, policy: Policy, members: Sequence[Member], existing: Sequence[Shard]
) -> list[Shard]:
    """The shards that there should be, in order; a new one is wanted on the node in its name."""
    here = {member.name for member in members}
    kept = {shard.name: shard for shard in existing if shard.node in here}
    for member in members:
        for index in range(policy.shards_per_node):
            name = str(ShardName(logical, member.name, index))
            if name not in kept and member.serves:
                kept[name] = Shard(name, member.name)
    return [kept[name] for name in sorted(kept, key=_by_node_and_index)]


def next_map(
    logical: str,
    policy: Policy,
    members: Sequence[Member],
    shards: Sequence[Shard],
    tokens: Mapping[str, str],
    current: ShardMap | None,
    exchange: str,
) -> ShardMap | None:
    """The map of these shards; None if there is nothing to say that the current one does not."""
    serving = {member.name for member in members if member.serves}
    unknown = {member.name for member in members if member.running and member.drained is None}
    away = {shard.name for shard in (current.shards if current else ()) if not shard.available}
    moves = policy.on_unavailable is OnUnavailable.MOVE

    def is_available(shard: Shard) -> bool:
        if shard.node in unknown and shard.name in away:
            return not moves
        return not moves or shard.node in serving

    placed = tuple(replace(shard, available=is_available(shard)) for shard in shards)
    if not any(shard.available for shard in placed):
        return None  # there is nowhere to move the keys to
    known = {node.name: node for node in (current.nodes if current else ())}
    proposed = ShardMap(
        logical=logical,
        epoch=current.epoch if current else 1,
        shards=placed,
        nodes=tuple(_node(member, known.get(member.name), tokens) for member in members),
        policy=policy,
        exchange=exchange,
    )
    return None if proposed == current else proposed


def _node(member: Member, known: Node | None, tokens: Mapping[str, str]) -> Node:
    """A node that is down tells neither its listeners nor its token: keep what was known."""
    return Node(
        member.name,
        member.node.addresses or (known.addresses if known else ()),
        tokens.get(member.name)
        or member.node.reply_token
        or (known.reply_token if known else None),
    )


def _by_node_and_index(name: str) -> tuple[str, int, str]:
    parsed = ShardName.parse(name)
    return (parsed.node, parsed.index, "") if parsed else ("", 0, name)
