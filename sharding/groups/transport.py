"""What a group needs of an AMQP client, and the same from pika.

The group's own code runs on an asyncio loop and asks for no more than this, so that it is the same
over pika (in a thread of its own) and over aio-pika (on the application's loop).
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import pika
import pika.channel

from sharding.amqp.session import Declared, Message, Session


class GroupChannel(Protocol):
    """See `amqp_channel.Channel`. A question that is refused raises `Refused`."""

    @property
    def closed(self) -> asyncio.Future[str]: ...

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...

    async def declare(
        self,
        queue: str,
        *,
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> Declared: ...

    async def declare_exchange(
        self,
        exchange: str,
        kind: str = "direct",
        *,
        passive: bool = False,
        durable: bool = True,
        auto_delete: bool = False,
    ) -> None: ...

    async def bind(self, queue: str, exchange: str, routing_key: str) -> None: ...

    async def qos(self, prefetch: int) -> None: ...

    async def consume(
        self,
        queue: str,
        on_message: Callable[[Message], None],
        *,
        no_ack: bool = False,
        exclusive: bool = False,
    ) -> None: ...

    def ack(self, delivery_tag: int, multiple: bool = False) -> None: ...

    async def confirm_publishes(self) -> None: ...

    async def publish_mandatory(
        self, routing_key: str, body: bytes, properties: pika.BasicProperties
    ) -> bool: ...

    def send(
        self, exchange: str, routing_key: str, body: bytes, properties: pika.BasicProperties
    ) -> None: ...


class GroupSession(Protocol):
    """One open connection; see `amqp.Session`."""

    @property
    def lost(self) -> asyncio.Future[str]: ...

    @property
    def is_open(self) -> bool: ...

    async def channel(self) -> GroupChannel: ...

    async def close(self, timeout: float = 2) -> None: ...


Opener = Callable[[pika.ConnectionParameters, float], Awaitable[GroupSession]]
"""Connects within so many seconds, or raises `Unreachable`."""


class _QuietRefusals(logging.Filter):
    """Keeps pika from warning that a shard is in exclusive use by a worker's own probing.

    For a group that is an answer, not a fault: each lock is tried once, and a shard that another
    worker holds is tried again and again.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        if not any("in exclusive use" in arg for arg in args if isinstance(arg, str)):
            return True
        connections = [arg.connection for arg in args if isinstance(arg, pika.channel.Channel)]
        names = [str(each.params.client_properties) for each in connections]
        return not any(WORKER_NAME in name for name in names)


WORKER_NAME = "warren worker"
logging.getLogger("pika.channel").addFilter(_QuietRefusals())


async def open_with_pika(parameters: pika.ConnectionParameters, timeout: float) -> GroupSession:
    return await Session.open(parameters, timeout)


def for_a_worker(
    parameters: pika.ConnectionParameters, name: str, heartbeat: int
) -> pika.ConnectionParameters:
    """The same address and credentials, with a worker's heartbeat and name."""
    own = copy.copy(parameters)
    own.heartbeat = heartbeat
    own.client_properties = {"connection_name": f"{WORKER_NAME} {name}"}
    return own
