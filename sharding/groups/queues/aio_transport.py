"""What a group needs of an AMQP client, from aio-pika. Thin I/O.

Connections and channels are aio-pika's plain ones: a robust channel would take a lost lock again
behind the group's back. Two things differ from pika: a published message without an id gets one
(aiormq finds returned messages by it), and acknowledgements are written by a task of their own.
"""

from __future__ import annotations

import asyncio
import calendar
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import aio_pika
import aiormq
import aiormq.abc
import pika
from pamqp import commands

from sharding.amqp.session import Declared, Message, Refused
from sharding.errors import RemoteError, Unreachable
from sharding.groups.queues.connections import GroupChannel, GroupSession

_NAMES = {"type": "message_type"}
"""Properties whose names differ between pika and pamqp."""
_RESERVED = {"cluster_id"}
"""Of no use in AMQP 0-9-1; pamqp refuses to send it, and reads it as an empty text."""
_GONE = (aiormq.exceptions.AMQPError, OSError, RuntimeError)
"""What aio-pika raises where a channel or a connection is refused, lost or closed already."""
_CODES: dict[type[BaseException], int] = {
    aiormq.exceptions.ChannelAccessRefused: 403,
    aiormq.exceptions.ChannelNotFoundEntity: 404,
    aiormq.exceptions.ChannelLockedResource: 405,
    aiormq.exceptions.ChannelPreconditionFailed: 406,
}
NO_ROUTE = 312


async def open_with_aio_pika(parameters: pika.ConnectionParameters, timeout: float) -> GroupSession:
    credentials: Any = parameters.credentials
    tls = parameters.ssl_options
    where = f"{parameters.host}:{parameters.port}"
    try:
        async with asyncio.timeout(timeout):
            connection = await aio_pika.connect(
                host=parameters.host,
                port=parameters.port,
                login=credentials.username,
                password=credentials.password,
                virtualhost=parameters.virtual_host,
                ssl=tls is not None,
                ssl_context=tls.context if tls is not None else None,
                client_properties=parameters.client_properties,
                heartbeat=parameters.heartbeat,
            )
    except TimeoutError:
        raise Unreachable(f"{where}: no answer within {timeout:g} s") from None
    except (aiormq.exceptions.AMQPError, OSError) as error:
        raise Unreachable(f"{where}: {_reason(error)}") from None
    return AioSession(connection)


class AioSession:
    """See `amqp.Session`."""

    def __init__(self, connection: aio_pika.abc.AbstractConnection) -> None:
        self._connection = connection
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        connection.close_callbacks.add(self._on_close)

    @property
    def is_open(self) -> bool:
        return not self.lost.done() and not self._connection.is_closed

    async def channel(self) -> GroupChannel:
        if not self.is_open:
            raise Unreachable("the connection is closed")
        try:
            # Confirms can only be chosen here, and cost nothing where nothing is published.
            channel = await self._connection.channel(publisher_confirms=True)
            return AioChannel(channel, await channel.get_underlay_channel())
        except _GONE as error:
            raise Unreachable(_reason(error)) from None

    async def close(self, timeout: float = 2) -> None:
        with suppress(*_GONE, TimeoutError):  # it is gone, or will be when the process is
            async with asyncio.timeout(timeout):
                await self._connection.close()
        if not self.lost.done():
            self.lost.set_result("closed")

    def _on_close(self, _: Any, error: BaseException | None) -> None:
        if not self.lost.done():
            self.lost.set_result(_reason(error) if error else "closed")


class AioChannel:
    """See `amqp_channel.Channel`."""

    def __init__(
        self, channel: aio_pika.abc.AbstractChannel, under: aiormq.abc.AbstractChannel
    ) -> None:
        self._channel = channel
        self._under = under
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions: set[asyncio.Future[Any]] = set()
        self._acks: deque[tuple[int, bool]] = deque()
        self.closed: asyncio.Future[str] = self._loop.create_future()
        channel.close_callbacks.add(self._on_close)

    def close(self) -> None:
        self._spawn(self._channel.close())

    async def wait_closed(self) -> None:
        if self._tasks:  # acknowledgements that are not written yet
            await asyncio.wait(self._tasks)
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
        found = await self._ask(
            self._under.queue_declare(
                queue,
                passive=passive,
                durable=durable,
                exclusive=exclusive,
                arguments=dict(arguments or {}),
            )
        )
        return Declared(found.queue, found.message_count, found.consumer_count)

    async def declare_exchange(
        self,
        exchange: str,
        kind: str = "direct",
        *,
        passive: bool = False,
        durable: bool = True,
        auto_delete: bool = False,
    ) -> None:
        await self._ask(
            self._under.exchange_declare(
                exchange=exchange,
                exchange_type=kind,
                passive=passive,
                durable=durable,
                auto_delete=auto_delete,
            )
        )

    async def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        await self._ask(self._under.queue_bind(queue, exchange, routing_key))

    async def qos(self, prefetch: int) -> None:
        await self._ask(self._under.basic_qos(prefetch_count=prefetch))

    async def consume(
        self,
        queue: str,
        on_message: Callable[[Message], None],
        *,
        no_ack: bool = False,
        exclusive: bool = False,
    ) -> None:
        async def deliver(message: aiormq.abc.DeliveredMessage) -> None:
            on_message(
                Message(
                    bytes(message.body),
                    to_pika(message.header.properties),
                    message.delivery_tag or 0,
                    message.routing_key or "",
                    bool(message.redelivered),
                )
            )

        self._under.on_consumer_cancel_callbacks.add(lambda _: self.close())
        await self._ask(
            self._under.basic_consume(queue, deliver, no_ack=no_ack, exclusive=exclusive)
        )

    def ack(self, delivery_tag: int, multiple: bool = False) -> None:
        self._acks.append((delivery_tag, multiple))
        if len(self._acks) == 1:  # else a task is at them already
            self._spawn(self._acknowledge())

    async def _acknowledge(self) -> None:
        """One task for all that come together: a task for each took most of the time."""
        while self._acks and not self.closed.done():
            tag, multiple = self._acks[0]
            await self._under.basic_ack(tag, multiple, wait=False)
            self._acks.popleft()
        self._acks.clear()

    async def confirm_publishes(self) -> None:
        """It does already."""

    def send(
        self, exchange: str, routing_key: str, body: bytes, properties: pika.BasicProperties
    ) -> None:
        if not self.closed.done():
            publishing = self._under.basic_publish(
                body,
                exchange=exchange,
                routing_key=routing_key,
                properties=to_pamqp(properties),
                timeout=5,
            )
            self._spawn(publishing)

    async def publish_mandatory(
        self, routing_key: str, body: bytes, properties: pika.BasicProperties
    ) -> bool:
        try:
            answer = await self._ask(
                self._under.basic_publish(
                    body, routing_key=routing_key, properties=to_pamqp(properties), mandatory=True
                )
            )
        except aiormq.exceptions.DeliveryError:  # a nack
            return False
        if isinstance(answer, aiormq.abc.DeliveredMessage):
            raise Refused(NO_ROUTE, "NO_ROUTE")
        return isinstance(answer, commands.Basic.Ack)

    async def _ask(self, question: Awaitable[Any]) -> Any:
        """Whoever asks may be cancelled, the question is not: aiormq warns of that in the log.

        It ends with the answer or with the channel, which whoever gave up closes.
        """
        asked = asyncio.ensure_future(question)
        self._questions.add(asked)
        asked.add_done_callback(self._on_answer)
        await asyncio.wait([asked])
        try:
            return asked.result()
        except aiormq.exceptions.DeliveryError:
            raise
        except _GONE as error:
            raise _translated(error) from None

    def _on_answer(self, asked: asyncio.Future[Any]) -> None:
        self._questions.discard(asked)
        if not asked.cancelled():
            asked.exception()  # else asyncio complains where nobody waits for it any more

    def _spawn(self, work: Awaitable[Any]) -> None:
        """Do it later; a failure means that the channel is gone, which `closed` tells."""

        async def carefully() -> None:
            with suppress(*_GONE, TimeoutError):
                await work

        task = self._loop.create_task(carefully())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_close(self, _: Any, error: BaseException | None) -> None:
        if not self.closed.done():
            self.closed.set_result(_reason(error) if error else "closed")


def to_pika(given: Any) -> pika.BasicProperties:
    """pamqp's properties as pika's: handlers and dead letters know these only."""
    properties = pika.BasicProperties()
    for name in vars(properties).keys() - _RESERVED:
        value = getattr(given, _NAMES.get(name, name), None)
        if name == "timestamp" and isinstance(value, datetime):
            value = calendar.timegm(value.utctimetuple())
        setattr(properties, name, value)
    return properties


def to_pamqp(given: pika.BasicProperties) -> commands.Basic.Properties:
    names = vars(given).keys() - _RESERVED
    values = {_NAMES.get(name, name): getattr(given, name) for name in names}
    if values.get("timestamp") is not None:
        values["timestamp"] = datetime.fromtimestamp(values["timestamp"], UTC)
    return commands.Basic.Properties(**values)


def _translated(error: BaseException) -> RemoteError:
    code = _CODES.get(type(error))
    return Refused(code, _reason(error)) if code else Unreachable(_reason(error))


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
