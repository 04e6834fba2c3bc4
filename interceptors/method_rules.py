"""What each intercepted call becomes: the decisions that all channel kinds share, without I/O.

`INTERCEPTED` says which method does what with a logical name, as the plugin's `applies_to` does. A
name that has no shard map passes through untouched, and so does every call that is not in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any, TypeGuard

from sharding import Policy, ShardMap, ShardName, ShardUnavailable
from sharding.cluster.provisioner import net
from sharding.errors import InvalidInput
from sharding.maps.naming import SHARDS_KEY
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
    """Refuse a key that messages are led to shards by: one that has it would go twice."""
    if routing_key == SHARDS_KEY:
        raise InvalidInput("routing_key", "must not be the key that leads to shards", routing_key)
    if shard_map.leads_to_shard(routing_key):
        raise InvalidInput("routing_key", "must not be the name of a shard", routing_key)


def check_available(shard_map: ShardMap, shard: Shard, unavailable: bool) -> None:
    """Refuse a key whose shard is away: it is never sent to another one instead."""
    if unavailable:
        raise ShardUnavailable(
            f"the key belongs to {shard.name!r} on {shard.node}, which is away; try again later, "
            f"or set on_unavailable to 'move' in the policy {shard_map.policy.name!r}"
        )


def unbound(shard: str, logical: str) -> ShardUnavailable:
    """What is raised where no shard took a message, and nothing more can be done."""
    return ShardUnavailable(
        f"{shard!r} is not bound to the exchange {logical!r}, nothing was stored; "
        "'warren shards ensure' makes it again"
    )


def policy_of_arguments(
    logical: str, arguments: Mapping[str, Any] | None, durable: bool
) -> Policy | None:
    """The policy that the arguments of an exchange declaration ask for."""
    if not arguments or SHARDS_ARGUMENT not in arguments:
        return None
    shards = arguments[SHARDS_ARGUMENT]
    return Policy.exactly(logical, shards, name=f"exchange {logical}", durable=durable)


def exchange_arguments(
    shard_map: ShardMap | None, exchange: str, kind: object, arguments: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """What to declare an exchange with: one of ours has its own, which the broker compares."""
    given = None if arguments is None else dict(arguments)
    if shard_map is None or shard_map.exchange != exchange or kind != "direct":
        return given
    return {**net(shard_map.logical), **(given or {})}


def would_make(shard_map: ShardMap | None, exchange: str, passive: bool) -> TypeGuard[ShardMap]:
    """Whether a declaration would make an exchange of ours, if that is not there any more."""
    return shard_map is not None and shard_map.exchange == exchange and not passive


def need_policy(logical: str) -> InvalidInput:
    return InvalidInput(
        "exchange",
        f"must match a policy ('warren policy set') or have the argument {SHARDS_ARGUMENT}",
        logical,
    )


def as_bytes(body: bytes | str) -> bytes:
    return body.encode() if isinstance(body, str) else bytes(body)


def as_read(name: Any) -> Any:
    """A name or a key as pika reads it from the broker: text, unless that can't be.

    pika sends bytes as well; a return would not be recognised by them, nor a sharded name.
    """
    if not isinstance(name, bytes):
        return name
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name


class EveryShard:
    """A wish to consume from every shard: which one under what tag, and until when.

    A consumer that the application cancels is not replaced. When it has cancelled all there are,
    the wish is over: no shard that comes later is consumed.
    """

    def __init__(self, new_tag: Callable[[], str]) -> None:
        self._new_tag = new_tag
        self.tags: dict[str, str] = {}
        """The tag of each shard seen so far; a consumer that comes again has its tag again."""
        self._placed: set[str] = set()
        self._cancelled: set[str] = set()
        self.is_over = False

    def see(self, shards: Sequence[str]) -> None:
        """Note the shards that there are now."""
        present = {shard for shard in self.tags if shard in shards} | self._placed
        if self._cancelled and present <= self._cancelled:
            self.is_over = True
        for shard in shards:
            if shard not in self.tags:
                self.tags[shard] = self._new_tag()

    def missing(self, shards: Sequence[str]) -> list[str]:
        """Those of them that should have a consumer and have none."""
        self.see(shards)
        if self.is_over:
            return []
        return [each for each in shards if each not in self._placed | self._cancelled]

    def placed(self, shard: str) -> None:
        self._placed.add(shard)

    def lost(self, tag: str) -> bool:
        """The broker ended a consumer: its shard was deleted, or its node goes down."""
        gone = {shard for shard in self._placed if self.tags[shard] == tag}
        self._placed -= gone
        return bool(gone)

    def cancelled(self, tag: str) -> None:
        """The application ended a consumer, or never wants it."""
        self._cancelled |= {shard for shard, known in self.tags.items() if known == tag}

    @property
    def goes_on(self) -> bool:
        """Whether there are consumers, or will be: the application has not cancelled them all."""
        return not self.is_over and not (self._cancelled and self.tags.keys() <= self._cancelled)

    @property
    def consumed(self) -> list[str]:
        """The tags of the consumers that there are."""
        return [tag for shard, tag in self.tags.items() if shard in self._placed - self._cancelled]


MOST_STRAYS = 10_000


class Returned(Enum):
    """What a message is that came back, on a channel that does not confirm."""

    ASKED = auto()
    """The application wants to hear of it."""
    STRAY = auto()
    """It does not: the map may have been old, so the message is sent again if that can help."""
    UNSTORED = auto()
    """It came back a second time."""


@dataclass(frozen=True, slots=True)
class Stray:
    """A message that came back unasked, as it was returned."""

    logical: str
    routing_key: str
    properties: Any
    body: bytes


class Returns:
    """What comes back on a channel that does not confirm, and what was sent where before.

    Warren sets `mandatory` on every message, so returns have to be told apart by what they hold.
    """

    def __init__(self) -> None:
        self._asked = _Multiset()
        self._sent_again = _Multiset()
        self._used: dict[str, tuple[ShardMap, ShardMap]] = {}
        """By logical name, the newest map that was used and the one before it."""

    def used(self, shard_map: ShardMap) -> None:
        newest, _ = self._used.get(shard_map.logical, (None, None))
        if newest is not shard_map:
            self._used[shard_map.logical] = (shard_map, newest or shard_map)

    def ask(self, exchange: str, routing_key: str, body: bytes) -> None:
        """The application wants this one back if no queue takes it."""
        self._asked.add((exchange, routing_key, hash(body)))

    def map_of(self, exchange: str) -> ShardMap | None:
        """The map by which messages to the exchange were last sent; None if it is not sharded."""
        return next((used for used, _ in self._used.values() if used.exchange == exchange), None)

    def came_back(self, exchange: str, routing_key: str, body: bytes) -> Returned:
        content = (exchange, routing_key, hash(body))
        if self._asked.take(content):
            return Returned.ASKED
        return Returned.UNSTORED if self._sent_again.take(content) else Returned.STRAY

    def new_shard(self, shard_map: ShardMap, routing_key: str, body: bytes) -> str | None:
        """Where a stray belongs by the newest map; None if it was there, and nothing helps."""
        shard = shard_map.shard_of(routing_key).name
        used = self._used.get(shard_map.logical, ())
        tried = {each.shard_of(routing_key).name for each in used}
        if tried <= {shard}:
            return None
        self._sent_again.add((shard_map.exchange, routing_key, hash(body)))
        return shard


class _Multiset:
    """Counts what was added; bounded, so that only the newest are remembered."""

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._counts: OrderedDict[tuple[str, str, int], int] = OrderedDict()

    def add(self, key: tuple[str, str, int]) -> None:
        self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > self._limit:
            self._counts.popitem(last=False)

    def take(self, key: tuple[str, str, int]) -> bool:
        count = self._counts.pop(key, 0)
        if count > 1:
            self._counts[key] = count - 1
        return count > 0


def unstored(logical: str, routing_key: str) -> str:
    """What is said of a message that came back where nobody waits for its confirm."""
    return (
        f"a message with key {routing_key!r} came back: its shard is not bound to {logical!r}; it "
        "is not stored"
    )


def _index(shard: Shard) -> tuple[int, str]:
    name = ShardName.parse(shard.name)
    return (name.index if name else 0, shard.name)
