"""A worker of a queue group: which shards it holds, takes and gives up. Runs on an asyncio loop.

It looks at what it knows (the shard map, its connections, what other workers announce), has
`assignment` decide, and starts what follows; it looks again when something changed, and otherwise
a few times a second. Every step may fail, and is then simply decided again at a later look.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pika

from sharding.amqp.session import ACCESS_REFUSED, PRECONDITION_FAILED, Channel, Refused
from sharding.errors import RemoteError, WarrenError, reason
from sharding.groups.handling.delivery import GroupFailed
from sharding.groups.log import logger
from sharding.groups.options import GroupOptions
from sharding.groups.queues.connections import Dialer, NodeConnections, SideConnection
from sharding.groups.queues.shard_reader import (
    DeadLetters,
    NotLockable,
    Runner,
    ShardReader,
    is_in_use,
)
from sharding.groups.sharing.assignment import Assignment, Hands, Renewals
from sharding.groups.sharing.roster import Announcement, Kind, Roster
from sharding.maps.naming import check_name
from sharding.maps.shard_map import ShardMap

LOOK_INTERVAL = 0.25
COUNTED = (
    "taken",
    "released",
    "renewed",
    "lost",
    "refused",
    "redelivered",
    "dead_lettered",
    "dead_letter_failures",
)


class QueueWorker:
    """`shard_map()` gives the newest map, None where there is none any more."""

    def __init__(
        self,
        me: str,
        shard_map: Callable[[], ShardMap | None],
        runner: Runner,
        dialer: Dialer,
        options: GroupOptions,
        logical: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.me = me
        self._shard_map = shard_map
        self._runner = runner
        self._options = options
        self._clock = clock
        self._logical = logical
        self._homes: dict[str, str] = {}
        self._has_map = True
        self._trouble: dict[str, str] = {}  # by shard, why it could not be taken
        self._nodes = NodeConnections(dialer, options, clock, self.look_again, self._on_proof)
        self._readers: dict[str, ShardReader] = {}
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._assignment = Assignment(me, options)
        self._renewals = Renewals(options.consumer_timeout)
        self._renewing: set[str] = set()
        self._changed = asyncio.Event()
        self._failure: WarrenError | None = None
        self._winding_down = False
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._side = SideConnection(dialer, lambda: sorted(set(self._homes.values())))
        queue = options.dead_letters_of(logical)
        self._dead_letters = (
            None if queue is None else DeadLetters(queue, self._side, options.answer_timeout)
        )
        self._membership = Membership(
            self._side,
            logical,
            me,
            options,
            clock,
            self.held,
            on_heard=self.look_again,
            on_failure=self._fail,
        )

    def held(self) -> frozenset[str]:
        """The shards this worker holds now, those it is about to leave included."""
        return frozenset(self._readers) | self._renewing

    def look_again(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Work until cancelled; raises what makes it useless to go on."""
        membership = asyncio.create_task(self._membership.run())
        try:
            while self._failure is None:
                self._changed.clear()
                self._look()
                try:
                    async with asyncio.timeout(LOOK_INTERVAL):
                        await self._changed.wait()
                except TimeoutError:
                    continue
            raise self._failure
        finally:
            membership.cancel()
            tasks = [*self._taking.values(), *self._leaving.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(membership, *tasks, return_exceptions=True)

    def wind_down(self) -> None:
        """Take nothing more, and give up each shard as soon as no handler is at work on it: nobody
        would read it while this worker waits for its last one."""
        self._winding_down = True
        for shard in self._readers.keys() - self._leaving.keys():
            self._start(self._leaving, shard, self._give_up(shard))
        self._membership.leave()

    async def leave(self, timeout: float) -> None:
        """After `run` and after the runner stopped: acknowledge, close, say goodbye."""
        readers = list(self._readers.values())
        self._readers.clear()
        try:
            async with asyncio.timeout(timeout):
                closing = [reader.close() for reader in readers]
                await asyncio.gather(*closing, return_exceptions=True)
        except TimeoutError:
            logger.warning("not every shard was given back in order; the broker does it now")
        self.counters["released"] += len(readers)
        self._membership.leave()
        await self._nodes.close()
        await self._side.close()

    # Looking.

    def _look(self) -> None:
        self._follow_map()
        if self._winding_down or not self._membership.settled:
            return
        mine = Hands(self.held(), leaving=self._leaving.keys(), asking=self._taking.keys())
        away = {shard for shard, node in self._homes.items() if self._nodes.session(node) is None}
        moves = self._assignment.look(
            self._clock(),
            self._homes.keys(),
            mine,
            self._membership.others(),
            away,
            self._membership.departing(),
        )
        for shard in moves.leave:
            self._start(self._leaving, shard, self._give_up(shard))
        for shard in moves.take:
            self._start(self._taking, shard, self._take(shard))
        if self._renewals.is_time_to_look(self._clock()):
            for shard in self._renewals.due(self._clock(), self._runner.waiting_since()):
                if shard in self._readers and shard not in self._leaving:
                    self._start(self._leaving, shard, self._renew(shard))

    def _follow_map(self) -> None:
        shard_map = self._shard_map()
        if (shard_map is not None) != self._has_map:
            self._has_map = shard_map is not None
            logger.warning(
                "%r is sharded again, and read"
                if self._has_map
                else "%r is not sharded any more: its shards are left, and nothing of it is read",
                self._logical,
            )
        self._homes = {s.name: s.node for s in shard_map.shards} if shard_map else {}
        held_on = {reader.node for reader in self._readers.values()}
        self._nodes.keep(held_on.union(self._homes.values()))

    def _start(
        self,
        tasks: dict[str, asyncio.Task[None]],
        shard: str,
        work: Coroutine[Any, Any, None],
    ) -> None:
        def ended(done: asyncio.Task[None]) -> None:
            del tasks[shard]
            if not done.cancelled() and done.exception() is not None:
                logger.error("%r could not be moved", shard, exc_info=done.exception())
            self.look_again()

        task = tasks[shard] = asyncio.create_task(work)
        task.add_done_callback(ended)

    def _on_proof(self, node: str, sent: float) -> None:
        for shard, reader in self._readers.items():
            if reader.node == node:
                self._runner.set_lease(shard, sent + self._options.heartbeat)

    # Taking and leaving.

    async def _take(self, shard: str) -> None:
        node = self._homes[shard]
        session = self._nodes.session(node)
        if session is None:
            return
        channel = None
        try:
            async with asyncio.timeout(self._options.answer_timeout):
                channel = await session.channel()
                reader = ShardReader(
                    shard, node, channel, self._runner, self._dead_letters, self.counters
                )
                await reader.start(
                    session,
                    self._options,
                    until=self._nodes.proved(node) + self._options.heartbeat,
                )
        except NotLockable as error:
            self._fail(error)
        except Refused as error:
            self._on_refused(shard, error)
        except (WarrenError, TimeoutError) as error:
            self._on_not_answered(shard, error)
        else:
            self._on_taken(shard, reader)
            return
        if channel is not None:
            channel.close()

    def _on_taken(self, shard: str, reader: ShardReader) -> None:
        self._trouble.pop(shard, None)
        self._assignment.attempts.taken(shard)
        self._readers[shard] = reader
        self.counters["taken"] += 1
        logger.info("%r is taken; %d shards held", shard, len(self._readers))
        reader.channel.closed.add_done_callback(lambda _: self._on_closed(shard, reader))
        if self._winding_down and shard not in self._leaving:
            self._start(self._leaving, shard, self._give_up(shard))
        self._membership.announce()

    def _on_refused(self, shard: str, error: Refused) -> None:
        if not is_in_use(error):
            self._on_not_answered(shard, error)
            if error.code == ACCESS_REFUSED:
                self._fail(no_right(error))
            return
        self.counters["refused"] += 1
        if self._assignment.attempts.refused(shard):
            logger.warning(
                "%r is read by somebody who announces nothing: a consumer that is no worker of "
                "this group, or a worker that hangs",
                shard,
            )

    def _on_not_answered(self, shard: str, error: Exception) -> None:
        self._assignment.attempts.not_answered(shard)
        if self._trouble.get(shard) != reason(error):  # it is tried every second
            self._trouble[shard] = reason(error)
            logger.warning("%r can't be taken now, and is not read: %s", shard, reason(error))

    def _fail(self, error: WarrenError) -> None:
        self._failure = self._failure or error
        self.look_again()

    def _on_closed(self, shard: str, reader: ShardReader) -> None:
        """The channel is closed, by us or not: the shard is not ours any more."""
        if self._readers.get(shard) is not reader:
            return
        del self._readers[shard]
        reader.forget()
        if shard in self._leaving or self._winding_down:
            self.counters["released"] += 1
            logger.info("%r is given up; %d shards held", shard, len(self._readers))
        else:
            self.counters["lost"] += 1
            logger.warning("%r is lost: %s", shard, reader.channel.closed.result())
        if shard not in self._renewing:  # others would reach for it
            self._membership.announce()
        self.look_again()

    async def _give_up(self, shard: str) -> None:
        await self._readers[shard].give_up()

    async def _renew(self, shard: str) -> None:
        """Give a shard up and take it again at once, so that the broker counts from the start."""
        logger.info("%r is taken again: messages of it wait too long", shard)
        self._renewing.add(shard)
        try:
            await self._readers[shard].give_up()
            self.counters["renewed"] += 1
            if shard in self._homes and not self._winding_down:
                await self._take(shard)
        finally:
            self._renewing.discard(shard)
            self._membership.announce()


def no_right(error: Refused) -> GroupFailed:
    """A right that is missing stays missing: a worker that only tries again helps nobody."""
    return GroupFailed(
        f"the broker refuses a right that a worker needs: {error.text}; docs/groups.md lists them"
    )


# Announcements between the workers of a group, over a fanout exchange. Thin I/O.
#
# Each worker binds a queue of its own, which the broker deletes with the worker's connection, and
# which lives on the node of that connection: nothing of the group depends on one node. The exchange
# goes with its last queue.


def exchange_of(logical: str) -> str:
    """The exchange through which the workers of a logical queue find each other."""
    return check_name("the group's exchange", f"warren.group.{logical}")


class Membership:
    """`held` says what to announce; `on_heard` is called when the others may have changed, and
    `on_failure` when this worker can never take part.
    """

    def __init__(
        self,
        side: SideConnection,
        logical: str,
        me: str,
        options: GroupOptions,
        clock: Callable[[], float],
        held: Callable[[], frozenset[str]],
        on_heard: Callable[[], None],
        on_failure: Callable[[WarrenError], None],
    ) -> None:
        self._side = side
        self._exchange = exchange_of(logical)
        self._me = me
        self._options = options
        self._clock = clock
        self._held = held
        self._on_heard = on_heard
        self._on_failure = on_failure
        self._channel: Channel | None = None
        self._roster = Roster(me, options.settle_time, options.member_timeout)
        self._joined_at: float | None = None
        self._trouble = ""
        self._leaves = False

    def others(self) -> dict[str, frozenset[str]]:
        return self._roster.held_by_others(self._clock())

    def departing(self) -> frozenset[str]:
        return self._roster.held_by_leaving(self._clock())

    @property
    def settled(self) -> bool:
        """Whether this worker has listened long enough to know who else is there."""
        return (
            self._joined_at is not None
            and self._clock() - self._joined_at >= self._options.settle_time
        )

    async def run(self) -> None:
        """Take part until cancelled, over whatever node answers."""
        while True:
            try:
                await self._take_part()
            except Exception as error:  # nothing may end this task: nobody would notice
                self._note(error)
                if isinstance(error, Refused) and error.code == ACCESS_REFUSED:
                    self._on_failure(no_right(error))
                elif isinstance(error, GroupFailed):
                    self._on_failure(error)
            self._channel = None
            await self._side.drop()
            await asyncio.sleep(self._options.announce_interval / 4)

    def leave(self) -> None:
        """Say goodbye, now and in all that is announced from here on."""
        self._leaves = True
        self.announce()

    def announce(self, kind: Kind = Kind.HERE) -> None:
        """Tell the others what this worker holds; a hint, which may get lost."""
        if self._channel is not None:
            kind = Kind.BYE if self._leaves else kind
            body = Announcement(self._me, kind, self._held()).dumps()
            self._channel.send(self._exchange, "", body, pika.BasicProperties())

    async def _take_part(self) -> None:
        async with asyncio.timeout(self._options.answer_timeout + self._options.connect_timeout):
            session = await self._side.session()
            channel = await session.channel()
            await self._declare_exchange(channel)
            queue = (await channel.declare("", exclusive=True)).name
            await channel.bind(queue, self._exchange, "")
            await channel.consume(queue, lambda message: self._hear(message.body), no_ack=True)
        self._channel, self._trouble = channel, ""
        if self._joined_at is None:
            self._joined_at = self._clock()
        self.announce(Kind.HELLO)
        hears_at = self._clock()
        while not channel.closed.done():
            await asyncio.wait([channel.closed], timeout=self._options.announce_interval)
            if session.is_blocked:  # nothing of its own can come back
                hears_at = self._clock()
            self._check_hearing(hears_at)
            self.announce()
        raise channel.refused or WarrenError(channel.closed.result())

    def _check_hearing(self, since: float) -> None:
        """Raise if nothing of its own came back for long: somebody deleted the exchange, another
        worker has made it again, and this one's queue is bound to it no more."""
        heard = max(since, self._roster.heard_myself or since)
        if self._clock() - heard >= self._options.member_timeout:
            raise RemoteError(
                f"nothing comes back through {self._exchange!r}, which was made again"
            )

    async def _declare_exchange(self, channel: Channel) -> None:
        try:
            await channel.declare_exchange(self._exchange, "fanout", auto_delete=True)
        except Refused as error:
            if error.code != PRECONDITION_FAILED:
                raise
            raise GroupFailed(
                f"workers meet at the exchange {self._exchange!r}, and there is another one of "
                f"this name: {error.text}; delete it"
            ) from None

    def _note(self, error: Exception) -> None:
        # A refusal may name the queue, which has another name each time.
        kind = str(error.code) if isinstance(error, Refused) else reason(error)
        before, self._trouble = self._trouble, kind
        if not isinstance(error, WarrenError | TimeoutError | OSError):
            logger.exception("the other workers can't be heard")
        elif kind != before:  # it is tried several times a second
            effect = "" if self.settled else ", and no shard is taken before"
            logger.warning("the other workers can't be heard%s: %s", effect, reason(error))

    def _hear(self, body: bytes) -> None:
        if self._roster.hear(body, self._clock()):
            self.announce()
        self._on_heard()
