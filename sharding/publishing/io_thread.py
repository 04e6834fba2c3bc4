"""The publisher's I/O thread: it carries messages to the nodes and their answers back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import pika
from pika.adapters.select_connection import IOLoop
from pika.spec import Basic

from sharding.errors import InvalidInput
from sharding.maps.shard_map import ShardMap
from sharding.maps.slots import Key
from sharding.publishing.addressing import Encoded, appearance, check_room
from sharding.publishing.ledger import Ledger, Message, Wait
from sharding.publishing.node_link import NodeLink

if TYPE_CHECKING:
    from sharding.publishing.publisher import ShardedPublisher

log = logging.getLogger("warren.publisher")

TICK = 0.05
"""How often deadlines are looked at while anything is unsettled."""
UNBLOCKED_PATIENCE = 1.0
"""How long overdue confirms may still come on a connection that was blocked until now."""
PERSISTENT = pika.BasicProperties(delivery_mode=2)


OutgoingMessage = Message[Encoded | None]


class IoThread:
    """The publisher's I/O thread: it carries messages between the ledger and the links."""

    def __init__(
        self, publisher: ShardedPublisher, shard_map: ShardMap, ledger: Ledger[Encoded | None]
    ) -> None:
        self._publisher = publisher
        self._routing = publisher._routing
        self._clock = publisher._clock
        self._exchange = shard_map.exchange if publisher._by_exchange else ""
        self._ledger = ledger
        self._loop = IOLoop()
        self._links: dict[str, NodeLink] = {}
        self._patience: dict[str, float] = {}
        self._persistent: dict[str, Encoded] = {}
        self._ticking = False
        self._releasing = False
        self._stopping = False
        self._open_links = 0

    # Called from any thread.

    def wake(self) -> None:
        self._loop.add_callback_threadsafe(self._on_wake)

    def watch(self, wait: Wait) -> None:
        self._loop.add_callback_threadsafe(lambda: self._on_watch(wait))

    def stop(self, grace: float) -> None:
        self._loop.add_callback_threadsafe(lambda: self._on_stop(grace))

    # The thread.

    def run(self) -> None:
        try:
            self._loop.start()
        except BaseException:
            log.exception("the publisher's thread ends: nothing more is sent")
        finally:
            self._add_inbox()
            self._ledger.abandon("the publisher has ended")
            self._publisher._release(self._ledger, ended=True)
            self._add_inbox()  # what came between the two lines above
            self._ledger.abandon("the publisher has ended")
            self._publisher._release(self._ledger, ended=True)
            self._loop.close()

    def _on_wake(self) -> None:
        for node in self._add_inbox():
            self._pump(self._link(node))
        self._keep_ticking()

    def _add_inbox(self) -> set[str]:
        messages = self._publisher._take_inbox()
        if messages:  # the map in force now is none older than those they were published by
            self._follow_map()
        return {self._ledger.add(message) for message in messages}

    def _follow_map(self) -> None:
        try:
            shard_map = self._routing.shard_map(self._ledger.shard_map.logical)
        except BaseException:  # an exit too, see `_release`
            return  # whoever publishes next is told; what waits keeps its shard
        if shard_map is None:
            return
        self._ledger.follow(shard_map)
        # A map may be led by another exchange: when the plugin's was removed, say.
        exchange = shard_map.exchange if self._publisher._by_exchange else ""
        if exchange != self._exchange:
            self._exchange = exchange
            for link in self._links.values():
                link.exchange = exchange

    def _on_watch(self, wait: Wait) -> None:
        self._on_wake()
        self._ledger.watch(wait)
        self._release()

    def _on_tick(self) -> None:
        self._ticking = False
        self._follow_map()
        now = self._clock()
        self._ledger.expire(now, lambda node: self._link(node).trouble or "the node is slow")
        for node, link in self._links.items():
            flight = self._ledger.flight(node)
            overdue = flight.overdue and not flight.live
            if link.ready and overdue and now >= self._patience[node]:
                link.give_up(f"{node} did not confirm {flight.overdue} messages in time")
        for node in self._ledger.waiting_nodes():
            self._pump(self._link(node))
        self._release()
        self._keep_ticking()

    def _keep_ticking(self) -> None:
        if self._ledger.unsettled and not self._ticking:
            self._ticking = True
            self._loop.call_later(TICK, self._on_tick)

    def _on_stop(self, grace: float) -> None:
        self._loop.call_later(grace, self._abort)
        if self._stopping:  # two threads close the publisher; the shorter time counts
            return
        self._stopping = True
        self._add_inbox()
        self._ledger.abandon("the publisher was closed before it was settled")
        self._release()
        self._open_links = len(self._links)
        for link in self._links.values():
            link.close(self._on_link_closed)
        if not self._links:
            self._loop.stop()

    def _on_link_closed(self) -> None:
        self._open_links -= 1
        if not self._open_links:
            self._abort()

    def _abort(self) -> None:
        for link in self._links.values():
            link.abort()
        # pika closes sockets in callbacks, and callbacks of those; the stop has to come last.
        self._stop_after_turns(5)

    def _stop_after_turns(self, turns: int) -> None:
        if turns:
            self._loop.add_callback(lambda: self._stop_after_turns(turns - 1))
        else:
            self._loop.stop()

    # Sending.

    def _link(self, node: str) -> NodeLink:
        link = self._links.get(node)
        if link is None:
            parameters = self._routing.connection_parameters
            link = NodeLink(node, self._loop, parameters, self._exchange, self)
            self._links[node] = link
        return link

    def _pump(self, link: NodeLink) -> None:
        channel, connection = link.channel, link.connection
        if channel is None or connection is None or not link.ready or not channel.is_open:
            link.open()
            return
        if self._ledger.flight(link.node).overdue:
            return
        publish, sent = channel.basic_publish, self._ledger.sent
        frame_max = connection.params.frame_max
        connection.cork()
        for message in self._ledger.waiting_for(link.node):
            try:
                properties = self._properties(message)
                check_room(properties.size, frame_max)
                routing_key = message.key if self._exchange else message.shard
                publish(self._exchange, cast(str, routing_key), message.body, properties, True)
            except InvalidInput as error:  # a broker whose frames are smaller than usual, say
                self._ledger.refuse(message, str(error))
            except Exception as error:  # pika encodes everything before it writes anything
                log.exception("message %d can't be encoded", message.number)
                self._ledger.refuse(message, f"can't be encoded: {type(error).__name__}")
            else:
                sent(link.node, message)
        connection.uncork()

    def _properties(self, message: OutgoingMessage) -> Encoded:
        given = message.properties
        if given is None:
            given = self._persistent.get(message.shard)
            if given is None:
                given = Encoded(PERSISTENT, message.shard if self._exchange else None)
                self._persistent[message.shard] = given
        elif given.shard is not None and given.shard != message.shard:  # routed again
            given = message.properties = Encoded(given.plain, message.shard)
        return given

    def _release_soon(self) -> None:
        """Release once for all the confirms that one look at the sockets brings."""
        if not self._releasing:
            self._releasing = True
            self._loop.add_callback(self._release)

    def _release(self) -> None:
        self._releasing = False
        self._publisher._release(self._ledger)
        for shard in self._ledger.take_suspects():
            try:
                self._routing.suspect(shard)
            except BaseException:  # another's fault, or exit, must not end this thread
                log.exception("routing.suspect failed for %r", shard)

    # What the links tell.

    def on_ready(self, link: NodeLink) -> None:
        self._patience[link.node] = self._clock() + UNBLOCKED_PATIENCE
        self._pump(link)

    def on_idle(self, link: NodeLink) -> None:
        if link.node in self._ledger.waiting_nodes():
            link.open()

    def on_confirm(self, link: NodeLink, tag: int, multiple: bool, ack: bool) -> None:
        settle = self._ledger.acked if ack else self._ledger.nacked
        settle(link.node, tag, multiple)
        self._release_soon()

    def on_return(
        self, link: NodeLink, method: Basic.Return, properties: pika.BasicProperties, body: bytes
    ) -> None:
        key, looks = wire(method.routing_key or ""), appearance(properties)

        def alike(message: OutgoingMessage) -> bool:
            sent_key = message.key if self._exchange else message.shard
            return message.body == body and wire(sent_key) == key

        def same(message: OutgoingMessage) -> bool:
            return alike(message) and appearance(self._properties(message).plain) == looks

        reason = f"{method.reply_code} {method.reply_text}: no queue took it"
        returned = self._ledger.returned
        # A broker that changed a property on the way still returned this key and body.
        if not (returned(link.node, same, reason) or returned(link.node, alike, reason)):
            link.give_up(f"{link.node} returned a message that was not sent to it")
        self._release_soon()

    def on_lost(self, link: NodeLink, reason: str, permanent: bool) -> None:
        self._ledger.lost(link.node, reason)
        if permanent:
            self._ledger.refuse_waiting(link.node, reason)
        self._release_soon()


def wire(key: Key) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)
