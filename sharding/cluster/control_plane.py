"""The control plane of a process, on an asyncio loop of its own: follow the log, ask, watch.

It owns one connection and never touches the application's: a question about a queue whose node is
down is answered after 64 s, and a connection that waits for it can't even be closed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pika

from sharding.amqp.addresses import connection_parameters, same_but_at
from sharding.amqp.session import Declared, Refused, Session
from sharding.backoff import Backoff
from sharding.cluster.availability import AwayShards
from sharding.cluster.management import ClusterView
from sharding.cluster.nodes import ClusterNodes, Timeouts
from sharding.cluster.stream_log import Listener, LogFollower
from sharding.cluster.trust import Trust
from sharding.errors import MissingRight, RemoteError, Unreachable, WarrenError, reason
from sharding.maps.map_log import State
from sharding.maps.membership import names_of
from sharding.maps.planning import Member
from sharding.maps.shard_map import Node

logger = logging.getLogger("warren.topology")
_BACKOFF = Backoff(first=0.4, longest=5.0)
_random = random.Random()  # its own, so that nobody else's sequence of numbers changes

_NOT_TRIED = "not connected yet"
_SILENT_LOOKS = 3
_LOOKS_LEFT_OUT = 6
"""For each one that is made while no management API is believed or answers."""
_LEARN_TIMEOUT = 1.0
# Wrong credentials, and a virtual host that is missing or closed to the user.
_DENIALS = ("ACCESS_REFUSED", "NOT_ALLOWED")


@dataclass(frozen=True, slots=True)
class TopologyOptions:
    """Every period is in seconds."""

    poll_interval: float = 30.0
    """How often the end of the map log is looked at, in case a push got lost."""
    max_staleness: float = 90.0
    """A map that could not be checked for longer is not used any more."""
    start_timeout: float = 30.0
    """How long the first use of a map waits until the log has been read."""
    connect_timeout: float = 5.0
    answer_timeout: float = 2.0
    """How long one question about one queue may take; silence means that it is away."""
    management_timeout: float = 5.0
    """How long the management API may take to answer, each time."""
    watch_interval: float = 5.0
    """How often the management API is asked which nodes run."""
    probe_interval: float = 1.0
    """How often a shard that is away is tried again; up to ten times this where its node answers
    that there is no such queue. One that refuses messages and yet answers is asked once in it."""
    change_timeout: float = 30.0
    """How long a change of policies or maps may take, races included."""
    trusted_hosts: Sequence[str] = ()
    """Hosts that may get this process's login though only a map names them: `*.example.com`. Those
    of the URLs, and those that the cluster's management API confirms, may anyway; so may those of
    maps that are given to `Topology` itself, if no host is named here."""


class ControlPlane:
    """Runs on one asyncio loop; every coroutine here must be awaited on it."""

    def __init__(
        self,
        urls: Sequence[str],
        view: ClusterView,
        options: TopologyOptions,
        on_change: Listener,
        has_log: bool = True,
    ) -> None:
        self.given = [connection_parameters(url) for url in urls]
        self.view = view
        self.has_log = has_log
        self.options = options
        # Fixed maps are the user's own word, unless told otherwise.
        named = options.trusted_hosts or (() if has_log else ("*",))
        self._trust = Trust([str(each.host) for each in self.given], named)
        timeouts = Timeouts(options.answer_timeout, options.management_timeout)
        self._nodes = ClusterNodes(view, self.given, timeouts, self.known_nodes, self._trust)
        self.log = LogFollower(on_change)
        self.session: Session | None = None
        self.validated_at: float | None = None
        self.problem: str = _NOT_TRIED
        self.denied = False
        """Whether every node has refused this user; waiting would not help."""
        self.down_nodes: set[str] = set()
        self.away = AwayShards(self)
        self.counts: Counter[str] = Counter()
        self._connected = asyncio.Event()
        self._failed: set[tuple[str, int]] = set()
        self._reached: set[str] = set()
        self._served_elsewhere: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow())]
        if self.view:
            self._tasks.append(asyncio.create_task(self._watch_nodes()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, self.away.stop(), return_exceptions=True)
        self._nodes.close()
        if self.session is not None:
            await self.session.close()

    async def connected(self, *, unless_denied: bool = False) -> Session:
        """The connection, once there is one that reads the log.

        With `unless_denied`, `MissingRight` if every broker refuses the user: who changes maps is
        told at once. Others wait; a broker whose users are kept elsewhere may refuse for a while.
        """
        while self.session is None or not self.session.is_open:
            if unless_denied and self.denied:
                raise MissingRight(f"every broker refuses this user: {self.problem}")
            self._connected.clear()
            await self._connected.wait()
        return self.session

    # The log

    async def _follow(self) -> None:
        """Hold a connection to a node that has the log; go to the next one when it is lost."""
        attempt = 0
        while True:
            denials = 0
            addresses = await self._addresses()
            for parameters in addresses:
                try:
                    session = await self._attach(parameters)
                except Exception as error:  # nothing may end this task: nobody would notice
                    self._note_problem(error)
                    self.counts["failed_connects"] += 1
                    logger.debug("no map log through %s: %s", parameters.host, self.problem)
                    self._failed.add((parameters.host, parameters.port))
                    denials += any(word in self.problem for word in _DENIALS)
                    continue
                attempt = 0
                self._failed.clear()
                await self._serve(session)
                logger.info(
                    "the map log is followed no more through %s: %s", session.where, self.problem
                )
                break
            self.denied = denials == len(addresses)
            if self.denied:
                self._connected.set()  # for who asked to be told
            attempt += 1
            await asyncio.sleep(_BACKOFF.pause(attempt, _random.random()))

    async def _attach(self, parameters: pika.ConnectionParameters) -> Session:
        session = await Session.open(parameters, self.options.connect_timeout)
        if not self.has_log:
            return session
        try:
            async with asyncio.timeout(self.options.connect_timeout):
                await self.log.attach(session)
            await self.log.catch_up(self.options.connect_timeout)
            await self._learn_addresses(session)
        except BaseException as error:
            if isinstance(error, Exception) and self.view and not self._nodes.last:
                with suppress(Exception):  # there may be nodes that have the log
                    if not session.is_open:  # a node of 3.10 that has just joined ends it (541)
                        await session.close()
                        session = await Session.open(parameters, self.options.connect_timeout)
                    await self._nodes.learn(session)
            await session.close()
            if isinstance(error, TimeoutError) and self.log.refused is not None:
                raise self.log.refused from None  # says more than that nothing came
            raise
        return session

    async def _learn_addresses(self, session: Session) -> None:
        """Ask the management API where nodes listen before anybody wants to reach them, if only
        maps say so. It is not waited for long; `_watch_nodes` asks it again.
        """
        if self.view and not all(
            self._trust.allows(each) for node in self.known_nodes() for each in node.addresses
        ):
            with suppress(Exception):
                async with asyncio.timeout(_LEARN_TIMEOUT):
                    await self._nodes.learn(session)

    async def _serve(self, session: Session) -> None:
        """Keep the map fresh over this connection until it is lost or stops answering."""
        self.session = session
        self.validated_at = time.monotonic()
        self._connected.set()
        self.counts["connects"] += 1
        logger.info("the map log is followed through %s", session.where)
        try:
            while True:
                await self._pause(session)
                if session.lost.done():
                    self.problem = session.lost.result()
                    return
                if self.has_log:
                    await self.refresh()
        except Exception as error:  # see _follow
            self._note_problem(error)
        finally:
            self.session = None
            self.counts["disconnects"] += 1
            await session.close()

    async def _pause(self, session: Session) -> None:
        """Wait until it is time to look at the log again, at once if its reading was ended."""
        pause = self.options.poll_interval * _random.uniform(0.8, 1.0)
        interrupted: asyncio.Future[Any] = asyncio.ensure_future(self.log.interrupted.wait())
        try:
            await asyncio.wait(
                [session.lost, interrupted], timeout=pause, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            interrupted.cancel()

    async def refresh(self) -> None:
        """Read the log to its end."""
        await self.log.catch_up(self.options.connect_timeout)
        self.validated_at = time.monotonic()
        self.counts["refreshes"] += 1

    async def change(self, step: Callable[[State], Awaitable[State | None]]) -> State:
        """Append what `step` makes of the current state, again and again until it is not void.

        `step` returns None where there is nothing to change. It takes effect once: where only the
        answer got lost, reading on shows that the record was stored.
        """
        proposals: list[asyncio.Future[bool]] = []
        async with asyncio.timeout(self.options.change_timeout):
            while True:
                session = await self.connected(unless_denied=True)
                if await self._is_current(session):
                    if any(each.done() and each.result() for each in proposals):
                        return self.log.state
                    state = self.log.state
                    proposed = await step(state)
                    proposals.append(asyncio.get_running_loop().create_future())
                    try:
                        if proposed is None or await self.log.append(
                            state, proposed, proposals[-1]
                        ):
                            return self.log.state
                    except MissingRight:
                        raise
                    except RemoteError as error:
                        logger.info("a change of the map log went wrong, trying again: %s", error)
                await asyncio.sleep(_random.uniform(0, 0.05))

    async def _is_current(self, session: Session) -> bool:
        """Read the log to its end; a node that can't, because it lost its replica, is left."""
        try:
            await self.refresh()
        except (RemoteError, TimeoutError) as error:
            self.problem = reason(error)
            await session.close()
            return False
        return True

    # Nodes

    async def _addresses(self) -> list[pika.ConnectionParameters]:
        """The addresses given, in random order, then those that maps and management know.

        A node that joined after the log was made has no replica of it, so a client that was given
        only such a node must find others.
        """
        given = _random.sample(self.given, len(self.given))
        nodes = self.known_nodes()
        nodes += [member.node for member in self._nodes.last]
        known = [parameters for node in nodes for parameters in self.parameters_for(node)]
        places = {(parameters.host, parameters.port): parameters for parameters in [*given, *known]}
        return [places[place] for place in sorted(places, key=lambda place: place in self._failed)]

    def parameters_for(self, node: Node) -> list[pika.ConnectionParameters]:
        """How to reach a node: at its own addresses, or else through a node that may be reached."""
        own = self._own_addresses(node)
        if own or not node.addresses:
            return own
        if node.name not in self._served_elsewhere:
            self._served_elsewhere.add(node.name)
            logger.warning(
                "node %s is reached through the brokers at the URLs given: only a map says that it "
                "listens at %s, and no login goes where only a map points. Name a URL of it, "
                "management_urls, or TopologyOptions(trusted_hosts=…)",
                node.name,
                ", ".join(map(str, node.addresses)),
            )
        return _random.sample(self.given, len(self.given))

    def _own_addresses(self, node: Node) -> list[pika.ConnectionParameters]:
        return [
            same_but_at(self.given[0], each.host, each.port)
            for each in node.addresses
            if self._trust.allows(each)
        ]

    async def open_at(self, node: Node) -> Session:
        """A connection of its own to one node, for work that must be done there."""
        problem = f"no address of {node.name} is known"
        for parameters in self.parameters_for(node):
            try:
                session = await Session.open(parameters, self.options.connect_timeout)
            except Unreachable as error:
                problem = str(error)
                continue
            if self._own_addresses(node):
                self._reached.add(node.name)
            return session
        raise Unreachable(f"{node.name}: {problem}")

    def has_reached(self, node: Node) -> bool:
        """Whether this process was let in at the node's own address before."""
        return node.name in self._reached

    async def refuses(self, node: Node) -> bool:
        """Whether a node refuses everybody at the ports where this process was let in before."""
        addresses = [each for each in node.addresses if self._trust.allows(each)]
        if not self.has_reached(node) or not addresses:
            return False
        for address in addresses:
            try:
                async with asyncio.timeout(self.options.answer_timeout):
                    _, writer = await asyncio.open_connection(address.host, address.port)
            except ConnectionRefusedError:
                continue
            except (OSError, TimeoutError):
                return False
            writer.close()
            return False
        return True

    async def members(self) -> list[Member]:
        """The nodes of the cluster, from the management API, else those at the addresses given."""
        return await self._nodes.members(await self.connected(unless_denied=True))

    def known_nodes(self) -> list[Node]:
        return [node for shard_map in self.log.state.maps.values() for node in shard_map.nodes]

    def _note_problem(self, error: Exception) -> None:
        self.problem = reason(error)
        if not isinstance(error, WarrenError | TimeoutError | OSError):
            logger.exception("the control plane failed, and tries again")

    async def prove(self, session: Session) -> None:
        """Find out which management APIs are of the cluster that this connection is on."""
        await self._nodes.prove(session)

    async def _watch_nodes(self) -> None:
        silent = 0
        while True:
            try:
                down = await self._down_now()
            except Exception as error:  # see _follow
                logger.debug("the management API does not answer: %s", error)
                silent += 1
                if silent > _SILENT_LOOKS:  # what was down then may be up by now
                    self.down_nodes = set()
            else:
                silent = 0
                self._note_down(down)
            looks = 1 if silent <= _SILENT_LOOKS else _LOOKS_LEFT_OUT
            await asyncio.sleep(looks * self.options.watch_interval)

    async def _down_now(self) -> set[str]:
        """The nodes that are down, under all names that maps have for them."""
        async with asyncio.timeout(self.options.connect_timeout):
            session = await self.connected()
        members = await self._nodes.watch(session)
        return names_of([each for each in members if not each.running], self.known_nodes())

    def _note_down(self, down: set[str]) -> None:
        for name in sorted(down - self.down_nodes):
            logger.warning("node %s is down; keys of its shards are refused or moved", name)
        for name in sorted(self.down_nodes - down):
            logger.info("node %s is back", name)
        self.down_nodes = down

    # Shards

    async def look_at(
        self, queues: Iterable[str], *, known_away: bool = False
    ) -> dict[str, Declared | None]:
        """Messages and consumers of each queue now; None where no answer came in time.

        A queue that does not exist is left out. Each is asked on a channel of its own: one that
        does not answer holds up no other. What is known to be away is not asked, unless
        `known_away`: the broker would hold a channel for each such question for 64 s.
        """
        missing: set[str] = set()

        async def look(queue: str) -> Declared | None:
            if queue in self.away and not known_away:
                return None
            try:
                async with asyncio.timeout(self.options.answer_timeout):
                    channel = await (await self.connected()).channel()
                    try:
                        return await channel.declare(queue, passive=True)
                    finally:
                        channel.close()
            except Refused as error:
                # A queue whose node is down is "not found" as well, but "due to timeout".
                if error.code == 404 and "timeout" not in error.text:
                    missing.add(queue)
                return None
            except (RemoteError, TimeoutError):
                return None

        names = list(queues)
        seen = await asyncio.gather(*map(look, names))
        return {name: found for name, found in zip(names, seen, strict=True) if name not in missing}

    async def consumer_counts(self, shards: Iterable[str]) -> dict[str, int | None]:
        found = await self.look_at(shards)
        return {name: seen.consumers if seen else None for name, seen in found.items()}
