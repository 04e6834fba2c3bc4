"""`AsyncShardedChannel`: a drop-in for pika's asynchronous `Channel`, on whatever loop.

Whatever is not in the table of `method_rules` is the wrapped channel's own. How calls keep their
order and how they fail is in `callback_base`, publishing in `callback_publish`; here is the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pika import validators
from pika.channel import Channel
from pika.exceptions import DuplicateConsumerTag, DuplicateGetOkCallback
from pika.spec import Basic

from interceptors import method_rules
from interceptors.call_order import Answer, Done, Everywhere
from interceptors.callback_base import OnFrame, OnMessage
from interceptors.callback_publish import PublishingChannel
from interceptors.calls import consume_missing, keep_consuming, new_tag, settle, shards_of
from interceptors.method_rules import EveryShard, Placement
from sharding.cluster.provisioner import net
from sharding.cluster.topology import Topology
from sharding.maps.shard_map import Route

logger = logging.getLogger("warren.channel")


class AsyncShardedChannel(PublishingChannel):
    """A pika `Channel` for which a logical queue is one queue.

    `confirm_timeout` bounds Warren's own waits for the broker; the application's confirms are left
    to the application, as pika does. `node` says which node the connection is on where Warren
    can't find out. To be made and used on the connection's loop, as the channel itself.
    """

    def __init__(
        self,
        channel: Channel,
        topology: Topology,
        *,
        placement: Placement | str = Placement.LOCAL,
        confirm_timeout: float = 30.0,
        node: str | None = None,
    ) -> None:
        super().__init__(channel, topology, placement, confirm_timeout, node)
        self._coming: set[str] = set()
        self._getting = False
        self._everywhere: list[EveryShard] = []
        self._at_close.append(self._coming.clear)

    def explain(self, queue: str, key: str) -> Route | None:
        """Slot, shard, node and epoch of a key; None if the name is not sharded."""
        shard_map = self._topology.shard_map(queue)
        return None if shard_map is None else shard_map.route(key)

    @property
    def consumer_tags(self) -> list[str]:
        return [*self._channel.consumer_tags, *self._coming]

    # Consuming

    def basic_consume(
        self,
        queue: str,
        on_message_callback: OnMessage,
        auto_ack: bool = False,
        exclusive: bool = False,
        consumer_tag: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        callback: OnFrame | None = None,
    ) -> str:
        validators.require_string(queue, "queue")
        validators.require_callback(on_message_callback)
        validators.rpc_completion_callback(callback)
        self._check_open()
        tag: str = consumer_tag or self._inner._generate_consumer_tag()
        if tag in {*self.consumer_tags, *self._inner._cancelled}:
            raise DuplicateConsumerTag(tag)
        deliver = self._with_wrapper(on_message_callback)
        consume = Basic.Consume(
            queue=queue,
            consumer_tag=tag,
            no_ack=auto_ack,
            exclusive=exclusive,
            arguments=dict(arguments or {}),
        )
        self._coming.add(tag)

        async def start(through: Done) -> Any:
            shard_map = await self._calls.shard_map(queue)
            if shard_map is None:
                self._send_consume(consume, deliver, callback)
                return None

            async def on_shard(shard: str) -> Any:
                consume.queue = shard
                return await self._ask(through, self._send_consume, consume, deliver)

            frame, _, shards = await self._calls.consume(shard_map, on_shard)
            if not exclusive and len(shards) > 1:
                consumer = _Consumer(self, consume)
                settling = settle(self._steps, self._topology, consumer, shards)
                self._steps.run(settling, consumer.stays)
            return frame

        def consumed(frame: Any) -> None:
            if frame is not None and callback is not None:
                callback(frame)

        try:
            self._run(start, consumed)
        except BaseException:
            self._coming.discard(tag)
            raise
        return tag

    def _send_consume(self, consume: Any, deliver: OnMessage, callback: OnFrame | None) -> None:
        self._coming.discard(consume.consumer_tag)
        self._channel.basic_consume(
            consume.queue,
            deliver,
            consume.no_ack,
            consume.exclusive,
            consume.consumer_tag,
            consume.arguments,
            callback,
        )

    def basic_consume_all(
        self, queue: str, on_message_callback: OnMessage, auto_ack: bool = False
    ) -> list[str]:
        """Consume from every shard, on whatever node, also from those that come later.

        Returns the consumer tags of the shards there are now.
        """
        self._topology.wait_until_ready(0)
        if self._topology.shard_map(queue) is None:
            return [self.basic_consume(queue, on_message_callback, auto_ack)]
        self._check_open()
        deliver = self._with_wrapper(on_message_callback)

        def consume(shard: str, tag: str) -> None:
            self._channel.basic_consume(shard, deliver, auto_ack, consumer_tag=tag)

        wish = EveryShard(new_tag)
        everywhere = Everywhere(wish, lambda: self.is_open, consume)
        looks = (self._steps, self._topology, queue, wish, everywhere)

        def keep(_: bool) -> None:
            self._steps.run(keep_consuming(*looks), self._fail)

        wish.see(shards_of(self._topology, queue))
        self._everywhere.append(wish)
        self._channel.add_on_cancel_callback(everywhere.on_cancel)
        undo = self._topology.subscribe(lambda *_: self._steps.on_loop(everywhere.wake))
        self._at_close.append(undo)
        self._run(lambda _: consume_missing(*looks), keep)
        return [tag for shard, tag in wish.tags.items() if not self._topology.unavailable(shard)]

    def basic_cancel(self, consumer_tag: str = "", callback: OnFrame | None = None) -> None:
        def cancel() -> None:
            # When its turn comes: a consumer that is placed before it is there to be cancelled.
            for wish in self._everywhere:
                wish.cancelled(consumer_tag)
            self._channel.basic_cancel(consumer_tag, callback)

        self._in_order(cancel)

    def basic_get(self, queue: str, callback: OnMessage, auto_ack: bool = False) -> None:
        validators.require_string(queue, "queue")
        validators.require_callback(callback)
        self._check_open()
        if self._getting or self._inner._on_getok_callback is not None:
            raise DuplicateGetOkCallback
        self._getting = True

        async def get(_: Done) -> None:
            shard = await self._calls.queue_to_read(queue)
            self._getting = False
            self._channel.basic_get(shard, self._with_wrapper(callback), auto_ack)

        try:
            self._run(get)
        except BaseException:
            self._getting = False
            raise

    # Declaring

    def queue_declare(self, queue: str, *arguments: Any, **options: Any) -> None:
        self._check_open()

        async def declare(_: Done) -> None:
            name: Any = await self._calls.queue_to_declare(queue) if queue else queue
            self._channel.queue_declare(name, *arguments, **options)

        self._run(declare)

    def queue_bind(self, queue: str, *arguments: Any, **options: Any) -> None:
        self._unless_sharded("bind", queue, *arguments, **options)

    def queue_unbind(self, queue: str, *arguments: Any, **options: Any) -> None:
        self._unless_sharded("unbind", queue, *arguments, **options)

    def queue_purge(self, queue: str, *arguments: Any, **options: Any) -> None:
        self._unless_sharded("purge", queue, *arguments, **options)

    def queue_delete(self, queue: str, *arguments: Any, **options: Any) -> None:
        self._unless_sharded("delete", queue, *arguments, **options)

    def _unless_sharded(self, verb: str, queue: str, *arguments: Any, **options: Any) -> None:
        self._check_open()

        async def call(_: Done) -> None:
            await self._calls.refuse_if_sharded(verb, queue)
            getattr(self._channel, f"queue_{verb}")(queue, *arguments, **options)

        self._run(call)

    def exchange_declare(
        self,
        exchange: str,
        exchange_type: Any = "direct",
        passive: bool = False,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Mapping[str, Any] | None = None,
        callback: OnFrame | None = None,
    ) -> None:
        kind = getattr(exchange_type, "value", exchange_type)
        if kind != method_rules.EXCHANGE_TYPE:
            self._check_open()

            async def declare_as_given(_: Done) -> None:
                shard_map = await self._calls.shard_map(exchange)
                if method_rules.would_make(shard_map, exchange, passive):
                    await self._calls.make_again(shard_map)
                own = method_rules.exchange_arguments(shard_map, exchange, kind, arguments)
                flags = (passive, durable, auto_delete, internal, own, callback)
                self._channel.exchange_declare(exchange, exchange_type, *flags)

            self._run(declare_as_given)
            return
        validators.require_string(exchange, "exchange")
        validators.rpc_completion_callback(callback)
        self._check_open()

        async def declare(through: Done) -> Any:
            async def on_exchange(name: str) -> Any:
                ask = self._channel.exchange_declare
                own = net(exchange)
                return await self._ask(
                    through, ask, name, "direct", passive, durable, arguments=own
                )

            return await self._calls.declare_exchange(
                exchange, arguments, passive, durable, on_exchange
            )

        self._run(declare, callback)

    def exchange_delete(
        self,
        exchange: str | None = None,
        if_unused: bool = False,
        callback: OnFrame | None = None,
    ) -> None:
        validators.rpc_completion_callback(callback)
        self._check_open()

        async def delete(through: Done) -> Any:
            if exchange is None or await self._calls.shard_map(exchange) is None:
                self._channel.exchange_delete(exchange, if_unused, callback)
                return None

            async def on_exchange(name: str) -> Any:
                return await self._ask(through, self._channel.exchange_delete, name, if_unused)

            return await self._calls.delete_exchange(exchange, if_unused, on_exchange)

        def deleted(frame: Any) -> None:
            if frame is not None and callback is not None:
                callback(frame)

        self._run(delete, deleted)


class _Consumer:
    """A consumer that may be moved (`calls.Movable`).

    To move is to cancel and to consume again under the same tag, by the bare methods: for pika the
    consumer is there all the time, so that what is delivered until cancel-ok reaches the
    application. `basic_cancel` would drop it, and with auto_ack it would be lost.
    """

    def __init__(self, owner: AsyncShardedChannel, consume: Any) -> None:
        self._owner = owner
        self._channel = owner._inner
        self._consume = consume
        # The same tag may be used again for another consumer; the callback tells them apart.
        self._callback: Any = self._channel._consumers.get(consume.consumer_tag)

    @property
    def shard(self) -> str:
        return str(self._consume.queue)

    def is_alive(self) -> bool:
        tag = self._consume.consumer_tag
        return (
            bool(self._channel.is_open)
            and self._callback is not None
            and self._channel._consumers.get(tag) is self._callback
            and tag not in self._channel._cancelled
        )

    def stays(self, error: Exception) -> None:
        logger.debug("a consumer stays on %r: %s", self.shard, error)

    async def move(self, target: str) -> None:
        """Every call on the channel waits meanwhile: a cancel must find the consumer."""
        moved: Answer[None] = Answer()
        self._owner._run(lambda through: self._move(target, through), moved.give)
        await moved

    async def _move(self, target: str, through: Done) -> None:
        tag = self._consume.consumer_tag
        if self.is_alive():
            cancel = Basic.Cancel(consumer_tag=tag, nowait=False)
            await self._owner._ask(through, self._call, cancel, Basic.CancelOk)
        if self.is_alive():
            self._consume.queue = target
            await self._owner._ask(through, self._call, self._consume, Basic.ConsumeOk)

    def _call(self, method: Any, answer: Any, callback: OnFrame) -> None:
        self._channel._rpc(method, callback, [(answer, {"consumer_tag": method.consumer_tag})])
