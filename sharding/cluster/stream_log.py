"""The map log in the broker: a stream queue, read and written over plain AMQP 0-9-1.

`map_log` has the rule; this is the I/O around it. Reading never ends: new records are pushed. To
know that nothing is missing, `catch_up` looks at the end of the log by a second, short reading and
waits until the first has come that far.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pika

from sharding.amqp.session import ACCESS_REFUSED, Channel, Message, Refused, Session
from sharding.errors import RemoteError, Unreachable, UnsupportedFormat
from sharding.maps import map_log
from sharding.maps.map_log import State

LOG_QUEUE = "warren.shard-maps"
PREFETCH = 1_000
# An empty log sends nothing, and so does a slow one. After this time a record that changes nothing
# is appended, which tells the two apart.
EMPTY_AFTER = 0.5
NOTHING = b"{}"
# A busy replica can tell of its last chunk later than it hands it out (3.10), so one that seems to
# be behind what was read is asked again before it is believed.
LOOKS_AT_THE_END = 6
LOOK_AGAIN = 0.2

logger = logging.getLogger("warren.topology")

Listener = Callable[[State, State], None]


class LogFollower:
    """Keeps `state` at the newest epoch that the log has."""

    def __init__(self, on_change: Listener) -> None:
        self.state = State()
        self.failure: UnsupportedFormat | None = None
        self.refused: Refused | None = None
        """While the log sends nothing: that this user may not append to it either."""
        self._next_offset = 0
        self._reading = State()
        """The state at the record that was read last; shown as `state` unless `_hidden`."""
        self._hidden = False
        self._first_record: str | None = None
        self._on_change = on_change
        self._moved = asyncio.Event()
        self._verdicts: dict[str, asyncio.Future[bool]] = {}
        self._writer: Channel | None = None

    async def attach(self, session: Session) -> None:
        """Read on, over this connection. `Refused` (406) if its node has no replica of the log."""
        self.refused = None
        await self._declare(session)
        self._writer = await session.channel()
        await self._writer.confirm_publishes()
        if self._next_offset and await self._is_another_log(session, may_be_empty=True):
            self._begin_again()
        await self._read_from(session, self._next_offset)

    async def catch_up(self, session: Session) -> None:
        """Return when all that was in the log at the time of the call has been read."""
        last = await self._last_offset(session)
        looks = 1
        while last < self._next_offset - 1:
            if await self._is_another_log(session, may_be_empty=False):
                self._begin_again()
                await self._read_from(session, 0)
            elif looks == LOOKS_AT_THE_END:
                raise Unreachable("this node's replica of the map log is behind")
            else:
                await asyncio.sleep(LOOK_AGAIN)
                last = await self._last_offset(session)
                looks += 1
        while self._next_offset <= last:
            self._moved.clear()
            await self._moved.wait()
            self._raise_failure()
        if self._hidden:
            self._hidden = False
            self._show()

    async def _is_another_log(self, session: Session, *, may_be_empty: bool) -> bool:
        """Whether somebody deleted the log and it was made again: its first record is another.

        Of one that may be empty, silence says so; else a first record is on its way.
        """
        first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def note(message: Message) -> None:
            if not first.done():
                first.set_result(message.properties.message_id or "")

        channel = await session.channel()
        try:
            await channel.qos(1)
            await channel.consume(LOG_QUEUE, note, arguments={"x-stream-offset": "first"})
            try:
                async with asyncio.timeout(EMPTY_AFTER if may_be_empty else None):
                    return await first != self._first_record
            except TimeoutError:
                return True  # ours has a record at least; this one has none
        finally:
            channel.close()

    def _begin_again(self) -> None:
        """Read from the first record; what was known is shown until all of it is read."""
        logger.warning("the map log was deleted and made again; reading it from its first record")
        self._reading = State()
        self._next_offset = 0
        self._first_record = None
        self._hidden = True

    async def append(self, proposed: State) -> bool:
        """Propose a state and wait for the verdict of the log: whether it is the next one."""
        self._raise_failure()
        name = uuid.uuid4().hex
        verdict: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._verdicts[name] = verdict
        try:
            await self._publish(map_log.encode(proposed), name)
            return await verdict
        finally:
            self._verdicts.pop(name, None)

    async def _declare(self, session: Session) -> None:
        """Make the log if it is not there. To look needs no right, so most clients need none."""
        channel = await session.channel()
        try:
            await channel.declare(LOG_QUEUE, passive=True)
        except Refused as error:
            if error.code != 404:
                raise
            channel = await session.channel()
            await channel.declare(LOG_QUEUE, durable=True, arguments={"x-queue-type": "stream"})
        channel.close()

    async def _read_from(self, session: Session, offset: int) -> None:
        channel = await session.channel()
        await channel.qos(PREFETCH)

        def read(message: Message) -> None:
            self._on_record(message)
            channel.ack(message.delivery_tag)

        await channel.consume(LOG_QUEUE, read, arguments={"x-stream-offset": offset})

    async def _last_offset(self, session: Session) -> int:
        last = -1
        arrived = asyncio.Event()

        def note(message: Message) -> None:
            nonlocal last
            last = max(last, _offset(message))
            arrived.set()

        channel = await session.channel()
        try:
            await channel.qos(PREFETCH)
            await channel.consume(LOG_QUEUE, note, arguments={"x-stream-offset": "last"})
            with suppress(TimeoutError):
                async with asyncio.timeout(EMPTY_AFTER):
                    await arrived.wait()
            if not arrived.is_set():
                await self._append_nothing(session)
                await arrived.wait()
            self.refused = None
            # The broker sends a chunk in one go, so its answer to this comes after the whole chunk.
            await channel.qos(PREFETCH)
        finally:
            channel.close()
        return last

    async def _append_nothing(self, session: Session) -> None:
        """Who may only read has to wait on: the log is empty, or slow.

        On a channel of its own, since the broker closes the one of a refused record.
        """
        channel = await session.channel()
        try:
            await channel.confirm_publishes()
            await _publish(channel, NOTHING, uuid.uuid4().hex)
        except Refused as error:
            if error.code != ACCESS_REFUSED:
                raise
            self.refused = error
        finally:
            channel.close()

    async def _publish(self, record: bytes, name: str) -> None:
        if self._writer is None:
            raise RuntimeError("the log is not attached to a connection")
        await _publish(self._writer, record, name)

    def _on_record(self, message: Message) -> None:
        offset = _offset(message)
        if offset < self._next_offset or self.failure is not None:
            return  # a chunk is sent whole, also the records before the one asked for
        if self._next_offset == 0 and offset > 0:
            self.failure = UnsupportedFormat(
                f"the map log begins at record {offset}, its first ones were removed; exempt "
                f"{LOG_QUEUE!r} from retention policies, and delete it so that it is made again"
            )
            self._moved.set()
            return
        if offset == 0:
            self._first_record = message.properties.message_id or ""
        self._next_offset = offset + 1
        try:
            verdict = map_log.apply(self._reading, message.body)
        except UnsupportedFormat as error:
            self.failure = error
            self._moved.set()
            return
        if verdict.void is None:
            self._reading = verdict.state
            if not self._hidden:
                self._show()
        elif message.body != NOTHING:
            logger.debug("record %d of the map log is void: %s", offset, verdict.void)
        waiting = self._verdicts.get(message.properties.message_id or "")
        if waiting is not None and not waiting.done():
            waiting.set_result(verdict.void is None)
        self._moved.set()

    def _show(self) -> None:
        before, self.state = self.state, self._reading
        self._on_change(before, self.state)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


async def _publish(channel: Channel, record: bytes, name: str) -> None:
    properties = pika.BasicProperties(message_id=name, delivery_mode=2)
    if not await channel.publish("", LOG_QUEUE, record, properties):
        raise RemoteError("the broker did not store a record of the map log")


def _offset(message: Message) -> int:
    headers: Mapping[str, Any] = message.properties.headers or {}
    return int(headers["x-stream-offset"])
