"""`AsyncShardedChannel`: a drop-in for pika's asynchronous `Channel`, on whatever loop.

Whatever is not in the table of `rules` is the wrapped channel's own. How calls keep their order and
how they fail is in `callback_base`, publishing in `callback_publish`; here is the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pika import validators
from pika.channel import Channel
from pika.exceptions import DuplicateConsumerTag, DuplicateGetOkCallback
from pika.spec import Basic

from interceptors import rules
from interceptors.call_order import ANSWER_TIMEOUT, Done, Settling, answered, later, on_loop
from interceptors.callback_base import OnMessage
from interceptors.callback_publish import OnFrame, PublishingChannel
from interceptors.rules import Placement
from sharding.cluster.topology import Topology
from sharding.errors import ShardUnavailable
from sharding.maps.shard_map import Route, ShardMap

_LOOK_AGAIN = 1.0


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
        super().__init__(channel, topology, confirm_timeout, node)
        self._placement = Placement(placement)
        self._coming: set[str] = set()
        self._claimed: list[str] = []
        self._getting = False
        self._at_close.append(self._give_up_claims)

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
        try:
            self._order.run(lambda done: self._start_consuming(consume, deliver, callback, done))
        except BaseException:
            self._coming.discard(tag)
            raise
        return tag

    def _start_consuming(
        self, consume: Any, deliver: OnMessage, callback: OnFrame | None, done: Done
    ) -> None:
        logical = consume.queue
        shard_map = self._map(logical)
        if shard_map is None:
            self._send_consume(consume, deliver, callback)
            done()
            return

        def chosen(shard: str, shards: list[str]) -> None:
            consume.queue = shard
            self._claimed.append(shard)

            # A node that hangs never answers; the calls behind this one then go on without it.
            go_on = answered(self._channel.connection, ANSWER_TIMEOUT, None, lambda _: done())

            # Counted by the broker from now on; only then is the next consumer's count right.
            def consumed(frame: Any) -> None:
                self._claimed.remove(shard)
                self._topology.claims.settle(shard)
                if not consume.exclusive and len(shards) > 1:
                    channel, topology, order = self._channel, self._topology, self._order
                    Settling(channel, topology, order, consume, shards).look_later()
                go_on(frame)
                if callback is not None:
                    callback(frame)

            self._send_consume(consume, deliver, consumed)

        self._choose(logical, shard_map, chosen)

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
        consumed: dict[str, str] = {}

        looking = False

        def consume_missing(counts: Mapping[str, int | None] | None = None) -> None:
            shard_map = self._topology.shard_map(queue)
            for shard in shard_map.shards if shard_map and self.is_open else ():
                if shard.name in consumed:
                    continue
                silent = counts is not None and counts.get(shard.name) is None
                # To consume a shard that is away would close the channel, with all consumers.
                if silent or self._topology.unavailable(shard.name):
                    look_later()
                    continue
                tag = consumed[shard.name] = self._inner._generate_consumer_tag()
                self._in_order(
                    self._channel.basic_consume, shard.name, deliver, auto_ack, consumer_tag=tag
                )

        def look_later() -> None:
            nonlocal looking
            if not looking and self.is_open:
                looking = True
                later(connection, _LOOK_AGAIN, look)

        def look() -> None:
            nonlocal looking
            looking = False
            shard_map = self._topology.shard_map(queue)
            self._topology.when_counted(
                [shard.name for shard in shard_map.shards] if shard_map else [],
                lambda counts: on_loop(
                    connection, lambda: self._resume(lambda: consume_missing(counts))
                ),
            )

        def cancelled(frame: Any) -> None:
            """The broker ended a consumer: its shard was deleted, or its node is going down."""
            for shard in [
                name for name, tag in consumed.items() if tag == frame.method.consumer_tag
            ]:
                del consumed[shard]
                look_later()

        connection = self._channel.connection
        self._channel.add_on_cancel_callback(cancelled)
        self._at_close.append(
            self._topology.subscribe(
                lambda *_: on_loop(connection, lambda: self._resume(consume_missing))
            )
        )
        consume_missing()
        return list(consumed.values())

    def basic_get(self, queue: str, callback: OnMessage, auto_ack: bool = False) -> None:
        validators.require_string(queue, "queue")
        validators.require_callback(callback)
        self._check_open()
        if self._getting or self._inner._on_getok_callback is not None:
            raise DuplicateGetOkCallback
        self._getting = True

        def send(shard: str) -> None:
            self._getting = False
            self._channel.basic_get(shard, self._with_wrapper(callback), auto_ack)

        def step(done: Done) -> None:
            shard_map = self._map(queue)
            if shard_map is None:
                send(queue)
                done()
                return

            def chosen(shard: str, _: list[str]) -> None:
                self._topology.claims.settle(shard)
                send(shard)
                done()

            self._choose(queue, shard_map, chosen)

        try:
            self._order.run(step)
        except BaseException:
            self._getting = False
            raise

    def _choose(
        self, queue: str, shard_map: ShardMap, then: Callable[[str, list[str]], None]
    ) -> None:
        """Claim the shard with the fewest consumers; `then` is called with it when it is known."""
        connection = self._channel.connection

        def count() -> None:
            shards = rules.candidates(shard_map, self._node, self._placement)
            if not shards:
                self._refuse(rules.no_shard(queue))
                return

            def counted(counts: dict[str, int | None]) -> None:
                if not counts:  # each of them was deleted by somebody
                    self._refuse(rules.no_shard(queue))
                    return
                shard = self._topology.claims.choose(counts)
                if shard is None:
                    raise ShardUnavailable(
                        f"no shard of {queue!r} answered; try again when one is back"
                    )
                then(shard, shards)

            timeout = self._topology.options.answer_timeout + 1
            give = answered(
                connection,
                timeout,
                dict.fromkeys(shards),
                lambda counts: self._resume(lambda: counted(counts)),
            )
            self._topology.when_counted(
                shards, lambda counts: on_loop(connection, lambda: give(counts))
            )

        if self._placement is Placement.ANY:
            count()
        else:
            self._locate(count)

    def _give_up_claims(self) -> None:
        for shard in self._claimed:
            self._topology.claims.settle(shard)
        self._claimed.clear()
        self._coming.clear()

    # Declaring

    def queue_declare(self, queue: str, *arguments: Any, **options: Any) -> None:
        self._check_open()

        def step(done: Done) -> None:
            shard_map = self._map(queue)
            if shard_map is None:
                self._channel.queue_declare(queue, *arguments, **options)
                done()
            else:
                self._locate(lambda: declare(shard_map, done))

        def declare(shard_map: ShardMap, done: Done) -> None:
            shard = rules.first_shard(shard_map, self._node)
            if shard is None:
                self._refuse(rules.no_shard(queue))
                return
            self._channel.queue_declare(shard, *arguments, **options)
            done()

        self._order.run(step)

    def queue_bind(self, queue: str, *arguments: Any, **options: Any) -> None:
        self._in_order(self._unless_sharded, "bind", queue, *arguments, **options)

    def queue_unbind(self, queue: str, *arguments: Any, **options: Any) -> None:
        self._in_order(self._unless_sharded, "unbind", queue, *arguments, **options)

    def queue_purge(self, queue: str, *arguments: Any, **options: Any) -> None:
        self._in_order(self._unless_sharded, "purge", queue, *arguments, **options)

    def queue_delete(self, queue: str, *arguments: Any, **options: Any) -> None:
        self._in_order(self._unless_sharded, "delete", queue, *arguments, **options)

    def _unless_sharded(self, verb: str, queue: str, *arguments: Any, **options: Any) -> None:
        self._inner._raise_if_not_open()
        if self._map(queue) is not None:
            self._refuse(rules.refusal(verb, queue))
        else:
            getattr(self._channel, f"queue_{verb}")(queue, *arguments, **options)

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
        if getattr(exchange_type, "value", exchange_type) != rules.EXCHANGE_TYPE:
            kind = (exchange_type, passive, durable, auto_delete, internal, arguments, callback)
            self._in_order(self._channel.exchange_declare, exchange, *kind)
            return
        validators.require_string(exchange, "exchange")
        validators.rpc_completion_callback(callback)
        self._check_open()
        topology = self._topology
        policy = rules.policy_of_arguments(exchange, arguments, durable)

        def check_policy() -> None:
            if policy is None and topology.policy_for(exchange) is None:
                raise rules.need_policy(exchange)

        def make_shards() -> None:
            check_policy()
            known = topology.shard_map(exchange)
            if known is not None and known.policy.durable != durable:
                return  # the broker objects to the declaration that follows; nothing is changed
            if policy is not None:
                topology.set_policy(policy)
            topology.ensure(exchange)

        def declare() -> None:
            shard_map = self._map(exchange)
            target = exchange if shard_map is None else shard_map.exchange
            self._channel.exchange_declare(target, "direct", passive, durable, callback=callback)

        if passive:
            self._in_order(declare)
        else:
            # Behind other calls it can't be said yet: one of them may set the policy.
            if self._order.idle:
                check_policy()
            self._order.run(self._after(make_shards, declare))

    def exchange_delete(
        self,
        exchange: str | None = None,
        if_unused: bool = False,
        callback: OnFrame | None = None,
    ) -> None:
        validators.rpc_completion_callback(callback)
        self._check_open()

        def step(done: Done) -> None:
            shard_map = self._map(exchange)
            if shard_map is None:
                self._channel.exchange_delete(exchange, if_unused, callback)
                done()
                return
            target = shard_map.exchange
            forget = functools.partial(self._topology.forget, shard_map.logical)
            if not if_unused:
                delete = functools.partial(self._channel.exchange_delete, target, False, callback)
                self._after(forget, delete)(done)
                return

            def deleted(frame: Any) -> None:
                self._after(forget, lambda: callback(frame) if callback else None)(done)

            # The broker may refuse it, and then the name has to stay sharded.
            self._channel.exchange_delete(target, True, deleted)

        self._order.run(step)
