"""What each intercepted call becomes: the decisions that all channel kinds share, without I/O.

`INTERCEPTED` says which method does what with a logical name, as the plugin's `applies_to` does. A
name that has no shard map passes through untouched, and so does every call that is not in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sharding import Policy, ShardMap, ShardName, ShardUnavailable
from sharding.errors import InvalidInput
from sharding.maps.shard_map import Shard

EXCHANGE_TYPE = "x-modulus-hash"
SHARDS_ARGUMENT = "x-shards-per-node"
PRECONDITION_FAILED = 406
# A delivery tag that no channel reaches. To acknowledge it makes the broker close the channel with
# a genuine 406; a made-up Channel.Close would break the connection instead (measured).
NO_SUCH_DELIVERY = 2**62


_FEWEST = "a shard of the connected node, the one with the fewest consumers"
_REFUSED = "refused: the channel closes with 406"
INTERCEPTED: Mapping[str, str] = {
    "basic_publish": "the shard of the routing key",
    "basic_consume": _FEWEST,
    "basic_get": _FEWEST,
    "consume": _FEWEST,
    "queue_declare": "shard 0 of the connected node",
    "queue_bind": _REFUSED,
    "queue_unbind": _REFUSED,
    "queue_purge": _REFUSED,
    "queue_delete": _REFUSED,
    "exchange_declare": "with x-modulus-hash: shards are made, as the policy says",
    "exchange_delete": "sharding stops; the queues stay",
}
"""What becomes of a call that names a logical queue. aio-pika has other names for some of them."""
PASSED_THROUGH: Mapping[str, str] = {
    "exchange_bind": "it is between exchanges, and that of a logical queue is a real one",
    "exchange_unbind": "as exchange_bind",
}
"""Calls that name a queue or an exchange and stay the wrapped channel's own, and why."""


class Placement(StrEnum):
    """Which shards a consumer may get."""

    LOCAL = "local"
    """Those of the connected node, as with the plugin."""
    PREFER_LOCAL = "prefer-local"
    """Those of the connected node; others if it has none."""
    ANY = "any"
    """All of them."""


def refusal(verb: str, logical: str) -> str:
    """The plugin's text for a call that makes no sense on a sharded queue."""
    return f"PRECONDITION_FAILED - Can't {verb} sharded queue: {erlang_binary(logical)}"


def no_shard(logical: str) -> str:
    """The plugin's text where the connected node has no shard."""
    return f"PRECONDITION_FAILED - Error finding sharded queue for: {erlang_binary(logical)}"


def erlang_binary(text: str) -> str:
    """Text as Erlang prints a binary: quoted if it is printable Latin-1, else byte by byte."""
    if all(" " <= character <= "~" for character in text):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'<<"{escaped}">>'
    return "<<" + ",".join(str(byte) for byte in text.encode()) + ">>"


def candidates(shard_map: ShardMap, node: str | None, placement: Placement) -> list[str]:
    """The shards that a consumer may get, in the order of their index."""
    local = [shard for shard in shard_map.shards if shard.node == node]
    everywhere = placement is Placement.ANY or (placement is Placement.PREFER_LOCAL and not local)
    chosen = shard_map.shards if everywhere else local
    return [shard.name for shard in sorted(chosen, key=_index)]


def first_shard(shard_map: ShardMap, node: str | None) -> str | None:
    """What a declaration of the logical queue means: shard 0 of the connected node."""
    return next(iter(candidates(shard_map, node, Placement.LOCAL)), None)


def check_key(shard_map: ShardMap, routing_key: str) -> None:
    """Refuse a key that is a shard's name: shards are bound by name, so it would go twice."""
    if routing_key.startswith("sharding: ") and any(
        shard.name == routing_key for shard in shard_map.shards
    ):
        raise InvalidInput("routing_key", "must not be the name of a shard", routing_key)


def check_available(shard_map: ShardMap, shard: Shard, unavailable: bool) -> None:
    """Refuse a key whose shard is away: it is never sent to another one instead."""
    if unavailable:
        raise ShardUnavailable(
            f"the key belongs to {shard.name!r} on {shard.node}, which is away; try again later, "
            f"or set on_unavailable to 'move' in the policy {shard_map.policy.name!r}"
        )


def policy_of_arguments(
    logical: str, arguments: Mapping[str, Any] | None, durable: bool
) -> Policy | None:
    """The policy that the arguments of an exchange declaration ask for."""
    if not arguments or SHARDS_ARGUMENT not in arguments:
        return None
    shards = arguments[SHARDS_ARGUMENT]
    return Policy.exactly(logical, shards, name=f"exchange {logical}", durable=durable)


def need_policy(logical: str) -> InvalidInput:
    return InvalidInput(
        "exchange",
        f"must match a policy ('warren policy set') or have the argument {SHARDS_ARGUMENT}",
        logical,
    )


class AskedReturns:
    """Which published messages the application asked to have returned.

    Warren sets `mandatory` on every message, so a return has to be told apart by what it holds.
    Bounded: only the newest are remembered.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._asked: OrderedDict[tuple[str, str, int], int] = OrderedDict()

    def note(self, exchange: str, routing_key: str, body: bytes) -> None:
        key = (exchange, routing_key, hash(body))
        self._asked[key] = self._asked.pop(key, 0) + 1
        if len(self._asked) > self._limit:
            self._asked.popitem(last=False)

    def take(self, exchange: str, routing_key: str, body: bytes) -> bool:
        key = (exchange, routing_key, hash(body))
        count = self._asked.pop(key, 0)
        if count > 1:
            self._asked[key] = count - 1
        return count > 0


def _index(shard: Shard) -> tuple[int, str]:
    name = ShardName.parse(shard.name)
    return (name.index if name else 0, shard.name)
