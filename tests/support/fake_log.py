"""A broker that has nothing but the queue of the map log, for the I/O around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pika

from sharding.amqp.session import ACCESS_REFUSED, NO_ROUTE, Message, Refused, Session
from sharding.maps.map_log import LOG

CHUNK = 3


@dataclass
class FakeBroker:
    """Records lie in chunks. `may_write` names the exchanges that take records."""

    records: list[tuple[str, bytes]] = field(default_factory=list)
    may_write: tuple[str, ...] = (LOG, "warren.shard-maps.notes")
    is_bound: bool = True
    late: int = 0
    """How often the record before the last is called the last."""
    silent: bool = False
    """Whether nothing is sent before somebody has tried to write."""
    asked: list[str | int] = field(default_factory=list)
    """Where readings began."""
    removed: int = 0
    """How many records a retention has taken away."""
    made: int = 0
    is_open: bool = True
    chunk: int = CHUNK
    pause: float = 0.0
    """How many seconds pass before each record that is read from an offset on."""
    channels: list[FakeChannel] = field(default_factory=list)

    @property
    def session(self) -> Session:
        return cast(Session, self)

    async def channel(self) -> FakeChannel:
        channel = FakeChannel(self)
        self.channels.append(channel)
        return channel

    def append(self, body: bytes, exchange: str = LOG) -> None:
        self.records.append((exchange, body))
        self.push()

    def push(self) -> None:
        for channel in self.channels:
            asyncio.get_running_loop().call_soon(channel.deliver)

    def replace(self, *bodies: bytes) -> None:
        """Delete the log and make another."""
        for channel in self.channels:
            channel.close()
        self.records = [(LOG, body) for body in bodies]


class FakeChannel:
    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker
        self._next = 0
        self._prefetch = 0
        self._pause = 0.0
        self._unacknowledged = 0
        self._read: Callable[[Message], None] | None = None
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self.closed.done()

    def close(self) -> None:
        if self.is_open:
            self.closed.set_result("closed")

    async def declare(self, *_: Any, **__: Any) -> None: ...
    async def confirm_publishes(self) -> None: ...

    async def qos(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self.deliver()

    def ack(self, delivery_tag: int) -> None:
        assert 0 < delivery_tag <= self._next
        self._unacknowledged -= 1

    async def declare_exchange(self, *_: Any) -> None:
        self._broker.made += 1

    async def bind(self, *_: Any) -> None:
        self._broker.is_bound = True

    async def consume(self, _: str, on_message: Callable[[Message], None], **how: Any) -> None:
        broker, start = self._broker, how["arguments"]["x-stream-offset"]
        broker.asked.append(start)
        last = len(broker.records) - 1
        if start == "last":
            if broker.late:
                broker.late -= 1
                last -= 1
            self._next = max(0, last - last % broker.chunk)
        elif start == "first":
            self._next = 0
        else:
            self._next = start - start % broker.chunk if start <= last else start
            self._pause = broker.pause
        self._next = max(self._next, broker.removed)
        self._read = on_message
        if start == "last" and last < len(broker.records) - 1:
            self._deliver_up_to(last)
            self._read = None
        self._soon()

    def _soon(self) -> None:
        asyncio.get_running_loop().call_later(self._pause, self.deliver)

    def deliver(self) -> None:
        last = len(self._broker.records) - 1
        if self._broker.silent:
            return
        if self._pause and self._next < last:
            last = self._next
            self._soon()
        self._deliver_up_to(last)

    def _deliver_up_to(self, last: int) -> None:
        while self._read is not None and self.is_open and self._next <= last:
            if self._unacknowledged >= self._prefetch:
                return
            exchange, body = self._broker.records[self._next]
            properties = pika.BasicProperties(headers={"x-stream-offset": self._next})
            self._next += 1
            self._unacknowledged += 1
            self._read(Message(body, properties, self._next, exchange=exchange))

    async def publish_mandatory(self, _: str, body: bytes, __: Any, *, exchange: str) -> bool:
        broker = self._broker
        if broker.silent:
            broker.silent = False
            broker.push()
        if exchange not in broker.may_write:
            raise Refused(ACCESS_REFUSED, f"ACCESS_REFUSED - write access to '{exchange}' refused")
        if not broker.is_bound:
            raise Refused(NO_ROUTE, "NO_ROUTE")
        broker.append(body, exchange)
        return True
