"""`AioShardedChannel`, `AioShardedConnection`: drop-ins for aio-pika's, plain and robust.

Whatever is not in the table of `method_rules` is the wrapped channel's own. Queue and exchange
objects are in `aio_objects`, what becomes of consumers in `aio_consumers`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

import aiormq
import aiormq.abc
from aio_pika.abc import (
    AbstractChannel,
    AbstractConnection,
    AbstractRobustChannel,
    AbstractRobustConnection,
    ExchangeType,
)
from aio_pika.exceptions import ChannelInvalidStateError, ChannelPreconditionFailed
from aio_pika.tools import CallbackCollection

from interceptors import method_rules
from interceptors.aio_consumers import Consumer, Consumers
from interceptors.aio_objects import (
    AskedReturns,
    Closing,
    OneAtATime,
    OnMessage,
    Proxy,
    ShardedExchange,
    ShardedQueue,
    ShardedTransaction,
)
from interceptors.calls import Calls
from interceptors.connections import WrappedConnection
from interceptors.method_rules import Placement
from sharding.amqp.connected_node import REPLY_TO
from sharding.cluster.provisioner import net
from sharding.cluster.topology import Topology
from sharding.errors import OutcomeUnknown
from sharding.maps.shard_map import Route, ShardMap
from sharding.metrics.names import Subject
from sharding.outcomes import PUBLISHING_COUNTED

logger = logging.getLogger("warren.channel")

T = TypeVar("T")


class AioShardedChannel(Proxy):
    """An aio-pika channel for which a logical queue is one queue.

    `confirm_timeout` bounds every wait for the broker that the application gives no timeout for;
    after it the outcome is unknown. `node` says which node the connection is on where Warren can't
    find out.
    """

    __slots__ = (
        "_background",
        "_calls",
        "_confirm_timeout",
        "_connection",
        "_consumers",
        "_handed_out",
        "_message_ids",
        "_port",
        "_publishing",
        "_robust",
        "_topology",
        "_transacting",
        "_uncommitted",
        "_uninformed",
        "close_callbacks",
        "counters",
        "return_callbacks",
    )
    counted_as = Subject("channel")

    def __init__(
        self,
        channel: AbstractChannel,
        topology: Topology,
        *,
        placement: Placement | str = Placement.LOCAL,
        confirm_timeout: float = 30.0,
        node: str | None = None,
    ) -> None:
        super().__init__(channel)
        self._topology = topology
        self._confirm_timeout = confirm_timeout
        self._robust = isinstance(channel, AbstractRobustChannel)
        self._message_ids = OneAtATime()
        self._publishing = asyncio.Lock()
        self._uninformed: dict[str, set[asyncio.Future[None]]] = {}
        """Exchanges that were published to here while no map of theirs was known, and what of that
        is under way."""
        self._transacting = False
        self._uncommitted: set[str] = set()
        """Those of them that were in the transaction that goes on."""
        self._port = AioPort(channel, self._uninformed, confirm_timeout)
        self._calls = Calls(self._port, topology, placement, node)
        self._background: set[asyncio.Future[None]] = set()
        self._handed_out: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()
        # Callbacks get this channel, not the wrapped one. The wrapped one knows them weakly.
        self.close_callbacks = Closing(self, self._leave_behind)
        self.return_callbacks = AskedReturns(self)
        channel.close_callbacks.add(self.close_callbacks, weak=True)
        channel.return_callbacks.add(self.return_callbacks, weak=True)
        self._consumers = Consumers(
            channel, self._port, topology, confirm_timeout, self._calls.instead_of
        )
        self.counters: dict[str, float] = dict.fromkeys(PUBLISHING_COUNTED, 0)

    def __await__(self) -> Generator[Any, Any, AioShardedChannel]:
        yield from self._wrapped.__await__()
        return self

    async def __aenter__(self) -> AioShardedChannel:
        await self._wrapped.__aenter__()
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self.close(problem[1])

    async def close(self, exc: Any = None) -> None:
        self._consumers.end()
        closing = asyncio.ensure_future(self._wrapped.close(exc))
        try:
            await asyncio.wait({closing}, timeout=self._confirm_timeout)
        except asyncio.CancelledError:
            closing.cancel()
            raise
        if closing.done():
            closing.result()
            return
        # aiormq gives up after the heartbeat's timeout.
        logger.warning("the broker did not close %r within %g s", self, self._confirm_timeout)
        self._background.add(closing)
        closing.add_done_callback(self._background.discard)

    async def _shard_map(self, logical: str) -> ShardMap | None:
        return await self._calls.shard_map(logical)

    async def _map_to_publish_by(self, logical: str) -> ShardMap | None:
        shard_map = await self._shard_map(logical)
        if shard_map is not None and "table" not in vars(shard_map):
            # Built once for each map, which takes about 0.1 s: not on the loop.
            await asyncio.to_thread(getattr, shard_map, "table")
        return shard_map

    async def _map_in_turn(
        self, logical: str, message_id: str | None, timeout: float | None
    ) -> ShardMap | None:
        """The map to publish by, to each caller in the order of their calls: while one waits, no
        later message of the same key may overtake. With a map the message has entered."""
        async with self._publishing:
            shard_map = await self._map_to_publish_by(logical)
            if shard_map is None or logical in self._uncommitted:
                return None
            own = logical in self._uninformed
            if own or self._topology.kept.mark(logical) is not None:
                await self._calls.bring(logical, own=own)
                self._uninformed.pop(logical, None)
            if message_id:
                async with self._deadline(timeout):
                    await self._message_ids.enter(message_id)
            return shard_map

    def _leave_behind(self) -> None:
        self._topology.kept.leave(self._uninformed)

    @asynccontextmanager
    async def _without_map(self, exchange: str) -> AsyncIterator[None]:
        """Publish in this block where no map is known: what the broker may keep is brought later.

        Entered before anything is awaited, so that no later message of the same key overtakes.
        """
        if self._transacting:  # kept when it is committed, and all that is behind it too
            self._uncommitted.add(exchange)
        under_way = self._uninformed.setdefault(exchange, set())
        done = asyncio.get_running_loop().create_future()
        under_way.add(done)
        try:
            yield
        finally:
            under_way.discard(done)
            done.set_result(None)

    def transaction(self) -> Any:
        self._wrapped.transaction()  # raises where it is not possible
        return ShardedTransaction(self._wrapped, self._begin_transaction, self._uncommitted.clear)

    def _begin_transaction(self) -> None:
        self._transacting = True

    def explain(self, queue: str, key: str) -> Route | None:
        """Slot, shard, node and epoch of a key; None if the name is not sharded."""
        shard_map = self._topology.shard_map(queue)
        return None if shard_map is None else shard_map.route(key)

    def _stand_in(
        self, kind: type[ShardedQueue | ShardedExchange], name: str, wrapped: Any, **options: Any
    ) -> Any:
        """Our object for one of aio-pika's; the same again for the same one, which a robust channel
        hands out again to whoever asks for its name."""
        known = name, id(wrapped)  # whose id is its own for as long as ours lives, and holds it
        made = self._handed_out.get(known)
        if made is None:
            made = self._handed_out[known] = kind(self, name, wrapped, **options)
        return made

    def _deadline(self, timeout: float | None) -> AbstractAsyncContextManager[None]:
        return deadline(timeout, self._confirm_timeout)

    # Queues

    async def declare_queue(
        self,
        name: str | None = None,
        *,
        durable: bool = False,
        exclusive: bool = False,
        passive: bool = False,
        auto_delete: bool = False,
        arguments: Any = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Any:
        flags = {
            "durable": durable,
            "exclusive": exclusive,
            "passive": passive,
            "auto_delete": auto_delete,
            "arguments": arguments,
        }
        shard_map = await self._shard_map(name) if name else None
        if name is None or shard_map is None:
            queue = await self._wrapped.declare_queue(name, **flags, timeout=timeout, **options)
            return self._stand_in(ShardedQueue, name, queue) if name else queue
        kept = self._robust and options.get("robust", True)
        if self._robust:
            # aio-pika would declare the shard again at a reconnect, whatever node that leads to.
            options["robust"] = False
        async with self._deadline(timeout):
            shard = await self._calls.queue_to_declare(name)
            queue = await self._wrapped.declare_queue(shard, **flags, **options)
        return self._stand_in(ShardedQueue, name, queue, kept=kept)

    async def get_queue(self, name: str, *, ensure: bool = True) -> Any:
        if ensure:
            return await self.declare_queue(name, passive=True)
        queue = await self._wrapped.get_queue(name, ensure=False)
        return self._stand_in(ShardedQueue, name, queue)

    async def queue_delete(
        self,
        queue_name: str,
        timeout: float | None = None,
        if_unused: bool = False,
        if_empty: bool = False,
        nowait: bool = False,
    ) -> Any:
        if await self._refuse_if_sharded("delete", queue_name, wait=not nowait):
            return None
        return await self._wrapped.queue_delete(queue_name, timeout, if_unused, if_empty, nowait)

    async def _consume_least_used(
        self,
        shard_map: ShardMap,
        wish: dict[str, Any],
        tag: str | None,
        timeout: float | None,
        *,
        kept: bool,
    ) -> str:
        """Consume from the least used shard, for the queue object of a logical name."""

        async def place(shard: str) -> Consumer:
            return await self._consumers.add(shard, wish, tag, kept, shard_map.logical)

        async with self._deadline(timeout):
            consumer, _, shards = await self._calls.consume(shard_map, place)
            self._consumers.settle(consumer, shards)
            return consumer.tag

    async def _release(self, consumer_tag: str) -> Any:
        """The queue object to cancel a consumer of a shard with; None if it is no such consumer."""
        return await self._consumers.release(consumer_tag)

    async def _queue_to_read(self, logical: str) -> Any:
        return await self._consumers.queue_of(await self._calls.queue_to_read(logical))

    async def consume_all(self, queue: str, callback: OnMessage, no_ack: bool = False) -> list[str]:
        """Consume from every shard, on whatever node, also from those that come later.

        Returns the consumer tags of the shards that there are now and that answer.
        """
        if await self._shard_map(queue) is None:
            found = await self.get_queue(queue, ensure=False)
            return [await found.consume(callback, no_ack)]
        wish = {"callback": callback, "no_ack": no_ack, "exclusive": False, "arguments": None}
        async with self._deadline(None):
            return await self._consumers.add_everywhere(queue, wish)

    # Exchanges

    async def declare_exchange(
        self,
        name: str,
        type: ExchangeType | str = ExchangeType.DIRECT,  # noqa: A002 - aio-pika's name for it
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        passive: bool = False,
        arguments: Any = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Any:
        kind = getattr(type, "value", type)
        sharded = kind == method_rules.EXCHANGE_TYPE
        flags = {
            **options,
            "type": ExchangeType.DIRECT.value if sharded else kind,
            "durable": durable,
            "auto_delete": auto_delete,
            "internal": internal,
            "passive": passive,
            "timeout": timeout,
        }

        async def declare(target: str, own: dict[str, Any] | None) -> Any:
            async with self._deadline(timeout):
                return await self._wrapped.declare_exchange(target, **flags, arguments=own)

        shard_map = await self._shard_map(name)
        if self._robust and (sharded or shard_map is not None):
            # aio-pika would make it again at a reconnect, also where it was deleted in between
            # together with all that it led to.
            flags["robust"] = False
        if sharded:
            declared = await self._calls.declare_exchange(
                name, arguments, passive, durable, lambda target: declare(target, net(name))
            )
        else:
            target = name if shard_map is None else shard_map.exchange
            if method_rules.would_make(shard_map, target, passive):
                await self._calls.make_again(shard_map)
            own = method_rules.exchange_arguments(shard_map, target, kind, arguments)
            declared = await declare(target, own)
        return self._stand_in(ShardedExchange, name, declared)

    @property
    def default_exchange(self) -> Any:
        return self._stand_in(ShardedExchange, "", self._wrapped.default_exchange)

    async def get_exchange(self, name: str, *, ensure: bool = True) -> Any:
        if ensure:
            return await self.declare_exchange(name, passive=True)
        shard_map = await self._shard_map(name)
        target = name if shard_map is None else shard_map.exchange
        return self._stand_in(ShardedExchange, name, await self._wrapped_exchange(target))

    async def exchange_delete(
        self,
        exchange_name: str,
        timeout: float | None = None,
        if_unused: bool = False,
        nowait: bool = False,
    ) -> Any:
        async def delete(name: str) -> Any:
            async with self._deadline(timeout):
                return await self._wrapped.exchange_delete(name, timeout, if_unused, nowait)

        return await self._calls.delete_exchange(exchange_name, if_unused, delete)

    async def _wrapped_exchange(self, name: str) -> Any:
        return await self._wrapped.get_exchange(name, ensure=False)

    # Refusing

    async def _refuse_if_sharded(self, verb: str, queue: str, *, wait: bool = True) -> bool:
        """Close the channel with the plugin's 406; whether the call is refused, if not waited for.

        A caller that waits for the broker's answer gets the error.
        """
        if wait:
            await self._calls.refuse_if_sharded(verb, queue)
            return False
        if await self._shard_map(queue) is None:
            return False
        await self._port.start_refusing(method_rules.refusal(verb, queue))
        return True


@asynccontextmanager
async def deadline(timeout: float | None, confirm_timeout: float) -> AsyncIterator[None]:
    """The application's timeout as aio-pika keeps it; without one, our own."""
    limit = confirm_timeout if timeout is None else timeout
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError:
        if timeout is not None:
            raise
        raise OutcomeUnknown(
            f"the broker did not answer within {limit:g} s (confirm_timeout)"
        ) from None


class AioPort:
    """What calls need of an aio-pika channel (`calls.Port`)."""

    def __init__(
        self, channel: Any, under_way: Mapping[str, set[asyncio.Future[None]]], timeout: float
    ) -> None:
        self._channel = channel
        self._under_way = under_way
        self._timeout = timeout

    async def wait(self, future: Future[T]) -> T:
        # Not `wrap_future`: who stops waiting must not stop a change that may be half-way.
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def tell(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

        future.add_done_callback(tell)
        await done.wait()
        return future.result()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def routed(self, exchange: str) -> None:
        async with deadline(None, self._timeout):
            while under_way := self._under_way.get(exchange):
                await asyncio.wait(under_way)
            if not (await self._channel.get_underlay_channel()).publisher_confirms:
                await self._channel.get_exchange(exchange, ensure=True)

    async def refuse(self, text: str) -> NoReturn:
        async with deadline(None, self._timeout):
            closing = await self.start_refusing(text)
            await asyncio.wait({closing})
        problem = None if closing.cancelled() else closing.exception()
        if isinstance(problem, Exception):
            raise problem
        # The whole connection was closed at the same moment, in order.
        raise ChannelInvalidStateError(f"{self._channel!r} closed")

    async def start_refusing(self, text: str) -> asyncio.Future[Any]:
        """The same, and do not wait until the channel is closed."""
        async with deadline(None, self._timeout):
            channel = await self._channel.get_underlay_channel()
            closing: asyncio.Future[Any] = channel.closing
            closing.add_done_callback(lambda closed: _give_reason(closed, text))
            await channel.basic_ack(method_rules.NO_SUCH_DELIVERY, wait=False)
        return closing

    async def connection(self) -> tuple[object, tuple[str, int] | None]:
        async with deadline(None, self._timeout):
            connection = (await self._channel.get_underlay_channel()).connection
            return connection, await _peer_of(connection)

    async def reply_to(self) -> str | None:
        async with deadline(None, self._timeout):
            return await _reply_to((await self._channel.get_underlay_channel()).connection)


def _give_reason(closed: asyncio.Future[Any], text: str) -> None:
    """aiormq hands the one exception to all who wait on the channel and to its callbacks."""
    problem = None if closed.cancelled() else closed.exception()
    ours = isinstance(problem, ChannelPreconditionFailed)
    if problem is not None and ours and str(method_rules.NO_SUCH_DELIVERY) in str(problem):
        problem.args = (text,)


class AioShardedConnection(WrappedConnection[AbstractConnection], Proxy):
    """An aio-pika connection, plain or robust, whose channels are `AioShardedChannel`s.

        connection = AioShardedConnection(await aio_pika.connect_robust(url), topology)
        async with connection.channel() as channel: ...

    The options are those of `AioShardedChannel`, and hold for every channel.
    """

    __slots__ = ("_options", "_topology", "close_callbacks", "reconnect_callbacks")

    def __init__(
        self,
        connection: AbstractConnection,
        topology: Topology,
        *,
        placement: Placement | str = Placement.LOCAL,
        confirm_timeout: float = 30.0,
        node: str | None = None,
    ) -> None:
        super().__init__(
            connection, topology, placement=placement, confirm_timeout=confirm_timeout, node=node
        )
        # Callbacks get this connection, not the wrapped one, which knows them weakly.
        self.close_callbacks: CallbackCollection[Any, Any] = CallbackCollection(self)
        connection.close_callbacks.add(self.close_callbacks, weak=True)
        if isinstance(connection, AbstractRobustConnection):
            self.reconnect_callbacks: CallbackCollection[Any, Any] = CallbackCollection(self)
            connection.reconnect_callbacks.add(self.reconnect_callbacks, weak=True)

    async def __aenter__(self) -> AioShardedConnection:
        await self._wrapped.__aenter__()
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self._wrapped.__aexit__(*problem)

    def channel(self, *arguments: Any, **options: Any) -> AioShardedChannel:
        """As aio-pika's: await it, or enter it."""
        inner = self._wrapped.channel(*arguments, **options)
        wrapped = AioShardedChannel(inner, self._topology, **self._options)
        wrapped._connection = self  # which keeps what was asked of it, as aio-pika's own would
        return wrapped


async def _peer_of(connection: aiormq.abc.AbstractConnection) -> tuple[str, int] | None:
    """The address that the connection's URL leads to, if it is one: aiormq shows no socket."""
    url = connection.url
    if url.host is None or url.port is None:
        return None
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = {str(entry[4][0]) for entry in found}
    return (addresses.pop(), url.port) if len(addresses) == 1 else None


async def _reply_to(connection: aiormq.abc.AbstractConnection) -> str | None:
    """What the node writes into a reply-to; asked on a channel of its own."""

    async def ignore(_: Any) -> None: ...

    # With confirms, because aiormq drops what is returned on a channel without.
    channel = await connection.channel(publisher_confirms=True, on_return_raises=False)
    try:
        await channel.basic_consume(REPLY_TO, ignore, no_ack=True)
        properties = aiormq.spec.Basic.Properties(reply_to=REPLY_TO)
        returned: Any = await channel.basic_publish(
            b"", routing_key="warren.nobody", properties=properties, mandatory=True
        )
    finally:
        await channel.close()
    reply_to: str | None = returned.header.properties.reply_to
    return reply_to
