"""pika's asynchronous connection and its channels as awaitables, on whatever loop is current.

Thin: it turns callbacks into results and a closed channel or connection into the error that closed
it. Deadlines are the caller's, with `asyncio.timeout`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pika
import pika.channel
import pika.exceptions
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.adapters.utils.connection_workflow import (
    AMQPConnectionWorkflowAborted,
    AMQPConnectionWorkflowFailed,
    AMQPConnectorAborted,
)

from sharding.amqp.connected_node import REPLY_TO, node_token
from sharding.amqp.content_header import room_in_frame
from sharding.amqp.received import ReceivedProperties, read_frame
from sharding.errors import RemoteError, Unreachable, reason

_DROP_TIMEOUT = 1.0
INSTANCE = "instance"
"""The client property by which a connection is told from all others."""


class Session:
    """One open connection. `lost` is done when it is closed, for whatever reason."""

    def __init__(
        self, connection: AsyncioConnection, lost: asyncio.Future[str], where: str, instance: str
    ) -> None:
        self._connection = connection
        self.lost = lost
        self.where = where
        """The address that was dialled, as `host:port`."""
        self.instance = instance
        """What the broker knows this connection by, and nobody else has."""
        self.is_blocked = False
        """Whether the broker, short of memory or disk, reads nothing more of it that publishes."""
        connection.add_on_connection_blocked_callback(lambda *_: self._note_blocked(True))
        connection.add_on_connection_unblocked_callback(lambda *_: self._note_blocked(False))

    @classmethod
    async def open(cls, parameters: pika.ConnectionParameters, timeout: float) -> Session:
        """Connect, or raise `Unreachable` with the reason; no secret is in it."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        lost: asyncio.Future[str] = loop.create_future()
        instance = secrets.token_hex(8)
        parameters = copy.copy(parameters)
        parameters.client_properties = {**(parameters.client_properties or {}), INSTANCE: instance}

        def failed(_: Any, error: BaseException | str) -> None:
            settle(lost, said_by_pika(error))
            if not opened.done():
                opened.set_exception(Unreachable(f"{_where(parameters)}: {said_by_pika(error)}"))

        connection = _Connection(
            parameters,
            on_open_callback=lambda _: settle(opened, None),
            on_open_error_callback=failed,
            on_close_callback=lambda _, why: settle(lost, said_by_pika(why)),
            custom_ioloop=loop,
        )
        try:
            async with asyncio.timeout(timeout):
                await opened
        except TimeoutError:
            await _drop(connection, lost)
            raise Unreachable(f"{_where(parameters)}: no answer within {timeout:g} s") from None
        except BaseException:  # cancelled: nobody else will close the socket
            await _drop(connection, lost)
            raise
        return cls(connection, lost, _where(parameters), instance)

    def _note_blocked(self, is_blocked: bool) -> None:
        self.is_blocked = is_blocked

    @property
    def is_open(self) -> bool:
        return bool(self._connection.is_open)

    async def channel(self) -> Channel:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[pika.channel.Channel] = loop.create_future()
        if not self.is_open:
            raise Unreachable("the connection is closed")
        try:
            self._connection.channel(on_open_callback=lambda ch: settle(opened, ch))
        except pika.exceptions.AMQPError as error:  # no channel number is free, say
            raise Unreachable(said_by_pika(error)) from None
        try:
            return Channel(await self._or_lost(opened))
        except asyncio.CancelledError:
            # It may open yet, and nobody would close it.
            self._connection.ioloop.call_soon(opened.add_done_callback, _close_late)
            raise

    async def close(self, timeout: float = 2) -> None:
        """Close in order within `timeout`, or by dropping the socket."""
        try:
            if not self.lost.done():
                if self._connection.is_open:
                    self._connection.close()
                await asyncio.wait([self.lost], timeout=timeout)
        finally:
            if not self.lost.done():
                await _drop(self._connection, self.lost)

    @property
    def cluster_name(self) -> str:
        """What the node calls its cluster: by its own name, unless somebody gave it one."""
        said = (self._connection.server_properties or {}).get("cluster_name", b"")
        return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)

    async def reply_token(self) -> str:
        """What tells the connected node from others: see `Node.reply_token`.

        A mandatory message that nobody takes comes back with its reply-to filled in, and there the
        node has written a hash of its name. It needs no queue and no right beyond publishing.
        """
        channel = await self.channel()
        try:
            await channel.consume(REPLY_TO, lambda _: None, no_ack=True)
            return node_token(await channel.returned_reply_to())
        finally:
            channel.close()

    async def _or_lost(self, wanted: asyncio.Future[Any]) -> Any:
        await asyncio.wait([wanted, self.lost], return_when=asyncio.FIRST_COMPLETED)
        if wanted.done():
            return wanted.result()
        wanted.cancel()
        raise Unreachable(f"the connection was lost: {self.lost.result()}")


class _Channel(pika.channel.Channel):
    """Closes in one step: the broker requeues what is out and frees the queue at the same moment.

    pika cancels consumers before it closes their channel. That frees a queue that was read
    exclusively while messages are out, and the next reader may get later ones before them: seen in
    8 of 60 rounds with readers that waited for it.
    """

    _cancelled: set[str]
    _consumers: dict[str, Any]

    def close(self, reply_code: int = 0, reply_text: str = "Normal shutdown") -> None:
        self._cancelled.update(self._consumers)  # so that pika has none left to cancel
        super().close(reply_code, reply_text)


class _Connection(AsyncioConnection):
    _frame_buffer: bytes

    def _create_channel(
        self, channel_number: int, on_open_callback: Callable[[pika.channel.Channel], object]
    ) -> pika.channel.Channel:
        return _Channel(self, channel_number, on_open_callback)

    def _read_frame(self) -> tuple[int, Any]:
        return read_frame(self._frame_buffer)


def _close_late(opened: asyncio.Future[pika.channel.Channel]) -> None:
    if not opened.cancelled() and opened.exception() is None and opened.result().is_open:
        opened.result().close()


class _GivenUp(pika.exceptions.AMQPError):
    """We dropped the connection, and whoever waited for it has been told why."""


async def _drop(connection: Any, lost: asyncio.Future[str]) -> None:
    """Drop the socket of a connection that does not answer, and wait until it is closed.

    pika's own end of a stream: it wants a reason, or an assertion of its fails later on the loop.
    It takes a few turns of the loop; if that was stopped at once, the socket would stay open.
    """
    while _has_looked_up(connection):
        await asyncio.sleep(0)
    if not connection.is_closed:
        connection._terminate_stream(_GivenUp("given up"))
        await asyncio.wait([lost], timeout=_DROP_TIMEOUT)


def _has_looked_up(connection: Any) -> bool:
    """Whether a host was looked up and pika has not dealt with it yet, which it does next.

    Given up at that moment, pika goes on to connect, and forgets the socket.
    """
    task = getattr(connection._connection_workflow, "_task_ref", None)
    looking_up = getattr(task, "_future", None)
    return looking_up is not None and bool(looking_up.done())


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record of pika's tells more than that this side gave a connection up.

    It calls that an error, four times: a worker that is stopped while it connects would seem to
    have failed.
    """
    ours = (_GivenUp, AMQPConnectorAborted, AMQPConnectionWorkflowAborted)
    errors = (each for each in record.args or () if isinstance(each, BaseException))
    return not any(isinstance(innermost(error), ours) for error in errors)


for _name in ("pika.adapters.utils.connection_workflow", "pika.adapters.base_connection"):
    logging.getLogger(_name).addFilter(_is_news)


def _where(parameters: pika.ConnectionParameters) -> str:
    return f"{parameters.host}:{parameters.port}"


ACCESS_REFUSED = 403
"""A right is missing, or a queue is in exclusive use by another."""
PRECONDITION_FAILED = 406
"""It is there, and something else."""
NOT_FOUND = 404
NO_ROUTE = 312
"""A message that had to reach a queue reached none, and came back."""


class Refused(RemoteError):
    """The broker closed the channel; `code` and `text` are its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class Declared:
    name: str
    messages: int
    consumers: int


@dataclass(frozen=True, slots=True)
class Message:
    body: bytes
    properties: pika.BasicProperties
    delivery_tag: int
    routing_key: str = ""
    redelivered: bool = False
    raw: bytes = b"\0\0"
    """The properties as they came, whatever becomes of `properties` in other hands."""
    exchange: str = ""
    """Through which exchange it came, by the broker's word."""


class Channel:
    """One channel; a question that the broker answers by closing it raises `Refused`."""

    def __init__(self, channel: pika.channel.Channel) -> None:
        self._channel = channel
        self._waiting: set[asyncio.Future[Any]] = set()
        self._confirms: dict[int, asyncio.Future[Any]] = {}
        self._published = 0
        self._returned: str | None = None
        self.refused: Refused | None = None
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the channel is closed, with the reason."""
        channel.add_on_close_callback(self._on_close)

    @property
    def is_open(self) -> bool:
        return bool(self._channel.is_open)

    @property
    def frame_max(self) -> int:
        """The largest frame, as the connection has agreed on it."""
        size: int = self._channel.connection.params.frame_max
        return size

    @property
    def room_for_properties(self) -> int:
        """How many bytes the properties of a message sent here may have."""
        return room_in_frame(self.frame_max)

    def close(self) -> None:
        """Ask for it to be closed; the answer is not waited for."""
        if self._channel.is_open:
            self._channel.close()

    async def wait_closed(self) -> None:
        """Close it and wait for the answer: the broker has requeued what was not acknowledged."""
        self.close()
        await asyncio.shield(self.closed)

    async def declare(
        self,
        queue: str,
        *,
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> Declared:
        frame = await self._ask(
            self._channel.queue_declare,
            queue=queue,
            passive=passive,
            durable=durable,
            exclusive=exclusive,
            arguments=dict(arguments or {}),
        )
        method = frame.method
        return Declared(method.queue, method.message_count, method.consumer_count)

    async def declare_exchange(
        self,
        exchange: str,
        kind: str = "direct",
        *,
        passive: bool = False,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        await self._ask(
            self._channel.exchange_declare,
            exchange=exchange,
            exchange_type=kind,
            passive=passive,
            durable=durable,
            auto_delete=auto_delete,
            internal=internal,
            arguments=dict(arguments or {}),
        )

    async def bind_exchange(self, destination: str, source: str, routing_key: str) -> None:
        await self._ask(
            self._channel.exchange_bind,
            destination=destination,
            source=source,
            routing_key=routing_key,
        )

    async def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        await self._ask(
            self._channel.queue_bind, queue=queue, exchange=exchange, routing_key=routing_key
        )

    async def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        await self._ask(
            self._channel.queue_unbind, queue=queue, exchange=exchange, routing_key=routing_key
        )

    async def delete_empty(self, queue: str) -> None:
        """Delete a queue that has no message and no consumer; refuse (406) any other."""
        await self._ask(self._channel.queue_delete, queue=queue, if_unused=True, if_empty=True)

    def delete_soon(self, queue: str) -> None:
        """Delete a queue, without an answer and without a wait."""
        if self.is_open:
            self._channel.queue_delete(queue)

    async def delete_exchange(self, exchange: str, *, if_unused: bool = False) -> None:
        await self._ask(self._channel.exchange_delete, exchange=exchange, if_unused=if_unused)

    async def qos(self, prefetch: int) -> None:
        await self._ask(self._channel.basic_qos, prefetch_count=prefetch)

    async def consume(
        self,
        queue: str,
        on_message: Callable[[Message], None],
        *,
        no_ack: bool = False,
        exclusive: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """A consumer that the broker cancels, because its queue is gone, closes the channel."""

        def deliver(_: Any, method: Any, properties: ReceivedProperties, body: bytes) -> None:
            tag, key = method.delivery_tag, method.routing_key
            raw = properties.raw
            exchange = method.exchange
            on_message(Message(body, properties, tag, key, method.redelivered, raw, exchange))

        self._channel.add_on_cancel_callback(lambda _: self.close())

        await self._ask(
            self._channel.basic_consume,
            queue=queue,
            on_message_callback=deliver,
            auto_ack=no_ack,
            exclusive=exclusive,
            arguments=dict(arguments or {}),
        )

    def ack(self, delivery_tag: int, multiple: bool = False) -> None:
        if self._channel.is_open:
            self._channel.basic_ack(delivery_tag, multiple)

    def on_return(self, callback: Callable[[str, bytes], None]) -> None:
        """Have the key and body of each message that comes back."""
        self._channel.add_on_return_callback(
            lambda _, method, __, body: callback(method.routing_key or "", body)
        )

    async def confirm_publishes(self) -> None:
        def confirmed(frame: Any) -> None:
            stored = isinstance(frame.method, pika.spec.Basic.Ack)
            tag = frame.method.delivery_tag
            for number in [
                n for n in self._confirms if n == tag or (frame.method.multiple and n < tag)
            ]:
                future = self._confirms.pop(number)
                settle(future, stored)

        self._channel.add_on_return_callback(self._on_return)
        await self._ask(self._channel.confirm_delivery, ack_nack_callback=confirmed)

    def send(
        self, exchange: str, routing_key: str, body: bytes, properties: pika.BasicProperties
    ) -> None:
        """Publish on a channel without confirms; a hint, so nobody is told when it is lost."""
        if self._channel.is_open:
            self._channel.basic_publish(exchange, routing_key, body, properties)

    async def publish_mandatory(
        self,
        routing_key: str,
        body: bytes,
        properties: pika.BasicProperties,
        *,
        exchange: str = "",
    ) -> bool:
        """Publish to the queue of this name, or through an exchange; `Refused` (312) if there is
        no queue.

        One at a time on a channel: a confirm may stand for several messages, so a return could not
        be told from that of another one.
        """
        self._returned = None
        stored = await self.publish(exchange, routing_key, body, properties, mandatory=True)
        if self._returned is not None:
            raise Refused(NO_ROUTE, self._returned)
        return stored

    async def publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes,
        properties: pika.BasicProperties,
        *,
        mandatory: bool = False,
    ) -> bool:
        """Publish on a channel that confirms; whether the broker says that it is stored."""
        if self.refused is not None or not self._channel.is_open:
            raise self.refused or Unreachable("the channel is closed")
        future = self._future()
        self._published += 1
        self._confirms[self._published] = future
        self._channel.basic_publish(exchange, routing_key, body, properties, mandatory)
        return bool(await self._answer(future))

    async def returned_reply_to(self) -> str:
        future = self._future()

        def returned(_: Any, __: Any, properties: pika.BasicProperties, ___: bytes) -> None:
            settle(future, properties.reply_to)

        self._channel.add_on_return_callback(returned)
        self._channel.basic_publish(
            "", "warren.nobody", b"", pika.BasicProperties(reply_to=REPLY_TO), mandatory=True
        )
        return str(await self._answer(future))

    async def _ask(self, method: Callable[..., Any], **arguments: Any) -> Any:
        if self.refused is not None or not self._channel.is_open:
            raise self.refused or Unreachable("the channel is closed")
        future = self._future()
        method(**arguments, callback=lambda frame: settle(future, frame))
        return await self._answer(future)

    def _future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        return future

    async def _answer(self, future: asyncio.Future[Any]) -> Any:
        try:
            return await future
        finally:
            self._waiting.discard(future)

    def _on_return(self, _: Any, method: Any, __: Any, ___: bytes) -> None:
        self._returned = str(method.reply_text)

    def _on_close(self, _: Any, why: Exception) -> None:
        error: RemoteError
        if isinstance(why, pika.exceptions.ChannelClosedByBroker):
            error = self.refused = Refused(why.reply_code, why.reply_text)
        else:
            error = Unreachable(f"the channel was closed: {said_by_pika(why)}")
        settle(self.closed, str(error))
        for future in [*self._waiting, *self._confirms.values()]:
            if not future.done():
                future.set_exception(error)


def settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def said_by_pika(error: BaseException | str) -> str:
    """What pika says, on one line."""
    return " ".join(error.split()) if isinstance(error, str) else reason(innermost(error))


def innermost(error: BaseException) -> BaseException:
    """The cause of a failed connection, which pika wraps several times."""
    while (cause := _wrapped(error)) is not None:
        error = cause
    return error


def _wrapped(error: BaseException) -> BaseException | None:
    """What pika wrapped: each phase of connecting has an error, and so has their whole."""
    inside: Any = getattr(error, "exception", None)
    if isinstance(error, AMQPConnectionWorkflowFailed):
        inside = error.exceptions[-1] if error.exceptions else None
    elif isinstance(error, pika.exceptions.AMQPError) and error.args:
        inside = error.args[0]
    return inside if isinstance(inside, BaseException) else None
