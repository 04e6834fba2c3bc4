"""The map log in the broker: a stream queue, read and written over plain AMQP 0-9-1.

`map_log` and `snapshots` have the rules; this is the I/O around them. Reading never ends: new
records are pushed. To know that nothing is missing, `catch_up` looks at the end of the log by a
second, short reading and waits until the first has come that far. It looks at the beginning as
well: if that is another one, it is another log, and it is read anew.

Changes are published through one exchange, what is only noted through another. Both lead to the
queue, and the broker says of each record through which it came.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

import pika

from sharding.amqp.session import (
    ACCESS_REFUSED,
    NO_ROUTE,
    NOT_FOUND,
    Channel,
    Message,
    Refused,
    Session,
)
from sharding.errors import MissingRight, RemoteError, Unreachable, UnsupportedFormat
from sharding.maps import map_log
from sharding.maps.map_log import LOG, NOTES, NOTHING, State, changes_between
from sharding.maps.snapshots import LogReader, newest_start, snapshot_records

PREFETCH = 1_000
# Of one chunk, which has no more entries. A broker sends no more of it than this (4.0).
WHOLE_CHUNK = 65_535
FEW = 10
# An empty log sends nothing, and so does a slow one. After this time a record that changes nothing
# is appended, which tells the two apart.
EMPTY_AFTER = 0.5
# A busy replica can tell of its last chunk later than it hands it out (3.10), so one that seems to
# be behind what was read is asked again before it is believed.
LOOKS_AT_THE_END = 6
LOOK_AGAIN = 0.2
# How many records a new reader first steps back from the end where these say nothing; then twice.
STEP_BACK = 100
# One that is interrupted is made again, by who goes on through another node.
LONGEST_STEP = 3_200
SNAPSHOT_TIMEOUT = 5.0

logger = logging.getLogger("warren.topology")

Listener = Callable[[State, State], None]


class LogFollower:
    """Keeps `state` at the newest that the log has."""

    def __init__(self, on_change: Listener) -> None:
        self.state = State()
        self.refused: Refused | None = None
        """While the log sends nothing: that this user may not append to it either."""
        self.interrupted = asyncio.Event()
        """Set when the broker has ended the reading: the log was deleted, or moved."""
        self.bytes_read = 0
        self._reader = LogReader()
        self._log = ""
        """The identity of the log that is read; none while nobody has founded it."""
        self._founded_at: int | None = None
        """The offset of the record that says so; None where that is gone."""
        self._first = ""
        """Its first record, by which one that nobody has founded is known again."""
        self._searched = sys.maxsize
        """From here to the end, as it was then, no record says where to start."""
        self._reading: Channel | None = None
        self._hidden = True
        """Whether a log is read for the first time; what was known is shown until its end is."""
        self._cut: UnsupportedFormat | None = None
        self._on_change = on_change
        self._moved = asyncio.Event()
        self._verdicts: WeakValueDictionary[str, asyncio.Future[bool]] = WeakValueDictionary()
        """Of each record of ours, for as long as somebody wants to know it."""
        self._due = False
        self._session: Session | None = None
        self._patience: _Patience | None = None
        """Of the catch-up that is under way."""
        self._turn = asyncio.Lock()
        self._next_turn: asyncio.Task[None] | None = None

    @property
    def failure(self) -> UnsupportedFormat | None:
        """Why there is no state at all to go by."""
        state = self._reader.state
        if state is None:
            return self._cut
        return UnsupportedFormat(state.stopped) if state.stopped and not state.log else None

    async def attach(self, session: Session) -> None:
        """Read on, over this connection. `Refused` (406) if its node has no replica of the log."""
        self.refused = None
        self._session = session
        self._reading = None
        channel = await session.channel()
        try:  # to look needs no right, so most clients need none
            await channel.declare(LOG, passive=True)
        except Refused as error:
            if error.code != NOT_FOUND:
                raise
            await _make(session)
        channel.close()

    async def catch_up(self, timeout: float) -> None:
        """Return when all that was in the log at the time of the call has been read.

        `TimeoutError` if nothing came for so long: what is ignored takes its time, and who began
        anew for that would never come to the end of it. Whoever asks while one is under way shares
        the next one with all who do.
        """
        turn = self._next_turn
        if turn is None:
            turn = self._next_turn = asyncio.create_task(self._in_turn(timeout))
            turn.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(turn)

    async def _in_turn(self, timeout: float) -> None:
        try:
            async with self._turn, asyncio.timeout(timeout) as deadline:
                self._next_turn = None
                self._patience = _Patience(deadline, timeout)
                try:
                    await self._catch_up(self._attached())
                finally:
                    self._patience = None
        finally:
            if self._next_turn is asyncio.current_task():
                self._next_turn = None

    async def _catch_up(self, session: Session) -> None:
        while True:
            tail = await self._tail(session)
            if not self._log:
                self._log, self._founded_at = self._reader.log, self._reader.founded_at
            log, first, founded_at = await self._identity(session, _offset(tail[-1]))
            if self._log and log != self._log:
                logger.warning("the map log is another one now; the old one counts no more")
                self._begin()
            if not self._is_reading:
                if not self._log and (log or first != self._first):
                    start = await self._newest_start(session, tail, log) if log else 0
                    if founded_at is not None and start <= founded_at:
                        start = 0  # what lies there is of no log, whatever it cites
                    self._log, self._founded_at = log, founded_at
                    self._reader, self._cut = LogReader(log, start), None
                self._first = first
                await self._read_on(session)
            last = await self._end(session, tail)
            if not await self._has_read(last):
                continue
            if self.failure is not None:
                break
            if self._reader.state is None:
                logger.warning("there is no snapshot where the map log says; reading all of it")
                self._reader = LogReader()
                await self._read_on(session)
            elif self._reader.log == log:
                break
            elif log:
                self._begin()
        if self._hidden:
            self._hidden = False
            self._show()

    def _begin(self) -> None:
        """Forget the log that was read; what is shown stays until the other one is read."""
        if self._reading is not None:
            self._reading.close()
        self._reading = None
        self._log, self._founded_at, self._searched = "", None, sys.maxsize
        self._reader, self._hidden, self._cut = LogReader(), True, None
        for waiting in list(self._verdicts.values()):
            if not waiting.done():
                waiting.set_result(False)

    @property
    def _is_reading(self) -> bool:
        return self._reading is not None and self._reading.is_open

    def _attached(self) -> Session:
        if self._session is None:
            raise RuntimeError("the log is not attached to a connection")
        return self._session

    async def _end(self, session: Session, tail: list[Message]) -> int:
        """The last offset. What a replica calls so must not lie before what was read."""
        for _ in range(LOOKS_AT_THE_END):
            last = _offset(tail[-1])
            if last >= self._reader.next_offset - 1:
                return last
            await asyncio.sleep(LOOK_AGAIN)
            tail = await self._tail(session)
        raise Unreachable("this node's replica of the map log is behind")

    async def _has_read(self, last: int) -> bool:
        """Wait until all is read up to the last record; false if the reading ends before."""
        while self._reader.next_offset <= last:
            self._moved.clear()
            if not self._is_reading:
                return False
            assert self._reading is not None
            await _first_of(self._moved, self._reading)
            self._go_on_waiting()
        return True

    # Short readings

    async def _tail(self, session: Session) -> list[Message]:
        """The records of the last chunk: one at least, made if there is none."""
        found: list[Message] = []
        arrived = asyncio.Event()

        def note(message: Message) -> None:
            self._hear(message)
            found.append(message)
            arrived.set()

        channel = await session.channel()
        try:
            await channel.qos(WHOLE_CHUNK)
            await channel.consume(LOG, note, arguments={"x-stream-offset": "last"})
            with suppress(TimeoutError):
                async with asyncio.timeout(EMPTY_AFTER):
                    await arrived.wait()
            if not arrived.is_set():
                await self._append_nothing(session)
                await _first_of(arrived, channel)
                _raise_if_ended(arrived, channel)
            self.refused = None
            # The broker sends a chunk in one go, so its answer to this comes after the whole chunk.
            await channel.qos(WHOLE_CHUNK)
        finally:
            channel.close()
        return found

    async def _identity(self, session: Session, last: int) -> tuple[str, str, int | None]:
        """The identity of the log, by the record that founded it, none if nobody has; which record
        is its first; and at which offset it was founded.

        That is mostly one of the first. Other things may lie before it: garbage, or the notes of
        many who found the log empty at the same time. Who is about to begin looks for it however
        far it is, or he would have to read all that was ever written. Who has begun looks where it
        was, and who found none is told of it by what he reads. Where the first record is gone, a
        snapshot has to say it; if none does, it can't be told that it is another one.
        """
        reader, first = LogReader(), ""
        has_begun = bool(self._log) or self._is_reading

        def is_known(message: Message) -> bool:
            nonlocal first
            first = first or f"{message.properties.message_id}:{sha256(message.body).hexdigest()}"
            _feed(reader, message)
            if reader.log or (reader.state and reader.state.stopped):
                return True
            return has_begun and reader.state is not None and reader.next_offset >= FEW

        await self._look(session, "first", last, is_known)
        if reader.state is None:
            return self._log, first, self._founded_at
        found = reader.log or reader.state.stopped
        at = self._founded_at
        if self._log and not found and at is not None and at <= last:
            reader.next_offset = at  # what lies between founds nothing
            await self._look(session, at, at, is_known)
        return reader.log, first, reader.founded_at

    async def _newest_start(self, session: Session, tail: list[Message], log: str) -> int:
        """Where to start: step back from the end until a record says it."""
        start = newest_start(_changes(tail), log)
        first, step = min(_offset(tail[0]), self._searched), STEP_BACK
        while start is None and first > 0:
            until, first, step = first - 1, max(0, first - step), min(2 * step, LONGEST_STEP)
            start = newest_start(await self._changes_in(session, first, until), log)
            self._searched = first
        return start or 0

    async def _changes_in(self, session: Session, first: int, last: int) -> list[bytes]:
        """The records of changes from one offset to another; the others are not kept."""
        found: list[bytes] = []

        def note(message: Message) -> bool:
            found.extend(_changes([message]))
            return False

        await self._look(session, first, last, note)
        return found

    async def _look(
        self, session: Session, start: str | int, last: int, enough: Callable[[Message], bool]
    ) -> None:
        """Show records from `start` on, one by one, until it is enough or the last was shown."""
        done = asyncio.Event()

        def note(message: Message) -> None:
            if isinstance(start, int) and _offset(message) < start:
                return  # a chunk is sent whole, also the records before the one asked for
            self._hear(message)
            if not done.is_set() and (enough(message) or _offset(message) >= last):
                done.set()
            if not done.is_set():
                channel.ack(message.delivery_tag)

        channel = await session.channel()
        try:
            await channel.qos(FEW if start == "first" else PREFETCH)
            await channel.consume(LOG, note, arguments={"x-stream-offset": start})
            await _first_of(done, channel)
            _raise_if_ended(done, channel)
        finally:
            channel.close()

    def _hear(self, message: Message) -> None:
        self.bytes_read += len(message.body)
        self._go_on_waiting()

    def _go_on_waiting(self) -> None:
        if self._patience is not None:
            self._patience.begin_anew()

    # The reading that does not end

    async def _read_on(self, session: Session) -> None:
        if self._reading is not None:
            self._reading.close()
        reader = self._reader
        channel = self._reading = await session.channel()
        self.interrupted.clear()

        def on_record(message: Message) -> None:
            if reader is self._reader and channel is self._reading:  # else it reads for nobody
                self._on_record(message)
            channel.ack(message.delivery_tag)

        def on_end(_: object) -> None:
            if channel is self._reading:
                self.interrupted.set()

        channel.closed.add_done_callback(on_end)
        await channel.qos(PREFETCH)
        await channel.consume(LOG, on_record, arguments={"x-stream-offset": reader.next_offset})

    def _on_record(self, message: Message) -> None:
        reader, offset = self._reader, _offset(message)
        if offset < reader.next_offset:
            return  # see _look
        self.bytes_read += len(message.body)
        if reader.next_offset == 0 and offset > 0:
            self._cut = UnsupportedFormat(
                f"the map log begins at record {offset}, its first ones were removed; exempt "
                f"{LOG!r} from retention policies, and delete it so that it is made again"
            )
        before = reader.state
        seen = _feed(reader, message)
        if reader.state is not before and reader.state is not None and not self._hidden:
            self._show()
        if seen is not None:
            self._due = self._due or (seen.is_due and seen.name in self._verdicts)
            if seen.void is not None:
                logger.debug("record %d of the map log is void: %s", offset, seen.void)
            waiting = self._verdicts.get(seen.name)
            if waiting is not None and not waiting.done():
                waiting.set_result(seen.void is None)
        self._moved.set()

    def _show(self) -> None:
        before, self.state = self.state, self._reader.state or State()
        told = {before.stopped, *before.frozen.values()}
        for sentence in {self.state.stopped, *self.state.frozen.values()} - told - {""}:
            logger.error("%s", sentence)
        if before != self.state:
            self._on_change(before, self.state)

    # Writing

    async def append(
        self, before: State, proposed: State, verdict: asyncio.Future[bool] | None = None
    ) -> bool:
        """Propose what `proposed` changes of `before`; whether it took effect, or came too late.

        Where that is not known, as the connection was lost, `verdict` is told when it is.
        """
        changes = changes_between(before, proposed)
        if not changes:
            return True
        if self.failure is not None:
            raise self.failure
        for change in changes:
            if why := self.state.why_frozen(change.entry):
                raise UnsupportedFormat(why)
        name = uuid.uuid4().hex
        record = map_log.encode(changes, name=name, log=before.log, start=self._reader.start)
        verdict = verdict or asyncio.get_running_loop().create_future()
        self._verdicts[name] = verdict
        await self._publish([record])
        took_effect = await verdict
        if self._due:
            self._due = False
            await self._append_snapshot()
        return took_effect

    async def _append_snapshot(self) -> None:
        """A snapshot of what was read. Nothing depends on it, so nobody is told if it fails."""
        reader = self._reader
        if reader.state is None or reader.state.frozen or reader.state.stopped:
            return
        records = snapshot_records(
            reader.state, reader.next_offset - 1, name=uuid.uuid4().hex, start=reader.start
        )
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT):
                await self._publish(records)
        except (RemoteError, TimeoutError) as error:
            logger.info("no snapshot was appended to the map log: %s", error)

    async def _publish(self, records: list[bytes]) -> None:
        """Append records, in order. A missing right is said by its name."""
        session = self._attached()
        try:
            await _publish(session, LOG, records)
        except Refused as error:
            if error.code in (NOT_FOUND, NO_ROUTE):  # deleted, or made by halves
                await _make(session)
                raise Unreachable(f"nothing led to the map log, until now: {error}") from None
            if error.code == ACCESS_REFUSED:
                raise MissingRight(
                    f"policies and maps can't be changed, and nothing was sent: {error.text}; to "
                    f"change them a user needs the permission 'write' on {LOG!r}"
                ) from None
            raise

    async def _append_nothing(self, session: Session) -> None:
        """Who may only read has to wait on: the log is empty, or slow."""
        try:
            await _publish(session, NOTES, [NOTHING])
        except Refused as error:
            if error.code in (NOT_FOUND, NO_ROUTE):
                await _make(session)
                await _publish(session, NOTES, [NOTHING])
            elif error.code != ACCESS_REFUSED:
                raise
            else:
                self.refused = error


class _Patience:
    """With a reading that goes on, however long it takes; a silent one has `timeout` seconds."""

    def __init__(self, deadline: asyncio.Timeout, timeout: float) -> None:
        self._deadline = deadline
        self._timeout = timeout

    def begin_anew(self) -> None:
        if not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._timeout)


async def _make(session: Session) -> None:
    """Make the log, and what leads to it; what is there already stays as it is."""
    channel = await session.channel()
    try:
        await channel.declare(LOG, durable=True, arguments={"x-queue-type": "stream"})
        for exchange in (LOG, NOTES):
            await channel.declare_exchange(exchange, "fanout")
            await channel.bind(LOG, exchange, "")
    except Refused as error:
        if error.code != ACCESS_REFUSED:
            raise
        raise MissingRight(
            f"the map log is not there (whole), and this user may not make it: {error.text}; to "
            f"make it a user needs 'configure', 'read' and 'write' on {LOG!r} and {NOTES!r}"
        ) from None
    finally:
        channel.close()


async def _publish(session: Session, exchange: str, records: list[bytes]) -> None:
    """On a channel of its own, since the broker closes the one of a refused record."""
    channel = await session.channel()
    try:
        await channel.confirm_publishes()
        for record in records:
            properties = pika.BasicProperties(
                delivery_mode=2, content_type="application/json", message_id=uuid.uuid4().hex
            )
            if not await channel.publish_mandatory("", record, properties, exchange=exchange):
                raise RemoteError("the broker did not store a record of the map log")
    finally:
        channel.close()


async def _first_of(event: asyncio.Event, channel: Channel) -> None:
    """Wait for an event, or until the channel is closed."""
    waiting: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting, channel.closed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def _raise_if_ended(event: asyncio.Event, channel: Channel) -> None:
    if not event.is_set():
        raise Unreachable(f"the map log can't be read on: {channel.closed.result()}")


def _feed(reader: LogReader, message: Message) -> Any:
    """Give the reader a record, if it came through the exchange of changes."""
    if message.exchange == LOG:
        return reader.read(_offset(message), message.body)
    reader.skip(_offset(message), message.body)
    return None


def _changes(messages: list[Message]) -> list[bytes]:
    return [message.body for message in messages if message.exchange == LOG]


def _offset(message: Message) -> int:
    headers: Mapping[str, Any] = message.properties.headers or {}
    return int(headers["x-stream-offset"])
