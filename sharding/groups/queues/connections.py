"""The connections of a worker: one to each node that has shards, one for all else. Thin I/O.

A shard is read over a connection to its own node: through another one, a question about a queue
whose node is down hangs for 64 s. Those connections never publish, because a broker short of
memory stops reading from connections that do, and would then not see acknowledgements either.

They run on whatever loop is current: a thread's own, or the application's.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from collections.abc import Callable, Sequence, Set

import pika
import pika.channel

from sharding.amqp.session import Channel, Session
from sharding.backoff import Backoff
from sharding.errors import RemoteError, Unreachable, WarrenError, reason
from sharding.groups.log import logger
from sharding.groups.options import GroupOptions


class _QuietRefusals(logging.Filter):
    """Keeps pika from warning that a shard is in exclusive use by a worker's own probing.

    For a group that is an answer, not a fault: each lock is tried once, and a shard that another
    worker holds is tried again and again.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        if not any("in exclusive use" in arg for arg in args if isinstance(arg, str)):
            return True
        connections = [arg.connection for arg in args if isinstance(arg, pika.channel.Channel)]
        names = [str(each.params.client_properties) for each in connections]
        return not any(WORKER_NAME in name for name in names)


WORKER_NAME = "warren worker"
logging.getLogger("pika.channel").addFilter(_QuietRefusals())


def for_a_worker(
    parameters: pika.ConnectionParameters, name: str, heartbeat: int
) -> pika.ConnectionParameters:
    """The same address and credentials, with a worker's heartbeat and name."""
    own = copy.copy(parameters)
    own.heartbeat = heartbeat
    own.client_properties = {"connection_name": f"{WORKER_NAME} {name}"}
    return own


_random = random.Random()  # its own, so that nobody else's sequence of numbers changes

FIRST_PAUSE = 0.1
Addresses = Callable[[str], Sequence[pika.ConnectionParameters]]


class Dialer:
    """Opens connections to nodes by name."""

    def __init__(self, addresses: Addresses, name: str, options: GroupOptions) -> None:
        self._addresses = addresses
        self._name = name
        self._options = options
        self._known: dict[str, Sequence[pika.ConnectionParameters]] = {}

    async def open(self, node: str) -> Session:
        problem = f"no address of {node} is known"
        for parameters in self._parameters(node):
            own = for_a_worker(parameters, self._name, self._options.heartbeat)
            try:
                return await Session.open(own, self._options.connect_timeout)
            except Unreachable as error:
                problem = str(error)
        raise Unreachable(f"{node}: {problem}")

    def _parameters(self, node: str) -> Sequence[pika.ConnectionParameters]:
        try:
            self._known[node] = self._addresses(node)
        except WarrenError as error:  # maps too old to publish by are good enough to read by
            logger.debug("the addresses of %s are those known before: %s", node, error)
        return self._known.get(node, ())


class NodeConnection:
    """Keeps a connection to one node, and proves again and again that the broker answers on it.

    `on_proof(sent)` is called when a question sent at that moment was answered: until then, at
    least, the broker had not given up this connection and the locks that hang on it.
    """

    def __init__(
        self,
        node: str,
        dialer: Dialer,
        options: GroupOptions,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        on_proof: Callable[[str, float], None],
    ) -> None:
        self.node = node
        self.session: Session | None = None
        self.trouble = "not connected yet"
        self._dialer = dialer
        self._options = options
        self._clock = clock
        self._on_change = on_change
        self._on_proof = on_proof

    async def run(self) -> None:
        backoff = Backoff(FIRST_PAUSE, self._options.take_interval)
        failures = 0
        while True:
            try:
                session = await self._dialer.open(self.node)
            except Exception as error:  # nothing may end this task: nobody would notice
                self._note(error)
                failures += 1
                await asyncio.sleep(backoff.pause(failures, _random.random()))
                continue
            failures = 0
            try:
                await self._serve(session)
            except Exception as error:
                self._note(error)
            finally:
                self.session = None
                self._on_change()
                await session.close()
            await asyncio.sleep(FIRST_PAUSE)

    async def _serve(self, session: Session) -> None:
        async with asyncio.timeout(self._options.answer_timeout):
            control = await session.channel()
        while not session.lost.done():
            sent = self._clock()
            async with asyncio.timeout(self._options.silence_bound):
                await control.qos(1)  # any question would do
            if self.session is None:
                logger.info("connected to %s", self.node)
                self.session, self.trouble = session, ""
                self._on_change()
            self._on_proof(self.node, sent)
            await asyncio.wait([session.lost], timeout=self._options.heartbeat / 4)
        raise Unreachable(f"{self.node}: the connection was lost: {session.lost.result()}")

    def _note(self, error: Exception) -> None:
        before, self.trouble = self.trouble, reason(error)
        if isinstance(error, WarrenError | TimeoutError | OSError):
            if self.trouble != before:  # it is tried every second
                logger.warning(
                    "no connection to %s, its shards are not read: %s", self.node, self.trouble
                )
        else:
            logger.exception("the connection to %s failed, and is tried again", self.node)


class NodeConnections:
    """A connection to each node that is wanted."""

    def __init__(
        self,
        dialer: Dialer,
        options: GroupOptions,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        on_proof: Callable[[str, float], None],
    ) -> None:
        self._dialer = dialer
        self._options = options
        self._clock = clock
        self._on_change = on_change
        self._on_proof = on_proof
        self._nodes: dict[str, tuple[NodeConnection, asyncio.Task[None]]] = {}
        self._proofs: dict[str, float] = {}

    def keep(self, wanted: Set[str]) -> None:
        """Connect to these nodes, and leave all others."""
        for node in wanted - self._nodes.keys():
            connection = NodeConnection(
                node, self._dialer, self._options, self._clock, self._on_change, self._proof
            )
            self._nodes[node] = connection, asyncio.create_task(connection.run())
        for node in self._nodes.keys() - wanted:
            self._nodes.pop(node)[1].cancel()

    def session(self, node: str) -> Session | None:
        """The connection to a node, None while it does not answer."""
        return self._nodes[node][0].session if node in self._nodes else None

    def proved(self, node: str) -> float:
        """When the last question was sent that the node has answered."""
        return self._proofs[node]

    async def close(self) -> None:
        sessions = [connection.session for connection, _ in self._nodes.values()]
        tasks = [task for _, task in self._nodes.values()]
        for task in tasks:
            task.cancel()
        closing = [session.close() for session in sessions if session is not None]
        await asyncio.gather(*closing, *tasks, return_exceptions=True)

    def _proof(self, node: str, sent: float) -> None:
        self._proofs[node] = sent
        self._on_proof(node, sent)


class SideConnection:
    """One connection to any node that answers, for announcements and dead letters."""

    def __init__(self, dialer: Dialer, nodes: Callable[[], Sequence[str]]) -> None:
        self._dialer = dialer
        self._nodes = nodes
        self._session: Session | None = None
        self._opening = asyncio.Lock()

    async def channel(self) -> Channel:
        return await (await self.session()).channel()

    async def session(self) -> Session:
        """The open connection; raises `Unreachable` if no node answers."""
        async with self._opening:
            if self._session is None or not self._session.is_open:
                self._session = await self._open()
            return self._session

    async def drop(self) -> None:
        """Leave a connection that does not do what it should; the next one may."""
        async with self._opening:
            session, self._session = self._session, None
        if session is not None:
            await session.close(timeout=0.5)

    close = drop

    async def _open(self) -> Session:
        nodes = list(self._nodes())
        problem = "no node is known"
        for node in _random.sample(nodes, len(nodes)):
            try:
                return await self._dialer.open(node)
            except RemoteError as error:
                problem = str(error)
        raise Unreachable(problem)
