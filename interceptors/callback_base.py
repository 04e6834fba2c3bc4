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
from typing import Any, NoReturn, TypeVar

import pika
from pika.channel import Channel
from pika.exceptions import ChannelClosedByBroker, ChannelWrongStateError
from pika.spec import Channel as ChannelMethods

from interceptors import method_rules
from interceptors.call_order import Answer, CallOrder, Done, InTurn, Steps, Work
from interceptors.calls import Calls
from interceptors.method_rules import Placement
from sharding.amqp.connected_node import REPLY_TO, peer_of
from sharding.cluster.topology import Topology
from sharding.maps.shard_map import ShardMap

logger = logging.getLogger("warren.channel")

T = TypeVar("T")

OnMessage = Callable[[Any, Any, pika.BasicProperties, bytes], Any]
OnFrame = Callable[[Any], Any]

ANSWER_TIMEOUT = 30.0
"""How long calls wait behind one that the broker does not answer."""


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
        self,
        channel: Channel,
        topology: Topology,
        placement: Placement | str,
        confirm_timeout: float,
        node: str | None,
    ) -> None:
        # pika's own bookkeeping, which has no public face.
        self._inner: Any = channel
        self._channel = channel
        self._topology = topology
        self._confirm_timeout = confirm_timeout
        self._order = CallOrder(self._fail)
        connection: Any = channel.connection
        self._steps = Steps(
            connection._adapter_add_callback_threadsafe, connection._adapter_call_later
        )
        port = CallbackPort(connection, self._steps, self._refuse, self._routed, confirm_timeout)
        self._calls = Calls(port, topology, placement, node)
        self._refusal: str | None = None
        self._close_asked = False
        self._close_callbacks: list[Callable[..., Any]] = []
        self._at_close: list[Callable[[], None]] = [self._steps.stop]
        channel.add_on_close_callback(self._on_close)
        if not topology.is_ready:
            self._run(self._wait_for_topology)

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
            self._inner._rpc(InTurn(method_rules.NO_SUCH_DELIVERY))
        elif not (self._channel.is_closing or self._channel.is_closed):
            self._inner.add_callback(lambda _: self._refuse(text), [ChannelMethods.OpenOk])

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
            and str(method_rules.NO_SUCH_DELIVERY) in reason.reply_text
        ):
            reason = ChannelClosedByBroker(method_rules.PRECONDITION_FAILED, self._refusal)
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

    def _run(
        self,
        call: Callable[[Done], Work[T]],
        then: Callable[[T], Any] | None = None,
    ) -> None:
        """Make a call in its turn, and be through with it when it ends, or says so before.

        `then` is the application's, and gets the call's result.
        """

        def step(done: Done) -> None:
            def through(result: T) -> None:
                done()
                if then is not None:
                    then(result)

            self._steps.run(call(done), self._fail, through)

        self._order.run(step)

    async def _ask(
        self, through: Done, method: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call a method of the channel that has a `callback`; the frame that answers it.

        A node that hangs never answers; the calls behind this one then go on without it.
        """
        connection: Any = self._channel.connection
        answer: Answer[Any] = Answer()
        timer = connection._adapter_call_later(ANSWER_TIMEOUT, through)
        try:
            method(*arguments, **options, callback=answer.give)
            return await answer
        finally:
            connection._adapter_remove_timeout(timer)

    async def _routed(self, exchange: str) -> None:
        """Return when the broker has routed all that was published to the exchange here."""
        await self._ask(lambda: None, self._channel.exchange_declare, exchange, passive=True)

    def _check_open(self) -> None:
        if self._close_asked and self._channel.is_open:
            raise ChannelWrongStateError("Channel is closing.")
        self._inner._raise_if_not_open()

    def _map(self, name: str | None) -> ShardMap | None:
        # To ask a topology that is not ready would block; while it is not, no call has its turn.
        return self._topology.shard_map(name) if name and self._topology.is_ready else None

    async def _wait_for_topology(self, _: Done) -> None:
        await self._steps.wait(self._topology.futures.ready(self._topology.options.start_timeout))


class CallbackPort:
    """What calls need of a callback channel (`calls.Port`)."""

    def __init__(
        self,
        connection: Any,
        steps: Steps,
        refuse: Callable[[str], None],
        routed: Callable[[str], Work[None]],
        timeout: float,
    ) -> None:
        self._connection = connection
        self.routed = routed
        self._refuse = refuse
        self._timeout = timeout
        self.wait = steps.wait

    async def refuse(self, text: str) -> NoReturn:
        self._refuse(text)
        # The channel closes, and ends whatever waits on it.
        await Answer[None]()
        raise AssertionError

    async def connection(self) -> tuple[object, tuple[str, int] | None]:
        return self._connection, peer_of(self._connection)

    async def reply_to(self) -> str | None:
        answer: Answer[str | None] = Answer()

        def ask(opened: Any) -> None:
            opened.basic_consume(REPLY_TO, lambda *_: None, auto_ack=True)
            opened.basic_publish(
                "", "warren.nobody", b"", pika.BasicProperties(reply_to=REPLY_TO), mandatory=True
            )

        channel = self._connection.channel(on_open_callback=ask)
        channel.add_on_return_callback(
            lambda _, __, properties, ___: answer.give(properties.reply_to)
        )
        channel.add_on_close_callback(lambda *_: answer.give(None))
        timer = self._connection._adapter_call_later(self._timeout, lambda: answer.give(None))
        try:
            return await answer
        finally:
            self._connection._adapter_remove_timeout(timer)
            if channel.is_open:
                channel.close()
