"""Announcements between the workers of a group, over a fanout exchange. Thin I/O.

Each worker binds a queue of its own, which the broker deletes with the worker's connection, and
which lives on the node of that connection: nothing of the group depends on one node. The exchange
goes with its last queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pika

from sharding.amqp.session import ACCESS_REFUSED, Refused
from sharding.errors import WarrenError
from sharding.groups.announcements import Announcement, Kind, Roster
from sharding.groups.connections import SideConnection
from sharding.groups.options import GroupOptions
from sharding.groups.transport import GroupChannel
from sharding.maps.naming import check_name

logger = logging.getLogger("warren.groups")


def exchange_of(logical: str) -> str:
    """The exchange through which the workers of a logical queue find each other."""
    return check_name("the group's exchange", f"warren.group.{logical}")


class Membership:
    """`held` says what to announce; `on_heard` is called when the others may have changed, and
    `on_no_right` when the user may not take part.
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
        on_no_right: Callable[[Refused], None],
    ) -> None:
        self._side = side
        self._exchange = exchange_of(logical)
        self._me = me
        self._options = options
        self._clock = clock
        self._held = held
        self._on_heard = on_heard
        self._on_no_right = on_no_right
        self._channel: GroupChannel | None = None
        self._roster = Roster(me, options.settle_time, options.member_timeout)
        self._joined_at: float | None = None
        self._trouble = ""

    def others(self) -> dict[str, frozenset[str]]:
        return self._roster.held_by_others(self._clock())

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
                    self._on_no_right(error)
            self._channel = None
            await self._side.drop()
            await asyncio.sleep(self._options.announce_interval / 4)

    def announce(self, kind: Kind = Kind.HERE) -> None:
        """Tell the others what this worker holds; a hint, which may get lost."""
        if self._channel is not None:
            body = Announcement(self._me, kind, self._held()).dumps()
            self._channel.send(self._exchange, "", body, pika.BasicProperties())

    async def _take_part(self) -> None:
        async with asyncio.timeout(self._options.answer_timeout + self._options.connect_timeout):
            channel = await self._side.channel()
            await channel.declare_exchange(self._exchange, "fanout", auto_delete=True)
            queue = (await channel.declare("", exclusive=True)).name
            await channel.bind(queue, self._exchange, "")
            await channel.consume(queue, lambda message: self._hear(message.body), no_ack=True)
        self._channel, self._trouble = channel, ""
        if self._joined_at is None:
            self._joined_at = self._clock()
        self.announce(Kind.HELLO)
        while not channel.closed.done():
            await asyncio.wait([channel.closed], timeout=self._options.announce_interval)
            self.announce()
        raise channel_lost(channel)

    def _note(self, error: Exception) -> None:
        before, self._trouble = self._trouble, str(error) or "no answer in time"
        if not isinstance(error, WarrenError | TimeoutError | OSError):
            logger.exception("the other workers can't be heard")
        elif self._trouble != before:  # it is tried several times a second
            logger.info("the other workers can't be heard: %s", self._trouble)

    def _hear(self, body: bytes) -> None:
        if self._roster.hear(body, self._clock()):
            self.announce()
        self._on_heard()


def channel_lost(channel: GroupChannel) -> WarrenError:
    return WarrenError(channel.closed.result())
