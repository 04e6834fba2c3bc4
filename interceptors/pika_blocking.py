"""`ShardedChannel`: a drop-in for pika's `BlockingChannel`.

Whatever is not in the table of `rules` is the wrapped channel's own.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import pika
import pika.spec
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, NackError, UnroutableError

from interceptors import rules
from interceptors.blocking_confirms import BlockingConfirms
from interceptors.blocking_consumers import ConsumeAll, Settling
from interceptors.rules import Placement
from sharding.amqp.connected_node import REPLY_TO, node_at, node_with_token, peer_of
from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput, OutcomeUnknown, ShardUnavailable, Unreachable
from sharding.maps.shard_map import Route, ShardMap
from sharding.metrics.sources import Subject
from sharding.publishing.addressing import Encoded, addressed

logger = logging.getLogger("warren.channel")

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
        self._placement = Placement(placement)
        self._confirms = BlockingConfirms(self._inner, confirm_timeout)
        self._node = node
        self._asked = rules.AskedReturns()
        self._routed: dict[str, ShardMap] = {}
        self._encoded: dict[str, Encoded] = {}
        self._random = random.Random()
        self._inner._impl.add_on_return_callback(self._on_return)

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
        if shard_map is None:
            return self._channel.basic_consume(
                queue, deliver, auto_ack, exclusive, consumer_tag, _mutable(arguments)
            )
        shards = self._candidates(shard_map)

        def consume(shard: str, tag: str | None) -> str:
            return self._channel.basic_consume(
                shard, deliver, auto_ack, exclusive, tag, _mutable(arguments)
            )

        shard = self._claim(queue, shards)
        try:
            tag = consume(shard, consumer_tag)
        finally:
            self._topology.claims.settle(shard)
        if not exclusive and len(shards) > 1:
            Settling(self, tag, shard, shards, consume, deliver).look_later()
        return tag

    def basic_consume_all(
        self, queue: str, on_message_callback: OnMessage, auto_ack: bool = False
    ) -> list[str]:
        """Consume from every shard, on whatever node, also from those that come later.

        Returns the consumer tags of the shards there are now.
        """
        shard_map = self._topology.shard_map(queue)
        if shard_map is None:
            return [self.basic_consume(queue, on_message_callback, auto_ack)]
        everything = ConsumeAll(self, queue, self._with_wrapper(on_message_callback), auto_ack)
        return everything.start()

    def basic_get(self, queue: str, auto_ack: bool = False) -> tuple[Any, Any, Any]:
        return self._channel.basic_get(self._shard_to_read(queue), auto_ack)

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
        shard_map = self._topology.shard_map(queue)
        names = {shard.name for shard in shard_map.shards} if shard_map else set()
        if running is None:
            shard = self._shard_to_read(queue)
        else:
            # Called again, the generator goes on; pika compares the names and objects to another.
            shard = running.params[0] if running.params[0] in names else queue
        yield from self._channel.consume(
            shard, auto_ack, exclusive, _mutable(arguments), inactivity_timeout, consumer_tag
        )

    def _shard_to_read(self, queue: str) -> str:
        shard_map = self._topology.shard_map(queue)
        if shard_map is None:
            return queue
        shard = self._claim(queue, self._candidates(shard_map))
        self._topology.claims.settle(shard)
        return shard

    def _candidates(self, shard_map: ShardMap) -> list[str]:
        here = None if self._placement is Placement.ANY else self._here()
        return rules.candidates(shard_map, here, self._placement)

    def _claim(self, queue: str, shards: list[str]) -> str:
        counts = self._topology.consumer_counts(shards) if shards else {}
        if not counts:
            self._refuse(rules.no_shard(queue))
        shard = self._topology.claims.choose(counts)
        if shard is None:
            raise ShardUnavailable(
                f"no shard of {queue!r} on {self._node} answered; try again when it is back"
            )
        return shard

    def _with_wrapper(self, callback: OnMessage) -> OnMessage:
        """Give the callback this channel, or what it publishes would not be sharded."""

        def deliver(
            _: Any, method: pika.spec.Basic.Deliver, properties: pika.BasicProperties, body: bytes
        ) -> None:
            callback(self, method, properties, body)

        return deliver

    # Declaring

    def queue_declare(self, queue: str, *arguments: Any, **options: Any) -> Any:
        shard_map = self._topology.shard_map(queue) if queue else None
        if shard_map is None:
            return self._channel.queue_declare(queue, *arguments, **options)
        shard = rules.first_shard(shard_map, self._here())
        if shard is None:
            self._refuse(rules.no_shard(queue))
        return self._channel.queue_declare(shard, *arguments, **options)

    def queue_bind(self, queue: str, *arguments: Any, **options: Any) -> Any:
        return self._unless_sharded("bind", queue)(queue, *arguments, **options)

    def queue_unbind(self, queue: str, *arguments: Any, **options: Any) -> Any:
        return self._unless_sharded("unbind", queue)(queue, *arguments, **options)

    def queue_purge(self, queue: str) -> Any:
        return self._unless_sharded("purge", queue)(queue)

    def queue_delete(self, queue: str, *arguments: Any, **options: Any) -> Any:
        return self._unless_sharded("delete", queue)(queue, *arguments, **options)

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
        if getattr(exchange_type, "value", exchange_type) != rules.EXCHANGE_TYPE:
            return self._channel.exchange_declare(
                exchange,
                exchange_type,
                passive,
                durable,
                auto_delete,
                internal,
                _mutable(arguments),
            )
        self._inner._impl._raise_if_not_open()
        known = self._topology.shard_map(exchange)
        if known is not None:
            # The broker objects to a declaration that does not fit, before anything is changed.
            declared = self._inner.exchange_declare(known.exchange, "direct", passive, durable)
        if not passive:
            policy = rules.policy_of_arguments(exchange, arguments, durable)
            if policy is not None:
                self._topology.set_policy(policy)
            elif self._topology.policy_for(exchange) is None:
                raise rules.need_policy(exchange)
            self._topology.ensure(exchange)
        if known is not None:
            return declared
        shard_map = self._topology.shard_map(exchange)
        target = exchange if shard_map is None else shard_map.exchange
        return self._channel.exchange_declare(target, "direct", passive, durable)

    def exchange_delete(self, exchange: str, if_unused: bool = False) -> Any:
        shard_map = self._topology.shard_map(exchange)
        if shard_map is None:
            return self._channel.exchange_delete(exchange, if_unused)
        if not if_unused:
            self._topology.forget(exchange)
            return self._inner.exchange_delete(shard_map.exchange, if_unused)
        # The broker may refuse it, and then the name has to stay sharded.
        answer = self._inner.exchange_delete(shard_map.exchange, if_unused)
        self._topology.forget(exchange)
        return answer

    def _unless_sharded(self, verb: str, queue: str) -> Callable[..., Any]:
        if self._topology.shard_map(queue) is not None:
            self._refuse(rules.refusal(verb, queue))
        method: Callable[..., Any] = getattr(self._channel, f"queue_{verb}")
        return method

    def _refuse(self, text: str) -> NoReturn:
        """Let the broker close the channel with a genuine 406, and say the plugin's reason."""
        self._channel.basic_ack(rules.NO_SUCH_DELIVERY)
        with suppress(ChannelClosedByBroker):
            self._confirms.wait_until(lambda: self._channel.is_closed)
        reason = ChannelClosedByBroker(rules.PRECONDITION_FAILED, text)
        self._inner._closing_reason = reason
        raise reason

    # Publishing

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
        shard_map = self._topology.shard_map(exchange) if exchange else None
        if shard_map is None:
            mandatory = mandatory or self._topology.may_drop(exchange, routing_key)
            self._confirms.publish(exchange, routing_key, body, properties, mandatory)
            return
        shard = self._shard_for(shard_map, routing_key)
        sent = addressed(properties, shard) if properties else self._bare(shard)
        if mandatory and not self._confirms.active:
            self._asked.note(shard_map.exchange, routing_key, _bytes(body))
        self._routed[shard_map.exchange] = shard_map
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
            raise ShardUnavailable(
                f"{shard!r} is not bound to the exchange {logical!r}, nothing was stored; "
                "'warren shards ensure' makes it again"
            )
        again = addressed(properties, now)
        self._confirms.publish(shard_map.exchange, routing_key, body, again, True, asked=False)

    def _shard_for(self, shard_map: ShardMap, routing_key: str) -> str:
        rules.check_key(shard_map, routing_key)
        shard = shard_map.shard_of(routing_key)
        rules.check_available(shard_map, shard, self._topology.unavailable(shard.name))
        return shard.name

    def _on_return(
        self, _: Any, method: Any, properties: pika.BasicProperties, body: bytes
    ) -> None:
        # Runs inside pika's handling of frames: whatever is raised here ends the connection.
        shard_map = self._routed.get(method.exchange)
        if self._confirms.active:
            asked = self._confirms.on_return(method, properties, body)
            method.warren_unasked = shard_map is not None and not asked
            return
        if shard_map is None or self._asked.take(method.exchange, method.routing_key, body):
            return
        method.warren_unasked = True
        logger.error(
            "a message with key %r came back: its shard is not bound to %r; it is not stored",
            method.routing_key,
            shard_map.logical,
        )
        self._topology.suspect(shard_map.shard_of(method.routing_key).name)

    def add_on_return_callback(self, callback: Callable[..., Any]) -> None:
        """Called for the messages that the application asked to have returned, and no others."""

        def returned(_: Any, method: Any, properties: Any, body: bytes) -> None:
            if not getattr(method, "warren_unasked", False):
                callback(self, method, properties, body)

        self._channel.add_on_return_callback(returned)

    # Waiting and knowing where we are

    def _here(self) -> str | None:
        if self._node is None:
            nodes = self._topology.nodes()
            self._node = node_at(peer_of(self._inner.connection._impl), nodes)
            self._node = self._node or node_with_token(self._reply_to(), nodes)
            if self._node is None:
                raise Unreachable("the node of this connection is in no shard map; give node=…")
        return self._node

    def _reply_to(self) -> str:
        """What the node writes into a reply-to; asked on a channel of its own."""
        returned: list[str | None] = []
        channel = self._channel.connection.channel()
        # Told as the frame comes in: events of a channel are dropped when it is closed.
        _insides(channel)._impl.add_on_return_callback(
            lambda _, __, properties, ___: returned.append(properties.reply_to)
        )
        channel.basic_consume(REPLY_TO, lambda *_: None, auto_ack=True)
        channel.basic_publish(
            "", "warren.nobody", b"", pika.BasicProperties(reply_to=REPLY_TO), mandatory=True
        )
        channel.close()
        if not returned or returned[0] is None:
            raise Unreachable("the broker did not say which node it is; give node=…")
        return returned[0]


def _insides(channel: BlockingChannel) -> Any:
    return channel


def _mutable(arguments: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if arguments is None else dict(arguments)


def _bytes(body: bytes | str) -> bytes:
    return body.encode() if isinstance(body, str) else body
