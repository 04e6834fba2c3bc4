"""pika's asynchronous connection as awaitables, for the control plane's own loop.

Thin: it turns callbacks into results and a closed channel or connection into the error that closed
it. Deadlines are the caller's, with `asyncio.timeout`.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import logging
from typing import Any

import pika
import pika.channel
import pika.exceptions
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.adapters.utils.connection_workflow import (
    AMQPConnectionWorkflowAborted,
    AMQPConnectorAborted,
)

from sharding.amqp_channel import ACCESS_REFUSED as ACCESS_REFUSED
from sharding.amqp_channel import REPLY_TO as REPLY_TO
from sharding.amqp_channel import Channel as Channel
from sharding.amqp_channel import Declared as Declared
from sharding.amqp_channel import Message as Message
from sharding.amqp_channel import Refused as Refused
from sharding.amqp_channel import innermost, reason, settle
from sharding.errors import Unreachable


class Session:
    """One open connection. `lost` is done when it is closed, for whatever reason."""

    def __init__(
        self, connection: AsyncioConnection, lost: asyncio.Future[str], where: str
    ) -> None:
        self._connection = connection
        self.lost = lost
        self.where = where
        """The address that was dialled, as `host:port`."""

    @classmethod
    async def open(cls, parameters: pika.ConnectionParameters, timeout: float) -> Session:
        """Connect, or raise `Unreachable` with the reason; no secret is in it."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        lost: asyncio.Future[str] = loop.create_future()

        def failed(_: Any, error: BaseException | str) -> None:
            if not opened.done():
                opened.set_exception(Unreachable(f"{_where(parameters)}: {reason(error)}"))

        connection = AsyncioConnection(
            parameters,
            on_open_callback=lambda _: settle(opened, None),
            on_open_error_callback=failed,
            on_close_callback=lambda _, why: settle(lost, reason(why)),
            custom_ioloop=loop,
        )
        try:
            async with asyncio.timeout(timeout):
                await opened
        except TimeoutError:
            _abort(connection)
            raise Unreachable(f"{_where(parameters)}: no answer within {timeout:g} s") from None
        except BaseException:  # cancelled: nobody else will close the socket
            _abort(connection)
            raise
        return cls(connection, lost, _where(parameters))

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
            raise Unreachable(reason(error)) from None
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
                _abort(self._connection)

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


def _close_late(opened: asyncio.Future[pika.channel.Channel]) -> None:
    if not opened.cancelled() and opened.exception() is None and opened.result().is_open:
        opened.result().close()


def node_token(reply_to: str) -> str:
    """The part of a direct reply-to address that names the node, the same for all connections.

    The address is `amq.rabbitmq.reply-to.<encoded pid>.<key>`, and the pid's node is
    `reply@<hash of the node's name>`, so the token also outlives a restart of the node.
    """
    pid = base64.b64decode(reply_to.removeprefix(f"{REPLY_TO}.").partition(".")[0])
    start = pid.index(b"reply@")
    length = int.from_bytes(pid[start - 2 : start])
    return pid[start : start + length].decode()


class _GivenUp(pika.exceptions.AMQPError):
    """We dropped the connection, and whoever waited for it has been told why."""


def _abort(connection: Any) -> None:
    """Drop the socket of a connection that does not answer.

    pika's own end of a stream: it wants a reason, or an assertion of its fails later on the loop.
    """
    if not connection.is_closed:
        connection._terminate_stream(_GivenUp("given up"))


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


def connection_parameters(url: str) -> pika.ConnectionParameters:
    """The parameters of an AMQP URL, with the control plane's own habits."""
    given = pika.URLParameters(url)
    return pika.ConnectionParameters(
        host=given.host,
        port=given.port,
        virtual_host=given.virtual_host,
        credentials=given.credentials,
        ssl_options=given.ssl_options,
        heartbeat=10,
        connection_attempts=1,
        client_properties={"connection_name": "warren control plane"},
    )


def same_but_at(
    parameters: pika.ConnectionParameters, host: str, port: int
) -> pika.ConnectionParameters:
    """The same credentials and habits at another address."""
    moved = copy.copy(parameters)
    moved.host, moved.port = host, port
    return moved
