"""`ShardedChannel`: a drop-in for pika's `BlockingChannel`.

Whatever is not in the table of `method_rules` is the wrapped channel's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import pika
import pika.spec
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, NackError, UnroutableError

from interceptors import method_rules
from interceptors.blocking_confirms import BlockingConfirms
from interceptors.call_order import Everywhere, Steps, at_once
from interceptors.calls import (
    Calls,
    consume_missing,
    keep_consuming,
    new_tag,
    send_again,
    settle,
    shards_of,
)
from interceptors.method_rules import EveryShard, Placement, Returned, Stray
from sharding.amqp.connected_node import REPLY_TO, peer_of
from sharding.cluster.provisioner import net
from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput, OutcomeUnknown
from sharding.maps.shard_map import Route, ShardMap
from sharding.metrics.names import Subject
from sharding.publishing.addressing import Encoded, addressed

logger = logging.getLogger("warren.channel")

T = TypeVar("T")
_PAUSE = 1.0
OnMessage = Callable[[Any, pika.spec.Basic.Deliver, pika.BasicProperties, bytes], Any]


class ShardedChannel:
    """A pika `BlockingChannel` for which a logical queue is one queue.

    `confirm_timeout` bounds every wait for a confirm; after it the outcome is unknown. `node` says
    which node the connection is on where Warren can't find out.
    """

    counted_as = Subject("channel")
    connection: Any
    """pika's, or the `ShardedConnection` that the channel is of."""

    def __init__(
        self,
        channel: BlockingChannel,
        topology: Topology,
        *,
        placement: Placement | str = Placement.LOCAL,
        confirm_timeout: float = 30.0,
        node: str | None = None,
    ) -> None:
        # pika's own bookkeeping, which has no public face.
        self._inner = _insides(channel)
        if self._inner._delivery_confirmation:
            raise InvalidInput("channel", "must be wrapped before confirm_delivery()", channel)
        self._channel = channel
        self._topology = topology
        self._confirms = BlockingConfirms(self._inner, confirm_timeout)
        self._calls = Calls(
            BlockingPort(self._inner, topology, self._confirms), topology, placement, node
        )
        # Consumers are moved and added while the application pumps events, as its callbacks run;
        # what came back is sent again whenever pika reads, as its returns are read.
        connection, impl = channel.connection, self._inner.connection._impl
        self._background = Steps(connection.add_callback_threadsafe, connection.call_later)
        self._reading = Steps(impl._adapter_add_callback_threadsafe, impl._adapter_call_later)
        self._returns = method_rules.Returns()
        self._strays: list[Stray] = []
        self._transacting = False
        self._everywhere: list[EveryShard] = []
        self._encoded: dict[str, Encoded] = {}
        self._uninformed: set[str] = set()
        """Exchanges that were published to here while no map of theirs was known."""
        self._uncommitted: set[str] = set()
        """Those of them that were in the transaction that goes on."""
        self._at_close: list[Callable[[], None]] = []
        self._inner._impl.add_on_return_callback(self._on_return)
        self._inner._impl.add_on_close_callback(self._on_close)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def __enter__(self) -> ShardedChannel:
        self._channel.__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._channel.__exit__(*problem)

    def __int__(self) -> int:
        return int(self._channel)

    def __repr__(self) -> str:
        return f"<ShardedChannel of {self._channel!r}>"

    @property
    def counters(self) -> Mapping[str, float]:
        """Messages published here, and in confirm mode what became of them."""
        return self._confirms.counters

    def explain(self, queue: str, key: str) -> Route | None:
        """Slot, shard, node and epoch of a key; None if the name is not sharded."""
        shard_map = self._topology.shard_map(queue)
        return None if shard_map is None else shard_map.route(key)

    # Consuming

    def basic_consume(
        self,
        queue: str,
        on_message_callback: OnMessage,
        auto_ack: bool = False,
        exclusive: bool = False,
        consumer_tag: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        shard_map = self._topology.shard_map(queue)
        deliver = self._with_wrapper(on_message_callback)
        options = (auto_ack, exclusive)
        wishes = _mutable(arguments)
        if shard_map is None:
            return self._channel.basic_consume(queue, deliver, *options, consumer_tag, wishes)

        async def consume(shard: str) -> str:
            return self._channel.basic_consume(shard, deliver, *options, consumer_tag, wishes)

        tag, shard, shards = at_once(self._calls.consume(shard_map, consume))
        if not exclusive and len(shards) > 1:
            wanted = pika.spec.Basic.Consume(
                queue=shard, consumer_tag=tag, no_ack=auto_ack, arguments=wishes or {}
            )
            consumer = _Consumer(self._inner, self._confirms, wanted)
            settling = settle(self._background, self._topology, consumer, shards)
            self._background.run(settling, consumer.stays)
        return tag

    def basic_consume_all(
        self, queue: str, on_message_callback: OnMessage, auto_ack: bool = False
    ) -> list[str]:
        """Consume from every shard, on whatever node, also from those that come later.

        Returns the consumer tags of the shards there are now.
        """
        if self._topology.shard_map(queue) is None:
            return [self.basic_consume(queue, on_message_callback, auto_ack)]
        deliver = self._with_wrapper(on_message_callback)

        def consume(shard: str, tag: str) -> None:
            self._channel.basic_consume(shard, deliver, auto_ack, consumer_tag=tag)

        wish = EveryShard(new_tag)
        everywhere = Everywhere(wish, lambda: bool(self._channel.is_open), consume)
        about = (self._topology, queue, wish, everywhere)
        self._inner.add_on_cancel_callback(everywhere.on_cancel)
        undo = self._topology.subscribe(lambda *_: self._background.on_loop(everywhere.wake))
        self._at_close.append(undo)
        self._everywhere.append(wish)
        at_once(consume_missing(self._calls.port, *about))

        def later_ones_are_missing(error: Exception) -> None:
            logger.error("shards that come later are not consumed: %s", error)
            wish.is_over = True

        self._background.run(keep_consuming(self._background, *about), later_ones_are_missing)
        return wish.consumed

    def start_consuming(self) -> None:
        """As pika's: until all consumers are cancelled.

        Those of `basic_consume_all` that the broker ended are not; pika would return when it has
        ended all of them, and nobody would read the shards when they are back.
        """
        self._channel.start_consuming()
        while self._channel.is_open and any(wish.goes_on for wish in self._everywhere):
            self._inner._process_data_events(_PAUSE)
            self._channel.start_consuming()

    def basic_cancel(self, consumer_tag: str) -> Any:
        for wish in self._everywhere:
            wish.cancelled(consumer_tag)
        return self._channel.basic_cancel(consumer_tag)

    def stop_consuming(self, consumer_tag: str | None = None) -> None:
        for wish in self._everywhere:
            for tag in [consumer_tag] if consumer_tag else wish.tags.values():
                wish.cancelled(tag)
        self._channel.stop_consuming(consumer_tag)

    def basic_get(self, queue: str, auto_ack: bool = False) -> tuple[Any, Any, Any]:
        return self._channel.basic_get(at_once(self._calls.queue_to_read(queue)), auto_ack)

    def consume(
        self,
        queue: str,
        auto_ack: bool = False,
        exclusive: bool = False,
        arguments: Mapping[str, Any] | None = None,
        inactivity_timeout: float | None = None,
        consumer_tag: str | None = None,
    ) -> Generator[tuple[Any, Any, Any], None, None]:
        running = self._inner._queue_consumer_generator
        if running is None:
            shard = at_once(self._calls.queue_to_read(queue))
        else:
            # Called again, the generator goes on; pika compares the names and objects to another.
            on_shard = running.params[0] in shards_of(self._topology, queue)
            shard = running.params[0] if on_shard else queue
        yield from self._channel.consume(
            shard, auto_ack, exclusive, _mutable(arguments), inactivity_timeout, consumer_tag
        )

    def _with_wrapper(self, callback: OnMessage) -> OnMessage:
        """Give the callback this channel, or what it publishes would not be sharded."""

        def deliver(
            _: Any, method: pika.spec.Basic.Deliver, properties: pika.BasicProperties, body: bytes
        ) -> None:
            callback(self, method, properties, body)

        return deliver

    # Declaring

    def queue_declare(self, queue: str, *arguments: Any, **options: Any) -> Any:
        name: Any = at_once(self._calls.queue_to_declare(queue)) if queue else queue
        return self._channel.queue_declare(name, *arguments, **options)

    def queue_bind(self, queue: str, *arguments: Any, **options: Any) -> Any:
        return self._unless_sharded("bind", queue, *arguments, **options)

    def queue_unbind(self, queue: str, *arguments: Any, **options: Any) -> Any:
        return self._unless_sharded("unbind", queue, *arguments, **options)

    def queue_purge(self, queue: str) -> Any:
        return self._unless_sharded("purge", queue)

    def queue_delete(self, queue: str, *arguments: Any, **options: Any) -> Any:
        return self._unless_sharded("delete", queue, *arguments, **options)

    def exchange_declare(
        self,
        exchange: str,
        exchange_type: Any = "direct",
        passive: bool = False,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> Any:
        kind = getattr(exchange_type, "value", exchange_type)
        if kind != method_rules.EXCHANGE_TYPE:
            shard_map = self._topology.shard_map(exchange)
            if method_rules.would_make(shard_map, exchange, passive):
                at_once(self._calls.make_again(shard_map))
            return self._channel.exchange_declare(
                exchange,
                exchange_type,
                passive,
                durable,
                auto_delete,
                internal,
                method_rules.exchange_arguments(shard_map, exchange, kind, arguments),
            )
        self._inner._impl._raise_if_not_open()

        async def declare(name: str) -> Any:
            return self._inner.exchange_declare(
                name, "direct", passive, durable, arguments=net(exchange)
            )

        return at_once(self._calls.declare_exchange(exchange, arguments, passive, durable, declare))

    def exchange_delete(self, exchange: str, if_unused: bool = False) -> Any:
        async def delete(name: str) -> Any:
            return self._channel.exchange_delete(name, if_unused)

        return at_once(self._calls.delete_exchange(exchange, if_unused, delete))

    def _unless_sharded(self, verb: str, queue: str, *arguments: Any, **options: Any) -> Any:
        at_once(self._calls.refuse_if_sharded(verb, queue))
        return getattr(self._channel, f"queue_{verb}")(queue, *arguments, **options)

    # Publishing

    def tx_select(self) -> Any:
        self._transacting = True
        return self._channel.tx_select()

    def tx_commit(self) -> Any:
        answer = self._channel.tx_commit()
        self._uncommitted.clear()
        return answer

    def tx_rollback(self) -> Any:
        answer = self._channel.tx_rollback()
        self._uncommitted.clear()
        return answer

    def confirm_delivery(self) -> None:
        self._confirms.select()

    def basic_publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes | str,
        properties: pika.BasicProperties | None = None,
        mandatory: bool = False,
    ) -> None:
        exchange, routing_key = method_rules.as_read(exchange), method_rules.as_read(routing_key)
        shard_map = self._topology.shard_map(exchange) if exchange else None
        if shard_map is None or exchange in self._uncommitted:
            if exchange:
                self._uninformed.add(exchange)
                if self._transacting:  # kept when it is committed, and all that is behind it too
                    self._uncommitted.add(exchange)
            mandatory = mandatory or self._topology.may_drop(exchange, routing_key)
            self._confirms.publish(exchange, routing_key, body, properties, mandatory)
            return
        own = exchange in self._uninformed
        if own or self._topology.kept.mark(exchange) is not None:
            at_once(self._calls.bring(exchange, own=own))
            self._uninformed.discard(exchange)
        shard = self._shard_for(shard_map, routing_key)
        sent = self._addressed(properties, shard) if properties else self._bare(shard)
        if mandatory and not self._confirms.active:
            self._returns.ask(shard_map.exchange, routing_key, method_rules.as_bytes(body))
        self._returns.used(shard_map)
        try:
            self._confirms.publish(shard_map.exchange, routing_key, body, sent, True, mandatory)
        except (NackError, OutcomeUnknown):
            self._topology.suspect(shard)
            raise
        except UnroutableError:
            self._topology.suspect(shard)
            if mandatory:
                raise
            self._publish_again(exchange, routing_key, body, properties, shard)

    def _addressed(
        self, properties: pika.BasicProperties | None, shard: str
    ) -> pika.BasicProperties:
        return addressed(properties, shard, self._inner.connection._impl.params.frame_max)

    def _bare(self, shard: str) -> pika.BasicProperties:
        """The properties of a message that has none: the same each time, so encoded once."""
        encoded = self._encoded.get(shard)
        if encoded is None:
            encoded = self._encoded[shard] = Encoded(pika.BasicProperties(), shard)
        return encoded

    def _publish_again(
        self,
        logical: str,
        routing_key: str,
        body: bytes | str,
        properties: pika.BasicProperties | None,
        shard: str,
    ) -> None:
        """A return that the application did not ask for: the map may be old, so look again."""
        self._topology.refresh()
        shard_map = self._topology.shard_map(logical)
        now = shard_map.shard_of(routing_key).name if shard_map else shard
        if shard_map is None or now == shard:
            raise method_rules.unbound(shard, logical)
        again = self._addressed(properties, now)
        try:
            self._confirms.publish(shard_map.exchange, routing_key, body, again, True, asked=False)
        except UnroutableError:
            raise method_rules.unbound(now, logical) from None

    def _shard_for(self, shard_map: ShardMap, routing_key: str) -> str:
        method_rules.check_key(shard_map, routing_key)
        shard = shard_map.shard_of(routing_key)
        method_rules.check_available(shard_map, shard, self._topology.unavailable(shard.name))
        return shard.name

    def _on_return(
        self, _: Any, method: Any, properties: pika.BasicProperties, body: bytes
    ) -> None:
        # Runs inside pika's handling of frames: whatever is raised here ends the connection.
        what = (method.exchange, method.routing_key, body)
        shard_map = self._returns.map_of(method.exchange)
        if self._confirms.active:
            asked = self._confirms.on_return(method, properties, body)
            method.warren_unasked = shard_map is not None and not asked
            return
        if shard_map is None or (verdict := self._returns.came_back(*what)) is Returned.ASKED:
            return
        method.warren_unasked = True
        # A message sent again in a transaction would wait for a commit that may never come.
        hopeless = self._transacting or len(self._strays) >= method_rules.MOST_STRAYS
        if verdict is Returned.UNSTORED or hopeless:
            logger.error("%s", method_rules.unstored(shard_map.logical, method.routing_key))
            self._topology.suspect(shard_map.shard_of(method.routing_key).name)
            return
        self._strays.append(Stray(shard_map.logical, method.routing_key, properties, body))
        if len(self._strays) == 1:
            publish = self._publish_stray
            again = send_again(self._reading, self._topology, self._returns, self._strays, publish)
            self._reading.run(again, _not_sent_again)

    def _publish_stray(self, shard_map: ShardMap, shard: str, stray: Stray) -> None:
        confirms = self._confirms.active or self._confirms.selecting
        if confirms or self._transacting:  # by now: it would be nobody's confirm
            logger.error("%s", method_rules.unstored(stray.logical, stray.routing_key))
            return
        sent = self._addressed(stray.properties, shard)
        publish = self._inner._impl.basic_publish
        publish(shard_map.exchange, stray.routing_key, stray.body, sent, True)

    def add_on_return_callback(self, callback: Callable[..., Any]) -> None:
        """Called for the messages that the application asked to have returned, and no others."""

        def returned(_: Any, method: Any, properties: Any, body: bytes) -> None:
            if not getattr(method, "warren_unasked", False):
                callback(self, method, properties, body)

        self._channel.add_on_return_callback(returned)

    def _on_close(self, *_: Any) -> None:
        self._background.stop()
        self._reading.stop()
        self._topology.kept.leave(self._uninformed)
        for clean_up in self._at_close:
            clean_up()
        for stray in self._strays:
            logger.error("%s", method_rules.unstored(stray.logical, stray.routing_key))


class BlockingPort:
    """What calls need of a blocking channel (`calls.Port`): whatever waits here, blocks."""

    def __init__(self, channel: Any, topology: Topology, confirms: BlockingConfirms) -> None:
        self._channel = channel
        self._topology = topology
        self._confirms = confirms

    async def wait(self, future: Future[T]) -> T:
        return self._topology.result(future)

    async def refuse(self, text: str) -> NoReturn:
        self._channel.basic_ack(method_rules.NO_SUCH_DELIVERY)
        with suppress(ChannelClosedByBroker):
            self._confirms.wait_until(lambda: self._channel.is_closed)
        reason = ChannelClosedByBroker(method_rules.PRECONDITION_FAILED, text)
        self._channel._closing_reason = reason
        raise reason

    async def routed(self, exchange: str) -> None:
        if self._confirms.active:  # every publish has waited for its own
            return
        answered: list[Any] = []
        self._channel._impl.exchange_declare(exchange, passive=True, callback=answered.append)
        self._confirms.wait_until(lambda: bool(answered))

    async def connection(self) -> tuple[object, tuple[str, int] | None]:
        impl = self._channel.connection._impl
        return impl, peer_of(impl)

    async def reply_to(self) -> str | None:
        # Below pika's own waiting, which has no end where the broker has an alarm on: from what it
        # was published to over it, it reads no more.
        returned: list[str | None] = []
        channel = self._channel.connection.channel()._impl
        channel.add_on_return_callback(
            lambda _, __, properties, ___: returned.append(properties.reply_to)
        )
        channel.add_on_close_callback(lambda *_: returned.append(None))
        channel.basic_consume(REPLY_TO, lambda *_: None, auto_ack=True)
        channel.basic_publish(
            "", "warren.nobody", b"", pika.BasicProperties(reply_to=REPLY_TO), mandatory=True
        )
        self._confirms.wait_until(lambda: bool(returned))
        # Gone before the application goes on: `BlockingConnection.close()` fails at a channel that
        # ends while it waits for another. One that got no answer is left to it, open.
        if channel.is_open:
            channel.close()
        self._confirms.wait_until(lambda: bool(channel.is_closed))
        return returned[0]


class _Consumer:
    """A consumer that may be moved (`calls.Movable`).

    To move is to cancel and to consume again under the same tag, by the bare methods: for pika the
    consumer is there all the time, so that what is delivered until cancel-ok reaches the
    application. `basic_cancel` would drop it, and with auto_ack it would be lost.
    """

    def __init__(self, channel: Any, confirms: BlockingConfirms, consume: Any) -> None:
        self._channel = channel
        self._confirms = confirms
        self._consume = consume
        # The same tag may be used again for another consumer; pika's record tells them apart.
        self._record = self._record_now()

    def _record_now(self) -> Any:
        return self._channel._consumer_infos.get(self._consume.consumer_tag)

    @property
    def shard(self) -> str:
        return str(self._consume.queue)

    def is_alive(self) -> bool:
        record = self._record_now()
        return bool(self._channel.is_open) and record is self._record and bool(record.active)

    def stays(self, error: Exception) -> None:
        logger.debug("a consumer stays on %r: %s", self.shard, error)

    async def move(self, target: str) -> None:
        # Both at once, and waited for: the application can't cancel it in between, and a broker
        # that answers late has it consume all the same.
        tag = self._consume.consumer_tag
        cancel = pika.spec.Basic.Cancel(consumer_tag=tag, nowait=False)
        self._consume.queue = target
        answered: list[Any] = []
        with self._channel._basic_consume_ok_result:  # hears of every consume-ok
            self._call(cancel, pika.spec.Basic.CancelOk, lambda _: None)
            self._call(self._consume, pika.spec.Basic.ConsumeOk, answered.append)
            self._confirms.wait_until(lambda: bool(answered))

    def _call(self, method: Any, answer: Any, callback: Callable[[Any], None]) -> None:
        expected = (answer, {"consumer_tag": method.consumer_tag})
        self._channel._impl._rpc(method, callback, [expected])


def _not_sent_again(error: Exception) -> None:
    logger.error("what came back could not be sent again: %s", error)


def _insides(channel: BlockingChannel) -> Any:
    return channel


def _mutable(arguments: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if arguments is None else dict(arguments)
