"""The consumers that a channel has on shards: placed, moved when a herd came, and kept.

A consumer keeps its tag for life, whatever becomes of its place:

* placed: on the shard with the fewest consumers when it came;
* moved: for the first seconds the counts are looked at again, and where a herd came to one shard
  some of it moves away (`maps.consumer_spread`); never an exclusive consumer;
* kept: those of a robust channel's declared queues, and those of `consume_all`, are consumed again
  on the same shard when they got lost with a connection or with the shard's node; if the shard has
  left the map for good, one of a declared queue goes where a new one would.

aio-pika itself restores nothing here. It would declare the shard first, and a shard whose node is
down would hold back all channels of a connection that found another node.

Cancelling a call that waits for an answer makes aiormq close the channel. So a move is never
cancelled: whoever ends a consumer waits for a move in progress, which has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aio_pika.abc import AbstractRobustChannel
from aio_pika.exceptions import AMQPError
from aio_pika.tools import CallbackCollection

from interceptors.calls import Background, new_tag, settle, shards_of
from interceptors.method_rules import EveryShard
from sharding.backoff import Backoff
from sharding.cluster.topology import Topology
from sharding.errors import WarrenError

logger = logging.getLogger("warren.channel")

_BACKOFF = Backoff(first=0.4, longest=5.0)
_LOOK_AGAIN = 5.0
# RuntimeError: aiormq's ChannelInvalidStateError is one. OSError: also TimeoutError.
_FAILURES = (AMQPError, OSError, RuntimeError, WarrenError)


@dataclass(eq=False)
class Consumer:
    home: Consumers
    shard: str
    wish: dict[str, Any]
    """What it was asked for with: callback, no_ack, exclusive, arguments."""
    tag: str
    kept: bool
    logical: str | None = None
    """The name whose least used shard it was to have; None if it is for this very shard."""
    ended: bool = False
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)
    settling: asyncio.Task[None] | None = None

    def is_alive(self) -> bool:
        return not self.ended

    async def move(self, target: str) -> None:
        await self.home.move(self, target)

    def settle_no_more(self) -> None:
        if self.settling is not None and not self.moving.locked():
            self.settling.cancel()


@dataclass(eq=False)
class Everywhere:
    """A wish to consume from every shard, and the consumer of each shard seen so far."""

    logical: str
    wish: dict[str, Any]
    every: EveryShard = field(default_factory=lambda: EveryShard(new_tag))
    consumers: dict[str, Consumer] = field(default_factory=dict)


class Consumers:
    """All consumers that one channel has on shards."""

    def __init__(
        self,
        channel: Any,
        waits: Background,
        topology: Topology,
        answer_timeout: float,
        instead_of: Callable[[str, str], Awaitable[str | None]],
    ) -> None:
        self._channel = channel
        self._instead_of = instead_of
        self._waits = waits
        self._topology = topology
        self._answer_timeout = answer_timeout
        self._by_tag: dict[str, Consumer] = {}
        self._everywhere: list[Everywhere] = []
        self._random = random.Random()
        self._robust = isinstance(channel, AbstractRobustChannel)
        self._looking = asyncio.Lock()
        self._wake = asyncio.Event()
        self._end = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None
        # Held here and known to the channel weakly, so that neither keeps the other alive.
        self._callbacks: list[CallbackCollection[Any, Any]] = []
        self._hear(channel.close_callbacks, self._on_close)
        if self._robust:
            self._hear(channel.reopen_callbacks, lambda *_: self._wake.set())

    def _hear(self, of: Any, callback: Callable[..., Any]) -> None:
        mine: CallbackCollection[Any, Any] = CallbackCollection(self)
        mine.add(callback)
        of.add(mine, weak=True)
        self._callbacks.append(mine)

    # Placing

    async def add(
        self, shard: str, wish: dict[str, Any], tag: str | None, kept: bool, logical: str
    ) -> Consumer:
        """A consumer on a shard of `logical`."""
        consumer = Consumer(self, shard, wish, tag or new_tag(), kept, logical)
        await self._place(consumer, shard)
        if kept:
            self._keep()
        return consumer

    async def add_everywhere(self, logical: str, wish: dict[str, Any]) -> list[str]:
        """Consume from every shard, also from those that come later, or come back."""
        if self._unsubscribe is None:
            loop = asyncio.get_running_loop()

            def on_change(*_: Any) -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._wake.set)

            self._unsubscribe = self._topology.subscribe(on_change)
        new = Everywhere(logical, wish)
        self._everywhere.append(new)
        try:
            await self._look_after()
        except BaseException:  # who called does not know its tags, and may call again
            self._everywhere.remove(new)
            for consumer in new.consumers.values():
                consumer.ended = True
            raise
        self._keep()
        return [each.tag for each in new.consumers.values() if each.tag in self._by_tag]

    async def queue_of(self, shard: str) -> Any:
        """aio-pika's object for a shard. Not declared: the manager does that."""
        return await self._channel.get_queue(shard, ensure=False)

    async def _place(self, consumer: Consumer, shard: str) -> None:
        """It belongs where it was until the broker has said yes: there it is restored."""
        queue = await self.queue_of(shard)
        await queue.consume(consumer_tag=consumer.tag, **consumer.wish)
        consumer.shard = shard
        self._by_tag[consumer.tag] = consumer

    async def release(self, tag: str) -> Any:
        """Forget a consumer that is to be cancelled; the queue object to cancel it with, if any."""
        for each in self._everywhere:
            each.every.cancelled(tag)
            for one in each.consumers.values():
                one.ended = one.ended or one.tag == tag
        consumer = self._by_tag.pop(tag, None)
        if consumer is None:
            return None
        consumer.ended = True
        consumer.settle_no_more()
        async with consumer.moving:
            return await self.queue_of(consumer.shard)

    # Moving

    def settle(self, consumer: Consumer, shards: Collection[str]) -> None:
        """Look after a new consumer, which may move to one of these shards."""
        if not consumer.wish["exclusive"] and len(shards) > 1:
            consumer.settling = asyncio.create_task(self._settle(consumer, shards))

    async def _settle(self, consumer: Consumer, shards: Collection[str]) -> None:
        try:
            await settle(self._waits, self._topology, consumer, shards)
        except _FAILURES as error:
            logger.debug("a consumer stays on %r: %s", consumer.shard, error)

    async def move(self, consumer: Consumer, target: str) -> None:
        async with consumer.moving:
            if consumer.ended or not await self._is_consuming(consumer):
                return
            queue = await self.queue_of(consumer.shard)
            async with asyncio.timeout(self._answer_timeout):
                # What is delivered until the broker says cancel-ok still reaches the callback.
                await queue.cancel(consumer.tag)
                await self._place(consumer, target)

    async def _is_consuming(self, consumer: Consumer) -> bool:
        if self._channel.is_closed:
            return False
        async with asyncio.timeout(self._answer_timeout):
            return consumer.tag in (await self._channel.get_underlay_channel()).consumers

    # Keeping

    def _keep(self) -> None:
        if self._end.is_set():  # the channel was closed, and has been opened again
            self._end = asyncio.Event()
            self._keeper = None
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._run(self._end))

    async def _run(self, end: asyncio.Event) -> None:
        failures = 0
        while not (end.is_set() or self._is_over()):
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN):
                    await self._wake.wait()
            self._wake.clear()
            if await self._restored():
                failures = 0
            else:
                failures += 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(_BACKOFF.pause(failures, self._random.random())):
                        await end.wait()
                self._wake.set()
        if end is self._end:
            self.end()

    async def _restored(self) -> bool:
        try:
            await self._look_after()
        except _FAILURES as error:
            logger.debug("consumers could not be restored yet: %s", error)
            return False
        except asyncio.CancelledError:
            # aiormq rejects with it what waits on a connection that closes; then we are not meant.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return False
        return True

    async def _look_after(self) -> None:
        """Place every consumer that should be there and is not, where its shard answers."""
        async with self._looking:
            if self._channel.is_closed:
                return
            self._add_new_shards()
            wanted = set(self._by_tag.values())
            for each in self._everywhere:
                wanted.update(each.consumers.values())
            missing = [
                consumer
                for consumer in wanted
                if consumer.kept and not consumer.ended and not await self._is_consuming(consumer)
            ]
            if not missing:
                return
            shards = {consumer.shard for consumer in missing}
            counts = await self._waits.wait(self._topology.futures.consumer_counts(shards))
            for consumer in missing:
                async with consumer.moving:
                    answers = counts.get(consumer.shard) is not None
                    shard = consumer.shard if answers else await self._another_for(consumer)
                    if shard and not consumer.ended and not await self._is_consuming(consumer):
                        async with asyncio.timeout(self._answer_timeout):
                            await self._place(consumer, shard)

    async def _another_for(self, consumer: Consumer) -> str | None:
        """Where to consume instead of a shard that does not answer; None to wait for it."""
        if consumer.logical is None:
            return None
        other = await self._instead_of(consumer.shard, consumer.logical)
        if other is not None:
            gone = consumer.shard
            logger.info("a consumer goes from %r, which has left the map, to %r", gone, other)
        return other

    def _add_new_shards(self) -> None:
        for each in self._everywhere:
            for shard in each.every.missing(shards_of(self._topology, each.logical)):
                if shard not in each.consumers:
                    tag = each.every.tags[shard]
                    each.consumers[shard] = Consumer(self, shard, each.wish, tag, kept=True)

    # Ending

    def end(self) -> None:
        """The application closes the channel: nothing is moved or restored any more."""
        self._end.set()
        self._wake.set()
        for consumer in self._by_tag.values():
            consumer.ended = True
            consumer.settle_no_more()
        self._by_tag.clear()
        for each in self._everywhere:
            for consumer in each.consumers.values():
                consumer.ended = True
        self._everywhere.clear()
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def _is_over(self) -> bool:
        if not self._robust:
            return bool(self._channel.is_closed)
        connection = self._channel._connection
        return bool(connection.is_closed or connection.close_called)

    def _on_close(self, *_: Any) -> None:
        """The channel is gone, for a while at least: what is restored stays where it was."""
        if not self._robust:
            self.end()
            return
        for tag, consumer in list(self._by_tag.items()):
            consumer.settle_no_more()
            if not consumer.kept:
                consumer.ended = True
                del self._by_tag[tag]
        self._wake.set()
