"""Shards that are away, and asking for them until they are back.

A shard is asked for at its own node: others would hold the question for 64 s if that is down. What
keeps one shard of a node from answering mostly keeps all of them, so when one is away the others
are looked at too. All questions to a node share one connection, which is kept while any of its
shards is away: every client of the cluster asks, and a node that has just come back must not be
met by a connection of each client for each shard, again and again.

A node that can't be reached is tried every `probe_interval`: its shards are back when it is. One
that answers that a shard is not there is asked less and less often, as somebody has to make the
shard again, and each such answer is an error in the broker's log.

A shard that is full refuses each message and yet answers. So one that has answered is not asked
again, and does not count as away, until a `probe_interval` is over: a thousand refusals a second
are one question a second. The connection is kept beyond the next question.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sharding.amqp.session import Refused, Session
from sharding.backoff import Backoff
from sharding.errors import RemoteError, reason
from sharding.maps.shard_map import Node, Shard, ShardMap

if TYPE_CHECKING:
    from sharding.cluster.control_plane import ControlPlane

logger = logging.getLogger("warren.topology")
_random = random.Random()  # its own, so that nobody else's sequence of numbers changes
_LONGEST = 10.0
_CLOSE_TIMEOUT = 0.5
_KEPT = 2.0
"""How many intervals a connection is kept that nobody asks over: the next question may come after
one."""


class AwayShards:
    """The shards that do not answer. Everything here runs on the control plane's loop."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lately: dict[str, tuple[Shard, ShardMap] | None] = {}
        """Shards that answered less than an interval ago, and who became suspect since then."""
        self._lines: dict[str, _Line] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._interval = interval = plane.options.probe_interval
        self._silent = Backoff(interval, interval, spread=0.2)
        self._missing = Backoff(interval, _LONGEST * interval, factor=1.5, spread=0.2)

    def __contains__(self, shard: object) -> bool:
        return shard in self._tasks

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def suspect(self, shard: Shard, shard_map: ShardMap) -> None:
        """Check a shard until it is there; meanwhile it counts as away."""
        if shard.name in self._lately:
            self._lately[shard.name] = (shard, shard_map)
        elif shard.name not in self._tasks and not self._is_over:
            self._tasks[shard.name] = asyncio.create_task(self._follow(shard, shard_map))

    def _note_answer(self, shard: str) -> None:
        self._lately[shard] = None
        asyncio.get_running_loop().call_later(self._interval, self._end_interval, shard)

    def _end_interval(self, shard: str) -> None:
        suspected = self._lately.pop(shard)
        if suspected is not None:
            self.suspect(*suspected)

    async def stop(self) -> None:
        self._is_over = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.keep()  # until it is hung up right here
        hanging_up = (line.hang_up() for line in lines)
        await asyncio.gather(*hanging_up, *self._endings, return_exceptions=True)

    async def _follow(self, shard: Shard, shard_map: ShardMap) -> None:
        is_away = False
        missing = 0
        line: _Line | None = None
        try:
            while True:
                # The map may have changed: the node has a new address, the shard moved or left.
                current = self._newest(shard_map)
                if current is None:
                    return
                here = next((each for each in current.shards if each.name == shard.name), None)
                if here is None:
                    return
                line = self._line_to(node_of_shard(current, here), line)
                why, is_missing = await self._why_away(here, line)
                if why is None:
                    self._note_answer(shard.name)
                    break
                if not is_away:
                    is_away = True
                    logger.warning("shard %r is away: %s", shard.name, why)
                    for sibling in current.shards_on(here.node):
                        self.suspect(sibling, current)
                missing = missing + 1 if is_missing else 0
                pauses = self._missing if is_missing else self._silent
                await asyncio.sleep(pauses.pause(max(1, missing), _random.random()))
        finally:
            self._tasks.pop(shard.name, None)
            if line is not None:
                self._leave(line)
        if is_away:
            logger.info("shard %r is back", shard.name)

    def _newest(self, shard_map: ShardMap) -> ShardMap | None:
        """None where the name is sharded no more. Fixed maps are in no log."""
        known = None if self._plane.has_log else shard_map
        return self._plane.log.state.maps.get(shard_map.logical, known)

    def _line_to(self, node: Node, held: _Line | None) -> _Line:
        """The one that is held, unless it leads to another node."""
        if held is None or held.node.name != node.name:
            if held is not None:
                self._leave(held)
            held = self._lines.setdefault(node.name, _Line(self._plane))
            held.keep()
            held.users += 1
        held.node = node  # its address may be a new one
        return held

    def _leave(self, line: _Line) -> None:
        line.users -= 1
        if not line.users:
            line.ending = asyncio.create_task(self._end(line))
            self._endings.add(line.ending)
            line.ending.add_done_callback(self._endings.discard)

    async def _end(self, line: _Line) -> None:
        await asyncio.sleep(_KEPT * self._interval)
        self._lines.pop(line.node.name, None)  # so that nobody finds it while it is hung up
        await line.hang_up()

    async def _why_away(self, shard: Shard, line: _Line) -> tuple[str | None, bool]:
        """Why it does not answer, None if it does; and whether the broker says that there is none.

        Where its node can't be reached from here (only through a balancer, say), ask the node that
        the control plane is on, once for each look.
        """
        try:
            async with asyncio.timeout(self._plane.options.answer_timeout):
                await line.ask_for(shard.name)
        except Refused as error:
            return error.text, True
        except (RemoteError, TimeoutError) as error:
            if self._plane.has_reached(line.node):
                return reason(error), False
            seen = await self._plane.look_at([shard.name], known_away=True)
            return None if seen.get(shard.name) else reason(error), False
        except Exception as error:
            logger.exception("probing %r failed", shard.name)
            return reason(error), False
        return None, False


class _Line:
    """The connection to one node, for the questions for all of its shards that are away.

    It is opened by one question for all, and what keeps it from being opened is told to all that
    ask soon after. Over a connection on which a question was not answered in time nothing more is
    asked; it is closed when all that was asked before has its answer.
    """

    node: Node

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._opening: asyncio.Task[Session] | None = None
        self._session: Session | None = None
        self._asking: Counter[Session] = Counter()
        self.users = 0
        self.ending: asyncio.Task[None] | None = None
        """Waits to hang up, as long as there are no users."""

    def keep(self) -> None:
        """There is a user again."""
        if self.ending is not None:
            self.ending.cancel()
            self.ending = None

    async def ask_for(self, queue: str) -> None:
        """Returns if it is there."""
        session = self._session
        if session is None or not session.is_open:
            session = await self._opened()
        self._asking[session] += 1
        try:
            channel = await session.channel()
            try:
                await channel.declare(queue, passive=True)
            finally:
                channel.close()
        except Refused:
            raise
        except BaseException:
            if self._session is session:
                self._session = None
            raise
        finally:
            self._asking[session] -= 1
            if not self._asking[session]:
                del self._asking[session]
                if session is not self._session:
                    await session.close(_CLOSE_TIMEOUT)

    async def _opened(self) -> Session:
        if self._opening is None:
            self._opening = asyncio.create_task(self._plane.open_at(self.node))
            self._opening.add_done_callback(self._on_opened)
        return await asyncio.shield(self._opening)

    def _on_opened(self, opening: asyncio.Task[Session]) -> None:
        def forget() -> None:
            if self._opening is opening:
                self._opening = None

        if opening.cancelled():
            forget()
        elif opening.exception() is None:  # who asked for it may have gone meanwhile
            self._session = opening.result()
            forget()
        else:
            delay = self._plane.options.probe_interval / 2
            asyncio.get_running_loop().call_later(delay, forget)

    async def hang_up(self) -> None:
        """When nobody asks any more."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                self._session = opening.result()
        session, self._session = self._session, None
        if session is not None:
            await session.close(_CLOSE_TIMEOUT)


def node_of_shard(shard_map: ShardMap, shard: Shard) -> Node:
    return next(node for node in shard_map.nodes if node.name == shard.node)
