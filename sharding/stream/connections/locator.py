"""The one connection on which a process asks the cluster about itself, with failover.

It is made at the first call, and again at the first call after it was lost: to the next of the
addresses, and if none can be connected to, not sooner than after a pause. However many threads
call, one connection is being made. A connection whose node does not answer in time is given up as
well: a frozen node keeps its connections open, and heartbeats would notice only minutes later.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from sharding.errors import InvalidInput, LocalError, Unreachable, WarrenError, is_retryable
from sharding.stream.connections.background import close_all, in_background
from sharding.stream.errors import (
    ConnectionLost,
    NoAnswerInTime,
    NoLeader,
    StreamNotFound,
    StreamRefused,
    StreamUnavailable,
    refusal,
)
from sharding.stream.protocol import commands
from sharding.stream.protocol.answers import Answer, StreamMetadata
from sharding.stream.protocol.constants import Broker, Code, Key
from sharding.stream.routes.values import Finding, Missing, Partitions, StreamRoute

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient

logger = logging.getLogger("warren.stream.locator")

A = TypeVar("A", bound=Answer)

ARM_REFERENCE = "warren.route-cache"
"""Under this name no offset is ever stored: who asks for one only has the leader looked up."""
CLOSE_TIMEOUT = 5.0
SILENCE = 1.0
"""Who is silent for less may only be slow; an impatient caller must not cost the connection."""
QUESTIONS = frozenset(
    {
        Key.METADATA,
        Key.PARTITIONS,
        Key.ROUTE,
        Key.QUERY_OFFSET,
        Key.QUERY_PUBLISHER_SEQUENCE,
        Key.STREAM_STATS,
        Key.RESOLVE_OFFSET_SPEC,
    }
)
"""What changes nothing, and may be asked again elsewhere when no answer came."""


class Locator:
    """Calls go to one of `addresses`; `dial` connects to one, with a time limit of its own.

    Safe for threads. `on_update` and `on_disconnect` are called on the connection's reading thread.
    """

    def __init__(
        self,
        addresses: Sequence[Broker],
        dial: Callable[[Broker], StreamClient],
        *,
        retry_delay: float = 0.5,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not addresses:
            raise InvalidInput("addresses", "at least one locator is needed", addresses)
        self.on_update: Callable[[str], None] | None = None
        self.on_disconnect: Callable[[], None] | None = None
        self._addresses = tuple(addresses)
        self._dial = dial
        self._retry_delay = retry_delay
        self._clock = clock
        # Many clients with the same list should not all ask its first address.
        self._next = (rng or random.Random()).randrange(len(addresses))
        self._lock = threading.Lock()
        self._client: StreamClient | None = None
        self._connecting: Future[StreamClient] | None = None
        self._retry_at = 0.0
        self._server_version: tuple[int, ...] | None = None
        self._closing = threading.Event()
        self._counters: Counter[str] = Counter()

    # Calls

    def call(self, request: commands.Request[A], timeout: float) -> A:
        """The answer. A question that gets none is put to each other address within the time.

        Raises a `StreamRefused`, `Unreachable`, and for what is no question `ConnectionLost` or
        `NoAnswerInTime` if it was sent and not answered.
        """
        deadline = self._clock() + timeout
        # With one address a question gets a second connection too: the first may have been dead.
        tries = max(2, len(self._addresses)) if request.key in QUESTIONS else 1
        while True:
            client = self.connect(deadline - self._clock())
            left = max(0.0, deadline - self._clock())
            share = max(left / tries, min(left, SILENCE))
            try:
                return client.call(request, timeout=share)
            except (ConnectionLost, NoAnswerInTime) as error:
                if client.closed or share >= SILENCE:
                    self._give_up(client, error)
                tries -= 1
                if not tries or self._clock() >= deadline:
                    raise

    def connect(self, timeout: float) -> StreamClient:
        """The connection, made if there is none. It may be lost at any time."""
        client = self._client
        if client is not None and client.closed:
            self._give_up(client, ConnectionLost("it was closed"))
        with self._lock:
            if self._closing.is_set():
                raise LocalError("the locator is closed")
            if self._client is not None:
                return self._client
            if self._connecting is None:
                self._connecting = in_background(self._connect_to_any, "warren-locator")
            connecting = self._connecting
        try:
            return connecting.result(max(0.0, timeout))
        except TimeoutError:
            if connecting.done():
                raise
            names = ", ".join(map(str, self._addresses))
            raise Unreachable(f"none of {names} answered within {timeout:.3g} s") from None

    @property
    def server_version(self) -> tuple[int, ...]:
        """The version of the node that answers; connects if no node ever did."""
        return self._server_version or self.connect(CLOSE_TIMEOUT * 2).server_version

    @property
    def counters(self) -> Mapping[str, int]:
        with self._lock:
            return Counter(self._counters)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        with self._lock:
            self._closing.set()
            client, self._client = self._client, None
            connecting = self._connecting
        if client is not None:
            close_all([client], timeout)
        elif connecting is not None:
            wait([connecting], timeout)

    def __repr__(self) -> str:
        return f"<Locator {', '.join(map(str, self._addresses))}>"

    # What the route cache asks

    def find_streams(self, names: Sequence[str], timeout: float) -> Mapping[str, Finding]:
        answer = self.call(commands.Metadata(tuple(names)), timeout)
        return {found.stream: _finding(found) for found in answer.streams}

    def find_partitions(self, super_stream: str, timeout: float) -> Finding:
        try:
            answer = self.call(commands.Partitions(super_stream), timeout)
        except StreamUnavailable:
            raise
        except StreamRefused as error:
            return Missing(super_stream, error.code)
        if not answer.streams:  # an exchange that is no super stream
            return Missing(super_stream, Code.NO_SUCH_STREAM)
        return Partitions(super_stream, answer.streams)

    def arm(self, stream: str, timeout: float) -> bool:
        """Have the connected node tell, once, when the stream's leader ends.

        A MetadataUpdate only comes on connections that have looked the leader up, and to ask for a
        stored offset does. It is not a question to fail over with: it is about this connection.
        """
        deadline = self._clock() + timeout
        client = self.connect(timeout)
        try:
            client.call(
                commands.QueryOffset(ARM_REFERENCE, stream), timeout=deadline - self._clock()
            )
        except (StreamNotFound, StreamUnavailable):
            return False
        return True

    def not_found(self, missing: Missing) -> Exception:
        return refusal("Lookup", missing.code, missing.name)

    def no_leader(self, stream: str, waited: float) -> Exception:
        return NoLeader(
            f"the stream {stream!r} had no leader for {waited:g} s: an election is under way, or "
            "most of its nodes are down"
        )

    # Connecting

    def _connect_to_any(self) -> StreamClient:
        try:
            client = self._dial_in_turn()
            # Nothing is declared on the broker: the id only has us told when the connection ends.
            client.attach_publisher(_Watch(self, client), "")
        except BaseException:
            with self._lock:
                self._connecting = None
            raise
        client.on_metadata_update = self._updated
        with self._lock:
            self._connecting = None
            closing = self._closing.is_set()
            if not closing:
                self._client = client
                self._server_version = client.server_version
                self._counters["connects"] += 1
                logger.info("the cluster is asked through %s", client.node)
        if closing:
            close_all([client], CLOSE_TIMEOUT)
            raise LocalError("the locator is closed")
        return client

    def _dial_in_turn(self) -> StreamClient:
        self._closing.wait(max(0.0, self._retry_at - self._clock()))
        failures: list[str] = []
        for _ in self._addresses:
            if self._closing.is_set():
                raise LocalError("the locator is closed")
            address = self._addresses[self._next]
            try:
                return self._dial(address)
            except WarrenError as error:
                self._counters["failed_dials"] += 1
                if not is_retryable(error):
                    raise  # a wrong password is wrong everywhere
                logger.debug("locator %s: %s", address, error)
                failures.append(f"{address}: {error}")
                self._next = (self._next + 1) % len(self._addresses)
        self._retry_at = self._clock() + self._retry_delay
        raise Unreachable("no locator can be reached; " + "; ".join(failures))

    def _updated(self, stream: str, _code: int) -> None:
        # The code is always "not available", also for a stream that was deleted: it says nothing.
        if self.on_update is not None:
            self.on_update(stream)

    def _give_up(self, client: StreamClient, reason: Exception) -> None:
        """Use another connection from now on; tell once that nothing is armed any more."""
        with self._lock:
            if self._client is not client:
                return
            self._client = None
            self._next = (self._next + 1) % len(self._addresses)
            self._counters["disconnects"] += 1
        logger.info("locator %s is given up: %s", client.address, reason)
        if self.on_disconnect is not None:
            self.on_disconnect()
        if not client.closed:
            in_background(client.close, "warren-close")


class _Watch:
    """Notices the end of a connection that has no publisher of its own."""

    def __init__(self, locator: Locator, client: StreamClient) -> None:
        self._locator = locator
        self._client = client

    def on_confirms(self, publishing_ids: Sequence[int]) -> None:
        pass

    def on_refusals(self, refusals: Sequence[tuple[int, int]]) -> None:
        pass

    def on_lost(self, reason: Exception) -> None:
        self._locator._give_up(self._client, reason)


def _finding(found: StreamMetadata) -> Finding:
    if found.code in (Code.OK, Code.STREAM_NOT_AVAILABLE):
        return StreamRoute(found.stream, found.leader, found.replicas)
    return Missing(found.stream, found.code)
