"""One shard in this worker's hands: an exclusive consumer on a channel of its own. Thin I/O.

The exclusive consumer is the lock, and the broker keeps it. A shard is given up in this order:
begin nothing more of it, finish and acknowledge what is running, close the channel. Closing puts
what is unacknowledged back in its old place and frees the lock, in one step; cancelling first would
free the lock while messages are out, and the next reader would get later messages before them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from sharding.amqp.session import ACCESS_REFUSED, Message, Refused
from sharding.errors import RemoteError, WarrenError
from sharding.groups.acknowledging import Acknowledgements
from sharding.groups.dead_letters import DeadLetters
from sharding.groups.delivery import NO_HEADERS, Dead, Delivery, Done, OnDone, Outcome
from sharding.groups.foreman import OnReleased
from sharding.groups.options import GroupOptions
from sharding.groups.transport import GroupChannel, GroupSession

logger = logging.getLogger("warren.groups")

LONGEST_PAUSE = 5.0
"""Between two attempts to store a dead letter."""


def is_in_use(error: Refused) -> bool:
    """Whether another reads the shard; the broker says the same code where a right is missing."""
    return error.code == ACCESS_REFUSED and "exclusive use" in error.text


class NotLockable(WarrenError):
    """The queue does not know exclusive consumers, so nothing keeps a second worker out."""


class Bench(Protocol):
    """What a reader needs of a workshop, of threads or of tasks."""

    def submit(self, lane: str, delivery: Delivery, on_done: OnDone) -> None: ...

    def release(self, shard: str, on_released: OnReleased) -> None: ...

    def accept(self, shard: str) -> None: ...

    def set_lease(self, shard: str, until: float | None) -> None: ...


class ShardReader:
    """`dead_letters` is None where nothing is ever given up."""

    def __init__(
        self,
        shard: str,
        node: str,
        channel: GroupChannel,
        bench: Bench,
        dead_letters: DeadLetters | None,
        counters: Counter[str],
    ) -> None:
        self.shard = shard
        self.node = node
        self.channel = channel
        self._bench = bench
        self._dead_letters = dead_letters
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._early: list[Message] | None = []
        self._settled: deque[int] = deque()
        self._woken = False
        self._acknowledgements = Acknowledgements()
        self._leaving = False
        self._burials: set[asyncio.Task[None]] = set()

    async def start(
        self, session: GroupSession, options: GroupOptions, *, prove: bool, until: float
    ) -> None:
        """Take the lock and begin to read; `Refused` (403) if another holds it.

        `prove` has the lock tried: a quorum queue accepts a second exclusive consumer (seen on 3.10
        and 4.0). Messages wait until that is known.
        """
        await self.channel.qos(options.prefetch)
        await self.channel.consume(self.shard, self._on_message, exclusive=True)
        if prove:
            await self._prove_lock(session)
        self._bench.accept(self.shard)
        self._bench.set_lease(self.shard, until)
        early, self._early = self._early, None
        for message in early or ():
            self._submit(message)

    async def give_up(self) -> None:
        """Finish what is running, acknowledge it, and let the next worker have the shard."""
        self._leaving = True
        released = self._loop.create_future()
        self._bench.release(self.shard, lambda: self._from_any_thread(released))
        await asyncio.wait([released, self.channel.closed], return_when=asyncio.FIRST_COMPLETED)
        await self.close()

    def wind_down(self) -> None:
        """Store dead letters once more at most: whoever reads the shard next gets the rest."""
        self._leaving = True

    async def close(self) -> None:
        """Acknowledge what is done, and close the channel."""
        self._leaving = True
        self._acknowledge()
        await self.channel.wait_closed()
        self.forget()

    def forget(self) -> None:
        """The channel is closed: what it delivered belongs to others now."""
        self._leaving = True
        self._bench.release(self.shard, lambda: None)
        self._bench.set_lease(self.shard, None)

    async def _prove_lock(self, session: GroupSession) -> None:
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
        tag = message.delivery_tag
        self._bench.submit(
            message.routing_key, delivery, lambda outcome: self._on_done(tag, delivery, outcome)
        )

    def _on_done(self, tag: int, delivery: Delivery, outcome: Outcome) -> None:
        """Called on any thread; only the loop may touch the channel."""
        if isinstance(outcome, Done):
            self._settled.append(tag)
            if not self._woken:  # one call for all that end before the loop gets to it
                self._woken = True
                self._call(self._acknowledge)
        elif isinstance(outcome, Dead):
            self._call(lambda: self._bury(tag, delivery, outcome))

    def _acknowledge(self) -> None:
        self._woken = False  # first: what ends from here on wakes the loop again
        ended = []
        while self._settled:
            ended.append(self._settled.popleft())
        for tag, multiple in self._acknowledgements.settle(ended):
            self.channel.ack(tag, multiple)

    def _bury(self, tag: int, delivery: Delivery, dead: Dead) -> None:
        task = self._loop.create_task(self._burial(tag, delivery, dead))
        self._burials.add(task)
        task.add_done_callback(self._burials.discard)

    async def _burial(self, tag: int, delivery: Delivery, dead: Dead) -> None:
        """Store a dead letter, again and again; a shard that is left takes it along unstored."""
        try:
            if await self._stored(delivery, dead):
                self._counters["dead_lettered"] += 1
                logger.warning(
                    "key %r of %r is stored as a dead letter: %s, %s",
                    delivery.key,
                    self.shard,
                    dead.why,
                    dead.error,
                )
                self._settled.append(tag)
                self._acknowledge()
        finally:
            dead.buried()

    async def _stored(self, delivery: Delivery, dead: Dead) -> bool:
        assert self._dead_letters is not None  # nothing is dead where they have no place
        pause = 0.1
        while not self.channel.closed.done():
            try:
                await self._dead_letters.store(delivery, dead)
                return True
            except (RemoteError, TimeoutError) as error:
                why = str(error) or "no answer in time"
                logger.warning("a dead letter of %r is not stored yet: %s", self.shard, why)
            except Exception:
                logger.exception("a dead letter of %r can't be stored", self.shard)
            self._counters["dead_letter_failures"] += 1
            if self._leaving:
                break
            await asyncio.wait([self.channel.closed], timeout=pause)
            pause = min(pause * 2, LONGEST_PAUSE)
        return False

    def _from_any_thread(self, future: asyncio.Future[None]) -> None:
        self._call(lambda: None if future.done() else future.set_result(None))

    def _call(self, work: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:  # the loop has ended: a handler returned after stop() gave up on it
            logger.warning("a handler of %r ended too late; its message comes again", self.shard)
