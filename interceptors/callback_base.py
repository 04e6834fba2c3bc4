"""A wrapped asynchronous channel whose calls keep their order, whatever they have to wait for.

* Nothing blocks the loop. What has to ask the cluster first is deferred, and the calls behind it
  wait in their order, so that no cancel or close overtakes the consume it belongs to.
* pika's asynchronous calls have no way to report an error but the closing of the channel. Nor has
  a call that fails after it was deferred: the broker closes the channel, and the reason that the
  application's callbacks get says why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pika
from pika.channel import Channel
from pika.exceptions import ChannelClosedByBroker, ChannelWrongStateError

from interceptors import rules
from interceptors.call_order import CallOrder, Done, InTurn, Step, ask_reply_to, off_loop
from sharding.amqp.connected_node import node_at, node_with_token, peer_of
from sharding.cluster.topology import Topology
from sharding.errors import Unreachable
from sharding.maps.shard_map import ShardMap

logger = logging.getLogger("warren.channel")

OnMessage = Callable[[Any, Any, pika.BasicProperties, bytes], Any]


def _ordered(name: str) -> Callable[..., Any]:
    """The channel's own method, in its turn."""

    @functools.wraps(getattr(Channel, name))
    def call(self: DeferringChannel, *arguments: Any, **options: Any) -> Any:
        return self._in_order(getattr(self._channel, name), *arguments, **options)

    return call


class DeferringChannel:
    """The channel as it is, with its calls in order; what is sharded is added on top of it."""

    connection: Any
    """pika's, or the `AsyncShardedConnection` that the channel is of."""

    def __init__(
        self, channel: Channel, topology: Topology, confirm_timeout: float, node: str | None
    ) -> None:
        # pika's own bookkeeping, which has no public face.
        self._inner: Any = channel
        self._channel = channel
        self._topology = topology
        self._confirm_timeout = confirm_timeout
        self._node = node
        self._order = CallOrder(self._fail)
        self._refusal: str | None = None
        self._close_asked = False
        self._close_callbacks: list[Callable[..., Any]] = []
        self._at_close: list[Callable[[], None]] = []
        channel.add_on_close_callback(self._on_close)
        self._ready = True
        try:
            topology.wait_until_ready(0)
        except Unreachable:
            self._ready = False
            self._order.run(self._wait_for_topology)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def __int__(self) -> int:
        return int(self._channel)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._channel!r}>"

    # What is only kept in order

    basic_ack = _ordered("basic_ack")
    basic_cancel = _ordered("basic_cancel")
    basic_nack = _ordered("basic_nack")
    basic_qos = _ordered("basic_qos")
    basic_recover = _ordered("basic_recover")
    basic_reject = _ordered("basic_reject")
    exchange_bind = _ordered("exchange_bind")
    exchange_unbind = _ordered("exchange_unbind")
    flow = _ordered("flow")
    tx_commit = _ordered("tx_commit")
    tx_rollback = _ordered("tx_rollback")

    def close(self, reply_code: int = 0, reply_text: str = "Normal shutdown") -> None:
        self._in_order(self._channel.close, reply_code, reply_text)
        self._close_asked = True

    @property
    def is_open(self) -> bool:
        return bool(self._channel.is_open) and not self._close_asked

    @property
    def is_closing(self) -> bool:
        return bool(self._channel.is_closing or (self._channel.is_open and self._close_asked))

    def _with_wrapper(self, callback: OnMessage) -> OnMessage:
        """Give the callback this channel, or what it publishes would not be sharded."""

        def deliver(_: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
            callback(self, method, properties, body)

        return deliver

    # Closing, and the one way to report a failure

    def add_on_close_callback(self, callback: Callable[..., Any]) -> None:
        if callback not in self._close_callbacks:
            self._close_callbacks.append(callback)

    def _refuse(self, text: str) -> None:
        """Let the broker close the channel with a genuine 406; `_on_close` gives the reason."""
        self._refusal = self._refusal or text
        self._order.stop()
        if self._channel.is_open:
            self._inner._rpc(InTurn(rules.NO_SUCH_DELIVERY))

    def _fail(self, error: Exception) -> None:
        logger.error("closing channel %d: %s", int(self), error)
        self._refuse(f"PRECONDITION_FAILED - {error}")

    def _on_close(self, _: Any, reason: Exception) -> None:
        waited = self._order.drop()
        if waited:
            logger.warning("%d calls that waited went with channel %d", waited, int(self))
        for clean_up in self._at_close:
            clean_up()
        if (
            self._refusal is not None
            and isinstance(reason, ChannelClosedByBroker)
            and str(rules.NO_SUCH_DELIVERY) in reason.reply_text
        ):
            reason = ChannelClosedByBroker(rules.PRECONDITION_FAILED, self._refusal)
            self._inner._closing_reason = reason
        for callback in list(self._close_callbacks):
            callback(self, reason)

    # Order, and knowing where we are

    def _in_order(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._order.idle:
            return call(*arguments, **options)
        self._check_open()

        def step(done: Done) -> None:
            call(*arguments, **options)
            done()

        return self._order.run(step)

    def _after(self, work: Callable[[], Any], then: Callable[[], Any]) -> Step:
        """A call that has to wait for blocking work, which is done in another thread."""

        def step(done: Done) -> None:
            def go_on(error: Exception | None) -> None:
                if error is not None:
                    raise error
                then()
                done()

            off_loop(
                self._channel.connection,
                work,
                lambda _, error: self._resume(lambda: go_on(error)),
            )

        return step

    def _resume(self, call: Callable[[], None]) -> None:
        """Go on with what was deferred, unless the channel is gone."""
        if self._channel.is_open:
            try:
                call()
            except Exception as error:
                self._fail(error)

    def _check_open(self) -> None:
        if self._close_asked and self._channel.is_open:
            raise ChannelWrongStateError("Channel is closing.")
        self._inner._raise_if_not_open()

    def _map(self, name: str | None) -> ShardMap | None:
        # To ask a topology that is not ready would block.
        return self._topology.shard_map(name) if name and self._ready else None

    def _wait_for_topology(self, done: Done) -> None:
        def ready() -> None:
            self._ready = True

        timeout = self._topology.options.connect_timeout * 2
        self._after(lambda: self._topology.wait_until_ready(timeout), ready)(done)

    def _locate(self, then: Callable[[], None]) -> None:
        """Call `then` when the node that the connection is on is known."""
        if self._node is not None:
            then()
            return
        connection = self._channel.connection
        peer = peer_of(connection)

        def known(node: str | None) -> None:
            self._node = node
            if node is None:
                raise Unreachable("the node of this connection is in no shard map; give node=…")
            then()

        def replied(reply_to: str | None) -> None:
            known(node_with_token(reply_to, self._topology.nodes()) if reply_to else None)

        def looked_up(node: str | None, error: Exception | None) -> None:
            if error is not None:
                raise error
            if node is not None:
                known(node)
            else:
                ask_reply_to(
                    connection,
                    self._confirm_timeout,
                    lambda reply_to: self._resume(lambda: replied(reply_to)),
                )

        # A node's address may be a name, and looking that up may take its time.
        off_loop(
            connection,
            lambda: node_at(peer, self._topology.nodes()),
            lambda node, error: self._resume(lambda: looked_up(node, error)),
        )
