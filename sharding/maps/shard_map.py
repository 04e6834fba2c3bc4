"""The shard map: an immutable snapshot of where the shards of one logical queue live.

Equal maps route equally, in every process, for ever: a route is a function of the key and the map.
Queue shards are dealt slots by their names (see `slots`), so the order of the list plays no part;
stream shards are the partitions of a super stream, and there the order *is* the routing.

A shard that is away (`available` false) keeps its place in the map but owns no slot: only the
policy `on_unavailable: move` ever writes such a map. Its keys go where they would go if it had
left, and come home with the map that says it is back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from sharding.errors import InvalidInput
from sharding.maps.json_fields import JsonObject, check_format, is_whole, parse
from sharding.maps.naming import check_logical_name, check_name, check_node_name, is_shard_of
from sharding.maps.policy import Policy
from sharding.maps.slots import MAX_SHARDS, Key, SlotTable

FORMAT = 1


class ShardKind(StrEnum):
    QUEUE = "queue"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node listens for AMQP."""

    host: str
    port: int

    def __post_init__(self) -> None:
        check_name("address.host", self.host)
        if any(map(str.isspace, self.host)):
            raise InvalidInput("address.host", "must be a host name or an IP address", self.host)
        if not is_whole(self.port) or not 1 <= self.port <= 65535:
            raise InvalidInput("address.port", "must be 1 to 65535", self.port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster and the ways to recognise a connection to it."""

    name: str
    addresses: tuple[Address, ...] = ()
    reply_token: str | None = None
    """The part of a direct reply-to address that is the same for all connections to the node."""

    def __post_init__(self) -> None:
        check_node_name(self.name)
        if self.reply_token is not None:
            check_name("node.reply_token", self.reply_token)


@dataclass(frozen=True, slots=True)
class Shard:
    """One real queue or stream behind the logical name, and the node it really lives on."""

    name: str
    node: str
    available: bool = True

    def __post_init__(self) -> None:
        check_name("shard", self.name)
        check_node_name(self.node)
        if not isinstance(self.available, bool):
            raise InvalidInput("shard.available", "must be true or false", self.available)


@dataclass(frozen=True, slots=True)
class Route:
    """Why a key goes where it goes."""

    logical: str
    epoch: int
    slot: int
    shard: str
    node: str


@dataclass(frozen=True)
class ShardMap:
    """
    >>> policy = Policy("pictures", "^images$", shards_per_node=1)
    >>> shards = [Shard(f"sharding: images - rabbit@{host} - 0", f"rabbit@{host}") for host in "ab"]
    >>> nodes = [Node("rabbit@a"), Node("rabbit@b")]
    >>> images = ShardMap("images", 1, shards=tuple(shards), nodes=tuple(nodes), policy=policy)
    >>> images.route("user-42").shard
    'sharding: images - rabbit@a - 0'
    """

    logical: str
    epoch: int
    shards: tuple[Shard, ...]
    nodes: tuple[Node, ...]
    policy: Policy
    kind: ShardKind = ShardKind.QUEUE
    exchange: str = ""
    """The direct exchange that shards are bound to by their names; the logical name if empty."""
    log: str = field(default="", compare=False)
    """The identity of the map log that it is from. Epochs of different logs can't be compared."""

    def __post_init__(self) -> None:
        check_logical_name(self.logical)
        object.__setattr__(self, "exchange", self.exchange or self.logical)
        check_name("shard_map.exchange", self.exchange)
        if not is_whole(self.epoch) or self.epoch < 1:
            raise InvalidInput("shard_map.epoch", "must be a whole number from 1", self.epoch)
        # "stream" equals ShardKind.STREAM, and equal maps must route equally.
        object.__setattr__(self, "kind", _kind(self.kind))
        _check_distinct("shard_map.shards", [shard.name for shard in self.shards])
        _check_distinct("shard_map.nodes", [node.name for node in self.nodes])
        known = {node.name for node in self.nodes}
        for shard in self.shards:
            if shard.node not in known:
                raise InvalidInput(
                    "shard_map.nodes", f"must have the node of {shard.name!r}", shard.node
                )
        if not 1 <= len(self.shards) <= MAX_SHARDS:
            raise InvalidInput(
                "shard_map.shards", f"must be 1 to {MAX_SHARDS} in number", len(self.shards)
            )
        if not any(shard.available for shard in self.shards):
            raise InvalidInput("shard_map.shards", "must have one that is available", self.shards)
        if self.kind is ShardKind.STREAM and not all(shard.available for shard in self.shards):
            raise InvalidInput(
                "shard_map.shards",
                "must all be available in a stream",
                self.shards,
            )

    @cached_property
    def table(self) -> SlotTable:
        """The slot table; its owners are positions in `shards`. Built when first asked for."""
        if self.kind is ShardKind.STREAM:
            return SlotTable.identity(len(self.shards))
        here = [index for index, shard in enumerate(self.shards) if shard.available]
        among_available = SlotTable.rendezvous([self.shards[index].name for index in here])
        return SlotTable([here[owner] for owner in among_available.owners])

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(shard.name for shard in self.shards)

    def leads_to_shard(self, key: Key) -> bool:
        """Whether a message with this key would reach a shard by it: they are bound by their names,
        those too that have left the map and are not deleted."""
        # No shard has a name that is not UTF-8.
        text = key if isinstance(key, str) else bytes(key).decode("utf-8", "replace")
        return text in self._names or is_shard_of(text, self.logical)

    def shard_of(self, key: Key) -> Shard:
        return self.shards[self.table.shard_of(key)]

    def route(self, key: Key) -> Route:
        slot = self.table.slot_of(key)
        shard = self.shards[self.table.owners[slot]]
        return Route(self.logical, self.epoch, slot, shard.name, shard.node)

    def shards_on(self, node: str) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if shard.node == node)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "logical": self.logical,
            "epoch": self.epoch,
            "kind": str(self.kind),
            "exchange": self.exchange,
            "shards": [
                {"name": shard.name, "node": shard.node, "available": shard.available}
                for shard in self.shards
            ],
            "nodes": [
                {
                    "name": node.name,
                    "addresses": [[address.host, address.port] for address in node.addresses],
                    "reply_token": node.reply_token,
                }
                for node in self.nodes
            ],
            "policy": self.policy.to_json(),
        }

    @classmethod
    def from_json(cls, value: object, where: str = "shard_map") -> ShardMap:
        fields = JsonObject(value, where)
        check_format(fields, FORMAT, where)
        shard_map = cls(
            logical=fields.text("logical"),
            epoch=fields.integer("epoch"),
            kind=_kind(fields.text("kind")),
            exchange=check_name("shard_map.exchange", fields.text("exchange")),
            shards=tuple(_shard(item, f"{where}.shards") for item in fields.array("shards")),
            nodes=tuple(_node(item, f"{where}.nodes") for item in fields.array("nodes")),
            policy=Policy.from_json(fields.mapping("policy"), f"{where}.policy"),
        )
        fields.close()
        return shard_map

    def dumps(self) -> str:
        """The map as the text of a map file."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True)

    @classmethod
    def loads(cls, text: str | bytes) -> ShardMap:
        """Read the text of a map file; raises `InvalidInput` or `UnsupportedFormat`."""
        return cls.from_json(parse(text, "shard_map"))


def _kind(value: str) -> ShardKind:
    try:
        return ShardKind(value)
    except ValueError:
        raise InvalidInput("shard_map.kind", "must be 'queue' or 'stream'", value) from None


def _shard(value: object, where: str) -> Shard:
    fields = JsonObject(value, where)
    shard = Shard(fields.text("name"), fields.text("node"), fields.flag("available"))
    fields.close()
    return shard


def _node(value: object, where: str) -> Node:
    fields = JsonObject(value, where)
    name = fields.text("name")
    addresses = tuple(_address(item, f"{where}.addresses") for item in fields.array("addresses"))
    node = Node(name, addresses, fields.text_or_null("reply_token"))
    fields.close()
    return node


def _address(value: object, where: str) -> Address:
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidInput(where, "must be [host, port]", value)
    return Address(*value)


def _check_distinct(where: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidInput(where, "must have different names", name)
        seen.add(name)
