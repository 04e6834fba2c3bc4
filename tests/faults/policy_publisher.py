"""Publishes to a name whose policy comes, changes and goes, and writes down what it was told.

    python -m tests.faults.policy_publisher KIND LOGICAL FILE URL...

Four threads or tasks publish at an even pace until SIGTERM, whatever they are told of their
messages; none is sent twice. A line is `what|thread|key|number|reason`, and what is one of
  S stored: the client was told so, R refused: surely not stored, U unknown whether it is,
  X the client got an error that it should not get.
A body is `kind|thread|number`; numbers grow by one with each message of a thread.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aio_pika
import pika
from aio_pika.exceptions import (
    AMQPConnectionError,
    ChannelClosed,
    DeliveryError,
    PublishError,
)
from pika.exceptions import ChannelClosedByBroker, NackError, UnroutableError

from interceptors import (
    AioShardedConnection,
    AsyncShardedConnection,
    Outcome,
    ShardedConnection,
    ShardedPublisher,
)
from sharding import InvalidInput, OutcomeUnknown, ShardUnavailable, Topology
from tests.cluster.waiting import PATIENCE
from tests.support import patient

THREADS = 4
KEYS = 7
AT_ONCE = 3
"""So many of a key are on their way at a time, on clients that need not wait for each."""
PACE = 1 / 20
"""Seconds between two turns of a thread: what is tested is the product, not the machine."""


CONNECTION_LOST = (AMQPConnectionError, RuntimeError)
"""What aio-pika raises then, and when a channel is closed: see `SharedChannel`."""


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    thread: int
    key: str
    number: int
    reason: str


def read_lines(text: str) -> list[Line]:
    found = []
    for line in text.splitlines():
        what, thread, key, number, reason = line.split("|", 4)
        found.append(Line(what, int(thread), key, int(number), reason))
    return found


@dataclass(frozen=True, slots=True)
class Message:
    kind: str
    thread: int
    number: int

    @property
    def key(self) -> str:
        return f"key-{self.number // AT_ONCE % KEYS}"

    @property
    def body(self) -> bytes:
        return f"{self.kind}|{self.thread}|{self.number}".encode()

    @property
    def mandatory(self) -> bool:
        """Half of them: what comes back unasked goes another way than what was asked for."""
        return self.number % 2 == 0


class Run:
    """What the clients of one process share."""

    def __init__(self, kind: str, logical: str, path: str, urls: list[str]) -> None:
        self.kind, self.logical, self.urls = kind, logical, urls
        self.topology = Topology(*urls, options=patient.TOPOLOGY)
        self.topology.wait_until_ready(PATIENCE)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.end = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self.end.set())

    def url_of(self, thread: int) -> str:
        return self.urls[thread % len(self.urls)]

    def turns(self, thread: int) -> Iterator[list[Message]]:
        """The next messages of a thread, all of one key, at each of its turns."""
        number = 0
        while not self.end.is_set():
            yield [Message(self.kind, thread, number + n) for n in range(AT_ONCE)]
            number += AT_ONCE

    def note(self, what: str, message: Message, reason: object = "") -> None:
        text = " ".join(str(reason).split()).replace("|", "/")
        line = f"{what}|{message.thread}|{message.key}|{message.number}|{text}\n"
        os.write(self._file, line.encode())

    def failed(self, message: Message, error: Exception, *, alone: bool = False) -> None:
        """`alone` if nothing else was on its way on the channel."""
        named = f"{type(error).__name__}: {error}"
        self.note(what_it_means(error, alone), message, named)


def what_it_means(error: Exception, alone: bool) -> str:
    if isinstance(error, ShardUnavailable | InvalidInput | UnroutableError | PublishError):
        return "R"
    if isinstance(error, OutcomeUnknown | NackError | DeliveryError):
        return "U"
    if isinstance(error, ChannelClosedByBroker | ChannelClosed) and "NOT_FOUND" in str(error):
        return "R" if alone else "U"  # it was this message that found no exchange, or another
    return "U" if isinstance(error, CONNECTION_LOST) else "X"


# pika's blocking channel: a thread has a connection of its own.


def publish_blocking(run: Run) -> None:
    def publish(thread: int) -> None:
        raw = pika.BlockingConnection(patient.parameters(run.url_of(thread)))
        connection = ShardedConnection(raw, run.topology, confirm_timeout=PATIENCE)
        channel: Any = None
        for messages in run.turns(thread):
            for message in messages:
                try:
                    if channel is None or not channel.is_open:
                        channel = connection.channel()
                        channel.confirm_delivery()
                    properties = pika.BasicProperties(delivery_mode=2)
                    channel.basic_publish(
                        run.logical, message.key, message.body, properties, message.mandatory
                    )
                except Exception as error:
                    run.failed(message, error, alone=True)
                else:
                    run.note("S", message)
            time.sleep(PACE)
        raw.close()

    in_threads(publish)


def in_threads(publish: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=publish, args=(number,)) for number in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


# The publisher: one, and a batch of it for each thread.


def publish_in_batches(run: Run) -> None:
    lock = threading.Lock()
    made: list[ShardedPublisher] = []

    def publisher() -> ShardedPublisher:
        with lock:
            if not made:
                made.append(ShardedPublisher(run.topology, run.logical, confirm_timeout=PATIENCE))
            return made[0]

    def publish(thread: int) -> None:
        batch: Any = None
        for messages in run.turns(thread):
            sent: dict[int, Message] = {}
            for message in messages:
                try:
                    batch = batch or publisher().batch()
                    sent[batch.publish(message.key, message.body)] = message
                except Exception as error:
                    run.failed(message, error)
            if sent:
                report = batch.flush(timeout=2 * PATIENCE)
                for result in report.not_stored:
                    what = "U" if result.outcome is Outcome.UNKNOWN else "R"
                    run.note(what, sent.pop(result.number), result.reason)
                for message in sent.values():
                    run.note("X" if report.pending else "S", message, report)
            time.sleep(PACE)

    in_threads(publish)
    for each in made:
        each.close()


# pika's callbacks: a channel for each, on one connection and its loop.


class Callbacks:
    """One channel after the other; what is on its way when one closes is unknown."""

    def __init__(self, run: Run, connection: Any, thread: int, ended: Callable[[], None]) -> None:
        self._run = run
        self._connection = connection
        self._turns = run.turns(thread)
        self._ended = ended
        self._unconfirmed: dict[int, Message] = {}
        self._last = 0
        self._channel: Any = None
        self._open()

    def _later(self, call: Callable[[], None]) -> None:
        self._connection.ioloop.call_later(PACE, call)

    def _open(self) -> None:
        self._last = 0
        self._channel = self._connection.channel(on_open_callback=self._opened)

    def _opened(self, channel: Any) -> None:
        channel.add_on_close_callback(self._closed)
        channel.confirm_delivery(self._confirmed, callback=lambda _: self._turn(channel))

    def _turn(self, channel: Any) -> None:
        if channel is not self._channel:
            return
        if not self._unconfirmed:
            messages = next(self._turns, None)
            if messages is None:
                channel.close()
                return
            for message in messages:
                self._publish(channel, message)
        self._later(lambda: self._turn(channel))

    def _publish(self, channel: Any, message: Message) -> None:
        properties = pika.BasicProperties(delivery_mode=2)
        what = (self._run.logical, message.key, message.body, properties, message.mandatory)
        try:
            channel.basic_publish(*what)
        except Exception as error:
            self._run.failed(message, error)
        else:
            self._last += 1
            self._unconfirmed[self._last] = message

    def _confirmed(self, frame: Any) -> None:
        tag, multiple = frame.method.delivery_tag, frame.method.multiple
        what = "S" if isinstance(frame.method, pika.spec.Basic.Ack) else "U"
        for each in [n for n in self._unconfirmed if n == tag or (multiple and n < tag)]:
            self._run.note(what, self._unconfirmed.pop(each), frame.method.NAME)

    def _closed(self, _: Any, reason: Exception) -> None:
        self._channel = None
        for message in self._unconfirmed.values():
            is_told = isinstance(reason, ChannelClosedByBroker)
            self._run.note("U" if is_told else "X", message, reason)
        self._unconfirmed.clear()
        if self._run.end.is_set():
            self._ended()
        else:
            self._later(self._open)


def publish_by_callbacks(run: Run) -> None:
    left = [THREADS]

    def ended() -> None:
        left[0] -= 1
        if not left[0]:
            connection.close()

    def opened(raw: Any) -> None:
        wrapped = AsyncShardedConnection(raw, run.topology, confirm_timeout=PATIENCE)
        for thread in range(THREADS):
            Callbacks(run, wrapped, thread, ended)

    connection = pika.SelectConnection(
        patient.parameters(run.urls[0]),
        on_open_callback=opened,
        on_close_callback=lambda closed, _: closed.ioloop.stop(),
    )
    connection.ioloop.start()


# aio-pika, plain and robust: all tasks share a channel.


class SharedChannel:
    """The channel of all tasks; another one when it has been closed.

    Where several are on their way to an exchange that is not there, aiormq sends on a channel that
    the broker has closed, and loses the connection by that (504; without Warren as with it). A
    robust one comes back by itself.
    """

    def __init__(self, run: Run, connect: Callable[..., Any]) -> None:
        self._run = run
        self._connect = connect
        self._connection: Any = None
        self._channel: Any = None
        self._opening = asyncio.Lock()

    async def exchange(self) -> Any:
        async with self._opening:
            if self._connection is None:
                raw = await self._connect(self._run.urls[1], timeout=PATIENCE)
                topology = self._run.topology
                self._connection = AioShardedConnection(raw, topology, confirm_timeout=PATIENCE)
                self._channel = None
            try:
                if self._channel is None or self._channel.is_closed:
                    self._channel = await self._connection.channel()
                return await self._channel.get_exchange(self._run.logical, ensure=False)
            except CONNECTION_LOST:
                if self._run.kind == "aio":
                    await self.close()
                raise

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        self._connection = None


async def publish_on_a_loop(run: Run, connect: Callable[..., Any]) -> None:
    shared = SharedChannel(run, connect)

    async def publish(message: Message, exchange: Any) -> None:
        sent = aio_pika.Message(message.body, delivery_mode=2)
        try:
            await exchange.publish(sent, message.key, mandatory=message.mandatory)
        except Exception as error:
            run.failed(message, error)
        else:
            run.note("S", message)

    async def task(thread: int) -> None:
        for messages in run.turns(thread):
            try:
                exchange = await shared.exchange()
            except CONNECTION_LOST as error:
                for message in messages:
                    run.note("R", message, type(error).__name__)
            else:
                await asyncio.gather(*(publish(message, exchange) for message in messages))
            await asyncio.sleep(PACE)

    await asyncio.gather(*(task(number) for number in range(THREADS)))
    await shared.close()


KINDS: dict[str, Callable[[Run], None]] = {
    "blocking": publish_blocking,
    "callback": publish_by_callbacks,
    "aio": lambda run: asyncio.run(publish_on_a_loop(run, aio_pika.connect)),
    "robust": lambda run: asyncio.run(publish_on_a_loop(run, aio_pika.connect_robust)),
    "publisher": publish_in_batches,
}


def main() -> None:
    kind, logical, path, *urls = sys.argv[1:]
    run = Run(kind, logical, path, urls)
    with run.topology:
        KINDS[kind](run)


if __name__ == "__main__":
    main()
