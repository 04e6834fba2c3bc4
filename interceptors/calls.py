"""The intercepted calls: what each means for a logical name, written once for all channels.

A call is a coroutine that decides by `method_rules`, and waits and sends through a port. pika's
blocking channel, pika's callbacks and aio-pika differ in just that: how one waits (`call_order` for
pika's two, asyncio for aio-pika), and how a method of the wrapped channel is called. Publishing is
not here: it is each channel's own, for speed, over the same rules.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn, Protocol, TypeVar

from interceptors import method_rules
from interceptors.method_rules import EveryShard, Placement, Returns, Stray
from sharding.amqp.connected_node import node_with_token
from sharding.amqp.session import ACCESS_REFUSED, Refused
from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput, ShardUnavailable, Unreachable, WarrenError
from sharding.maps.consumer_spread import Looks, better_shard
from sharding.maps.shard_map import ShardMap
from sharding.publishing.unrouted import bring_unrouted

logger = logging.getLogger("warren.channel")

T = TypeVar("T")
OnShard = Callable[[str], Awaitable[T]]
"""A method of the wrapped channel, to be called for one shard or exchange."""

_LOOK_AGAIN = 1.0
_random = random.Random()  # its own, so that nobody else's sequence of numbers changes


class Waits(Protocol):
    """How a coroutine waits on one kind of channel."""

    async def wait(self, future: Future[T]) -> T:
        """The answer of the topology."""


class Background(Waits, Protocol):
    """How what goes on after a call waits."""

    async def sleep(self, seconds: float) -> None: ...


class Port(Waits, Protocol):
    """What a call needs of the channel it is made on."""

    async def refuse(self, text: str) -> NoReturn:
        """Have the broker close the channel with a genuine 406, for the reason `text`."""

    async def routed(self, exchange: str) -> None:
        """Return when the broker has routed all that was published to the exchange here."""

    async def connection(self) -> tuple[object, tuple[str, int] | None]:
        """The connection that the channel is on by now, and the address at its other end."""

    async def reply_to(self) -> str | None:
        """What the connected node writes into a reply-to, asked on a channel of its own."""


class Calls:
    """The intercepted calls of one channel."""

    def __init__(
        self, port: Port, topology: Topology, placement: Placement | str, node: str | None
    ) -> None:
        self.port = port
        self._topology = topology
        self._placement = Placement(placement)
        self._node = node
        self._found: tuple[object, str] | None = None

    async def shard_map(self, name: str | None) -> ShardMap | None:
        """The map of a logical name; None if it is not sharded."""
        if not name:
            return None
        topology = self._topology
        if not topology.is_ready:
            await self.port.wait(topology.futures.ready(topology.options.start_timeout))
        return topology.shard_map(name)

    async def here(self) -> str:
        """The node that the connection is on; a robust one may be on another after a while."""
        if self._node is not None:
            return self._node
        connection, peer = await self.port.connection()
        if self._found is None or self._found[0] is not connection:
            self._found = (connection, await self._node_of(peer))
        return self._found[1]

    async def _node_of(self, peer: tuple[str, int] | None) -> str:
        nodes = self._topology.nodes()
        node = await self.port.wait(self._topology.futures.node_at(peer, nodes))
        if node is None:
            reply_to = await self.port.reply_to()
            if reply_to is None:
                raise Unreachable("the broker did not say which node it is; give node=…")
            node = node_with_token(reply_to, nodes)
        if node is None:
            raise Unreachable("the node of this connection is in no shard map; give node=…")
        return node

    async def bring(self, logical: str, *, own: bool) -> None:
        """Have all that was published before the map was known be in its shards: here, if `own`,
        and on channels of this process that are closed.

        The broker kept it. Brought before anything else is sent, a key's messages stay in order.
        """
        left = self._topology.kept.mark(logical)
        try:
            if own:
                await self.port.routed(logical)
            await self.port.wait(bring_unrouted(self._topology, logical))
        except WarrenError as error:
            has_no_right = isinstance(error, Refused) and error.code == ACCESS_REFUSED
            if has_no_right or isinstance(error, InvalidInput):
                # Not now, and not later. To publish nothing more would help nobody.
                logger.warning("what was published to %r early stays unrouted: %s", logical, error)
            else:
                raise ShardUnavailable(
                    f"messages published to {logical!r} before its shards were known are not in "
                    f"them yet, and nothing more was sent: {error}"
                ) from error
        self._topology.kept.brought(logical, left)

    # Queues

    async def queue_to_declare(self, queue: str | None) -> str | None:
        """Shard 0 of the connected node; for a name that is not sharded, the name."""
        shard_map = await self.shard_map(queue)
        if queue is None or shard_map is None:
            return queue
        shard = method_rules.first_shard(shard_map, await self.here())
        if shard is None:
            await self.port.refuse(method_rules.no_shard(queue))
        return shard

    async def refuse_if_sharded(self, verb: str, queue: str) -> None:
        if await self.shard_map(queue) is not None:
            await self.port.refuse(method_rules.refusal(verb, queue))

    async def queue_to_read(self, queue: str) -> str:
        """The shard with the fewest consumers; for a name that is not sharded, the name."""
        shard_map = await self.shard_map(queue)
        if shard_map is None:
            return queue
        shard, _ = await self._claim(shard_map)
        self._topology.claims.settle(shard)
        return shard

    async def consume(
        self, shard_map: ShardMap, consume: OnShard[T]
    ) -> tuple[T, str, Collection[str]]:
        """Consume from the least used shard: the answer, the shard, and all it was chosen of."""
        shard, shards = await self._claim(shard_map)
        try:
            # Counted by the broker when it answers; only then is the next consumer's count right.
            return await consume(shard), shard, shards
        finally:
            self._topology.claims.settle(shard)

    async def instead_of(self, shard: str, logical: str) -> str | None:
        """Where a consumer goes whose shard has left the map; None if it has not, or nowhere."""
        shard_map = await self.shard_map(logical)
        if shard_map is None or shard in shards_of(self._topology, logical):
            return None
        _, counts = await self._counts(shard_map)
        other = self._topology.claims.choose(counts)
        if other is not None:
            self._topology.claims.settle(other)
        return other

    async def _claim(self, shard_map: ShardMap) -> tuple[str, list[str]]:
        """The shard with the fewest consumers, claimed, and all that may be consumed from."""
        shards, counts = await self._counts(shard_map)
        if not counts:  # none on this node, or each of them was deleted by somebody
            await self.port.refuse(method_rules.no_shard(shard_map.logical))
        shard = self._topology.claims.choose(counts)
        if shard is None:
            where = "any node" if self._placement is Placement.ANY else await self.here()
            raise ShardUnavailable(
                f"no shard of {shard_map.logical!r} on {where} answered; try again when one is back"
            )
        return shard, shards

    async def _counts(self, shard_map: ShardMap) -> tuple[list[str], dict[str, int | None]]:
        """The shards that may be consumed from here, and how many consumers each has."""
        here = None if self._placement is Placement.ANY else await self.here()
        shards = method_rules.candidates(shard_map, here, self._placement)
        counting = self._topology.futures.consumer_counts
        return shards, await self.port.wait(counting(shards)) if shards else {}

    # Exchanges

    async def declare_exchange(
        self,
        exchange: str,
        arguments: Mapping[str, Any] | None,
        passive: bool,
        durable: bool,
        declare: OnShard[T],
    ) -> T:
        """Make the shards that an exchange of the plugin's type asks for.

        First of all the broker is asked whether what there is fits the declaration: it objects
        before anything is changed. What is not there is not made so: see `make_again`.
        """
        known = await self.shard_map(exchange)
        if passive:
            return await declare(exchange if known is None else known.exchange)
        policy = method_rules.policy_of_arguments(exchange, arguments, durable)
        if policy is None and self._topology.policy_for(exchange) is None:
            raise method_rules.need_policy(exchange)
        is_there = known is not None and await self._has_exchange(known)
        declared = await declare(known.exchange) if known is not None and is_there else None
        if policy is not None:
            await self.port.wait(self._topology.futures.set_policy(policy))
        shard_map = await self._ensure(exchange)
        return await declare(shard_map.exchange) if declared is None else declared

    async def make_again(self, shard_map: ShardMap) -> None:
        """Have the manager make an exchange of ours that somebody deleted, before it is declared.

        One that is merely declared leads to no shard: what is published to it is confirmed, and
        kept as if a stranger had sent it.
        """
        if not await self._has_exchange(shard_map):
            await self._ensure(shard_map.logical, only_sharded=True)

    async def _ensure(self, logical: str, *, only_sharded: bool = False) -> ShardMap:
        ensuring = self._topology.futures.ensure(logical, only_sharded=only_sharded)
        ensured = await self.port.wait(ensuring)
        if ensured.made_again:
            await self.port.wait(bring_unrouted(self._topology, logical))
        return ensured.shard_map

    async def _has_exchange(self, shard_map: ShardMap) -> bool:
        return await self.port.wait(self._topology.futures.has_exchange(shard_map.exchange))

    async def delete_exchange(self, exchange: str, if_unused: bool, delete: OnShard[T]) -> T:
        """Stop sharding a name. Its shards stay, with what is in them, and so does what leads to
        them: see the manager."""
        shard_map = await self.shard_map(exchange)
        if shard_map is None:
            return await delete(exchange)
        # Nobody shall publish to what is about to go; but the broker may refuse to delete what is
        # in use, and then the name has to stay sharded.
        if not if_unused:
            await self.port.wait(self._topology.futures.forget(exchange))
        answer = await delete(shard_map.exchange)
        if if_unused:
            await self.port.wait(self._topology.futures.forget(exchange))
        return answer


# What goes on after a call


class Movable(Protocol):
    """A consumer that may be moved to another shard."""

    @property
    def shard(self) -> str: ...

    def is_alive(self) -> bool: ...

    async def move(self, target: str) -> None: ...


async def settle(
    waits: Background, topology: Topology, consumer: Movable, shards: Collection[str]
) -> None:
    """Look after a new consumer for a while: a herd that chose the same shard spreads out."""
    looks = Looks()
    while (pause := looks.pause(_random.random())) is not None:
        await waits.sleep(pause)
        if not consumer.is_alive():
            return
        counts = await waits.wait(topology.futures.consumer_counts(shards))
        target = better_shard(consumer.shard, counts, _random.random)
        if target is not None and consumer.is_alive():
            logger.info("moving a consumer from %r to %r, which has fewer", consumer.shard, target)
            await consumer.move(target)
        looks.seen(counts, moved=target is not None)


def new_tag() -> str:
    """A consumer tag that nobody else has."""
    return f"ctag-{uuid.uuid4().hex}"


class Everywhere(Protocol):
    """The channel on which every shard is to be consumed."""

    def is_open(self) -> bool: ...

    async def consume(self, shard: str, tag: str) -> None: ...

    async def changed(self) -> None:
        """Wait until the maps have changed, a consumer was lost, or the channel has closed."""


async def consume_missing(
    waits: Waits, topology: Topology, logical: str, wish: EveryShard, channel: Everywhere
) -> bool:
    """Consume the shards that have no consumer yet; whether none is left.

    A shard that does not answer is left out: to consume it would close the channel, and all the
    other consumers with it.
    """
    shards = shards_of(topology, logical)
    missing = wish.missing(shards)
    if not missing:
        return True
    counts = await waits.wait(topology.futures.consumer_counts(missing))
    for shard in missing:
        is_wanted = shard in wish.missing(shards)  # still, after the waiting
        if is_wanted and counts.get(shard) is not None and channel.is_open():
            await channel.consume(shard, wish.tags[shard])
            wish.placed(shard)
    return not wish.missing(shards)


async def keep_consuming(
    waits: Background, topology: Topology, logical: str, wish: EveryShard, channel: Everywhere
) -> None:
    """Keep a consumer on every shard, whatever comes and goes, as long as one is wanted."""
    said = ""
    while channel.is_open() and not wish.is_over:
        try:
            complete = await consume_missing(waits, topology, logical, wish, channel)
        except WarrenError as error:
            complete = False
            if said != str(error):
                said = str(error)
                logger.warning("can't look for shards of %r: %s", logical, error)
        if complete:
            await channel.changed()
        else:
            await waits.sleep(_LOOK_AGAIN)


def shards_of(topology: Topology, logical: str) -> list[str]:
    shard_map = topology.shard_map(logical)
    return [shard.name for shard in shard_map.shards] if shard_map else []


async def send_again(
    waits: Waits,
    topology: Topology,
    returns: Returns,
    strays: list[Stray],
    publish: Callable[[ShardMap, str, Stray], None],
) -> None:
    """Messages came back unasked: what belongs elsewhere by now is sent there, once."""
    try:
        await waits.wait(topology.futures.refresh())
    except WarrenError as error:
        logger.warning("the map log could not be read: %s", error)
    waiting, strays[:] = list(strays), []
    for stray in waiting:
        shard_map: ShardMap | None = None
        with suppress(WarrenError):  # the maps are stale
            shard_map = topology.shard_map(stray.logical)
        shard: str | None = None
        if shard_map is not None:
            shard = returns.new_shard(shard_map, stray.routing_key, stray.body)
        if shard_map is not None and shard is not None:
            publish(shard_map, shard, stray)
            continue
        logger.error("%s", method_rules.unstored(stray.logical, stray.routing_key))
        if shard_map is not None:
            topology.suspect(shard_map.shard_of(stray.routing_key).name)
