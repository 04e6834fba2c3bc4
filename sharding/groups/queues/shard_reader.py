"""One shard in this worker's hands: an exclusive consumer on a channel of its own. Thin I/O.

The exclusive consumer is the lock, and the broker keeps it. A shard is given up in this order:
begin nothing more of it, finish and acknowledge what is running, close the channel. Closing puts
what is unacknowledged back in its old place and frees the lock, in one step; cancelling first would
free the lock while messages are out, and the next reader would get later messages before them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from sharding.amqp.received import EncodedProperties
from sharding.amqp.session import ACCESS_REFUSED, Channel, Message, Refused, Session
from sharding.backoff import Backoff
from sharding.errors import RemoteError, WarrenError, reason
from sharding.groups.handling.delivery import NO_HEADERS, Dead, Delivery, Done, OnDone, Outcome
from sharding.groups.handling.scheduler import OnReleased
from sharding.groups.log import logger
from sharding.groups.options import GroupOptions
from sharding.groups.queues.connections import SideConnection
from sharding.groups.queues.dead_letter import dead_letter

_random = random.Random()  # its own, so that nobody else's sequence of numbers changes
_BACKOFF = Backoff(first=0.1, longest=5.0)
"""Between two attempts to store a dead letter."""


def is_in_use(error: Refused) -> bool:
    """Whether another reads the shard; the broker says the same code where a right is missing.

    It says `queue '…' in vhost '…' in exclusive use`, or `access to queue '…'`. Of a long name the
    end is cut off, so the beginning tells.
    """
    return error.code == ACCESS_REFUSED and error.text.startswith("ACCESS_REFUSED - queue '")


class NotLockable(WarrenError):
    """The queue does not know exclusive consumers, so nothing keeps a second worker out."""


class Runner(Protocol):
    """What a reader needs of a runner, of threads or of tasks."""

    def submit(self, lane: str, delivery: Delivery, on_done: OnDone) -> None: ...

    def release(self, shard: str, on_released: OnReleased) -> None: ...

    def accept(self, shard: str) -> None: ...

    def set_lease(self, shard: str, until: float | None) -> None: ...

    def waiting_since(self) -> Mapping[str, float]: ...


class ShardReader:
    """`dead_letters` is None where nothing is ever given up."""

    def __init__(
        self,
        shard: str,
        node: str,
        channel: Channel,
        runner: Runner,
        dead_letters: DeadLetters | None,
        counters: Counter[str],
    ) -> None:
        self.shard = shard
        self.node = node
        self.channel = channel
        self._runner = runner
        self._dead_letters = dead_letters
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._early: list[Message] | None = []
        self._settled: deque[int] = deque()
        self._woken = False
        self._acknowledgements = Acknowledgements()
        self._leaving = asyncio.Event()
        self._storing: set[asyncio.Task[None]] = set()

    async def start(self, session: Session, options: GroupOptions, *, until: float) -> None:
        """Take the lock and begin to read; `Refused` (403) if another holds it.

        The lock is tried: a quorum queue accepts a second exclusive consumer (seen on 3.10 and
        4.0). Messages wait until that is known. Each time, because a queue may have been deleted
        and made again as one of another type while another worker had it.
        """
        await self.channel.qos(options.prefetch)
        await self.channel.consume(self.shard, self._on_message, exclusive=True)
        await self._prove_lock(session)
        self._runner.accept(self.shard)
        self._runner.set_lease(self.shard, until)
        early, self._early = self._early, None
        for message in early or ():
            self._submit(message)

    async def give_up(self) -> None:
        """Finish what is running, acknowledge it, and let the next worker have the shard."""
        self.wind_down()
        released = self._loop.create_future()
        self._runner.release(self.shard, lambda: self._from_any_thread(released))
        await asyncio.wait([released, self.channel.closed], return_when=asyncio.FIRST_COMPLETED)
        await self.close()

    def wind_down(self) -> None:
        """Store dead letters once more at most: whoever reads the shard next gets the rest."""
        self._leaving.set()

    async def close(self) -> None:
        """Acknowledge what is done, and close the channel."""
        self.wind_down()
        self._acknowledge()
        await self.channel.wait_closed()
        self.forget()

    def forget(self) -> None:
        """The channel is closed: what it delivered belongs to others now."""
        self.wind_down()
        self._runner.release(self.shard, lambda: None)
        self._runner.set_lease(self.shard, None)

    async def _prove_lock(self, session: Session) -> None:
        second = await session.channel()
        try:
            await second.qos(1)
            await second.consume(self.shard, lambda _: None, exclusive=True)
        except Refused as error:
            if is_in_use(error):
                return
            raise
        finally:
            second.close()
        raise NotLockable(
            f"{self.shard!r} accepts a second exclusive consumer, so it can't have one worker at a "
            "time: quorum queues do not know exclusive consumers; a group needs classic queues"
        )

    # Messages.

    def _on_message(self, message: Message) -> None:
        if self._early is not None:
            self._early.append(message)
        else:
            self._submit(message)

    def _submit(self, message: Message) -> None:
        headers = message.properties.headers
        delivery = Delivery(
            message.body,
            message.routing_key,
            self.shard,
            headers or NO_HEADERS,
            message.properties,
            message.redelivered,
        )
        if message.redelivered:
            self._counters["redelivered"] += 1
        self._runner.submit(
            message.routing_key, delivery, lambda outcome: self._on_done(message, outcome)
        )

    def _on_done(self, message: Message, outcome: Outcome) -> None:
        """Called on any thread; only the loop may touch the channel.

        What becomes of a message is decided by itself, never by its delivery: that was in the
        handler's hands.
        """
        if isinstance(outcome, Done):
            self._settled.append(message.delivery_tag)
            if not self._woken:  # one call for all that end before the loop gets to it
                self._woken = True
                self._call(self._acknowledge)
        elif isinstance(outcome, Dead):
            self._call(lambda: self._begin_storing(message, outcome))

    def _acknowledge(self) -> None:
        self._woken = False  # first: what ends from here on wakes the loop again
        ended = []
        while self._settled:
            ended.append(self._settled.popleft())
        for tag, multiple in self._acknowledgements.settle(ended):
            self.channel.ack(tag, multiple)

    def _begin_storing(self, message: Message, dead: Dead) -> None:
        task = self._loop.create_task(self._store_dead_letter(message, dead))
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    async def _store_dead_letter(self, message: Message, dead: Dead) -> None:
        """Store a dead letter, again and again; a shard that is left takes it along unstored."""
        try:
            if await self._stored(message, dead):
                self._settled.append(message.delivery_tag)
                self._acknowledge()
                self._counters["dead_lettered"] += 1
                logger.warning(
                    "key %r of %r is stored as a dead letter: %s, %s",
                    message.routing_key,
                    self.shard,
                    dead.why,
                    dead.error,
                )
        finally:
            dead.stored()

    async def _stored(self, message: Message, dead: Dead) -> bool:
        assert self._dead_letters is not None  # nothing is dead where they have no place
        failures = 0
        while not self.channel.closed.done() and not (failures and self._leaving.is_set()):
            try:
                await self._dead_letters.store(message, self.shard, dead)
                return True
            except (RemoteError, TimeoutError) as error:
                why = reason(error)
                logger.warning("a dead letter of %r is not stored yet: %s", self.shard, why)
            except Exception:
                logger.exception("a dead letter of %r can't be stored", self.shard)
            self._counters["dead_letter_failures"] += 1
            failures += 1
            with suppress(TimeoutError):  # a channel that closes is forgotten, and so left too
                async with asyncio.timeout(_BACKOFF.pause(failures, _random.random())):
                    await self._leaving.wait()
        return False

    def _from_any_thread(self, future: asyncio.Future[None]) -> None:
        self._call(lambda: None if future.done() else future.set_result(None))

    def _call(self, work: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:  # the loop has ended: a handler returned after stop() gave up on it
            logger.warning("a handler of %r ended too late; its message comes again", self.shard)


# Which acknowledgements to send for messages that ended in any order. Pure.
#
# One acknowledgement may stand for all messages up to it, so what ended without a gap from the
# first one on is acknowledged by one; what ended out of turn, each by its own. The tag sent for
# several is one that was not acknowledged before: the broker closes a channel at a tag that it does
# not know. So a message that is said to have ended twice is acknowledged once.


class Acknowledgements:
    """The delivery tags of one channel: 1, 2, 3, …"""

    def __init__(self) -> None:
        self._through = 0
        self._ahead: set[int] = set()

    def settle(self, tags: Iterable[int]) -> list[tuple[int, bool]]:
        """What to send for these tags: each with whether it stands for all before it too."""
        new = {tag for tag in tags if tag > self._through} - self._ahead
        self._ahead |= new
        while self._through + 1 in self._ahead:
            self._through += 1
            self._ahead.discard(self._through)
        together = [tag for tag in new if tag <= self._through]
        alone = sorted(tag for tag in new if tag > self._through)
        return [*([(max(together), True)] if together else []), *((tag, False) for tag in alone)]


NO_ROUTE = 312


# Storing what failed for the last time, with the reason. Thin I/O; `dead_letter` makes the letters.
#
# Published through the default exchange, with confirms and mandatory: a queue that is missing is
# made (durable, classic), one that exists is used as it is, whatever its kind.


class DeadLetters:
    def __init__(
        self,
        queue: str,
        side: SideConnection,
        timeout: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.queue = queue
        self._side = side
        self._timeout = timeout
        self._wall_clock = wall_clock
        self._channel: Channel | None = None
        self._turn = asyncio.Lock()
        self._unanswered = 0

    async def store(self, message: Message, shard: str, dead: Dead) -> None:
        """Return when the broker has it; a `RemoteError` or `TimeoutError` says that it may not."""
        at = self._wall_clock()
        before = self._unanswered
        async with self._turn:
            if self._unanswered != before:
                # Each of those that wait would wait as long again, and their shard with them.
                raise TimeoutError
            try:
                async with asyncio.timeout(self._timeout):
                    await self._publish(message, shard, dead, at)
            except BaseException as error:
                self._unanswered += isinstance(error, TimeoutError)
                # A late confirm would be taken for the next one's.
                self._leave_channel()
                raise

    async def _publish(self, message: Message, shard: str, dead: Dead, at: float) -> None:
        channel = await self._open_channel()
        letter = dead_letter(
            message.raw,
            message.body,
            message.routing_key,
            shard,
            dead,
            at=at,
            room=channel.room_for_properties,
        )
        properties = EncodedProperties(letter.properties)
        try:
            stored = await channel.publish_mandatory(self.queue, letter.body, properties)
        except Refused as error:
            if error.code != NO_ROUTE:
                raise
            await channel.declare(self.queue, durable=True, arguments={"x-queue-type": "classic"})
            stored = await channel.publish_mandatory(self.queue, letter.body, properties)
        if not stored:
            raise RemoteError(f"the broker did not take a dead letter into {self.queue!r}")
        if letter.left_out or letter.enclosed:
            logger.warning(
                "the properties of a dead letter of %r fill a frame (%d bytes): %s",
                shard,
                len(message.raw),
                "they are at the beginning of its body"
                if letter.enclosed
                else f"not all is in it of {', '.join(letter.left_out)}",
            )

    async def _open_channel(self) -> Channel:
        if self._channel is None or self._channel.closed.done():
            self._channel = await self._side.channel()
            await self._channel.confirm_publishes()
        return self._channel

    def _leave_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
