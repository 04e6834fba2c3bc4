"""The connections of a process, by node and role, made when they are needed and shared.

`open_connections` decides which connection is used and which is idle, `node_search` makes new
ones, to a node itself or through a load balancer. Here callers wait for them, until their own
deadlines, and idle ones are closed by a thread that only has the time to watch.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from sharding.errors import InvalidInput, LocalError, ShardUnavailable
from sharding.stream.connections.attachments import PublisherHandler, SubscriberHandler
from sharding.stream.connections.background import close_all
from sharding.stream.connections.node_search import NodeSearch, NodeSearches
from sharding.stream.connections.open_connections import CAPACITY, OpenConnections, Place, Role
from sharding.stream.errors import ClientFull, ConnectionLost
from sharding.stream.protocol.constants import Broker

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient

logger = logging.getLogger("warren.stream.pool")

CLOSE_TIMEOUT = 5.0
_END_TIMEOUT = 2.0


class Pool:
    """Connections to nodes. Safe for threads.

    `dial` connects to an address, with a time limit of its own. With `balancers` every dial goes to
    one of them, the next one when that can't be reached, `tries_per_node` times for each node that
    is seen behind it. A connection that nothing
    uses is closed after `idle_timeout` seconds. `capacity` many publishers or subscriptions share a
    connection.
    """

    def __init__(
        self,
        dial: Callable[[Broker], StreamClient],
        *,
        balancers: Sequence[Broker] = (),
        tries_per_node: int = 10,
        idle_timeout: float = 30.0,
        capacity: int = CAPACITY,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if tries_per_node < 1:
            raise InvalidInput("tries_per_node", "must be at least 1", tries_per_node)
        if not idle_timeout > 0:
            raise InvalidInput("idle_timeout", "must be more than 0", idle_timeout)
        self._idle_timeout = idle_timeout
        self._changed = threading.Condition()
        self._open = OpenConnections(capacity)
        self._clock = clock
        self._searches = NodeSearches(
            dial,
            balancers,
            tries_per_node,
            rng or random.Random(),
            self._open,
            self._changed,
            clock,
        )
        self._counters: Counter[str] = Counter()
        self._closed = False
        self._closer = threading.Thread(target=self._close_idle, name="warren-idle", daemon=True)
        self._closer.start()

    def publisher(
        self, leader: Broker, stream: str, handler: PublisherHandler, deadline: float
    ) -> tuple[StreamClient, int]:
        """A connection to the node and a free publisher id on it, attached to `handler`.

        Raises `Unreachable`; behind a balancer `NodeNotReached`.
        """
        return self._attached(
            Role.PUBLISHERS,
            [leader],
            lambda client: client.attach_publisher(handler, stream),
            deadline,
        )

    def subscriber(
        self,
        candidates: Sequence[Broker],
        stream: str,
        handler: SubscriberHandler,
        deadline: float,
    ) -> tuple[StreamClient, int]:
        """As `publisher`, at the first of the nodes that can be connected to."""
        if not candidates:
            raise ShardUnavailable(
                f"no node to read {stream!r} from: it has no leader now, or only a leader and "
                "require_replica is set"
            )
        return self._attached(
            Role.SUBSCRIPTIONS,
            candidates,
            lambda client: client.attach_subscriber(handler, stream),
            deadline,
        )

    def release(self, client: StreamClient) -> None:
        """Say that an id was detached: a connection without any is closed after the idle time."""
        if not client.publishers and not client.subscribers:
            with self._changed:
                self._changed.notify_all()

    @property
    def counters(self) -> Mapping[str, int]:
        """dials, failed_dials, shared, reused, kept, unwanted, idle_closed."""
        with self._changed:
            return self._counters + self._searches.counters

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Close every connection, all at the same time; who waits for one gets an error."""
        deadline = self._clock() + timeout
        with self._changed:
            self._closed = True
            clients = self._open.take_all()
            self._changed.notify_all()
        self._searches.close(timeout)
        with self._changed:
            clients += self._open.take_all()  # found while it was being closed
        close_all(clients, max(0.0, deadline - self._clock()))
        self._closer.join(max(0.0, deadline - self._clock()))

    def __repr__(self) -> str:
        return f"<Pool: {len(self._open)} connections>"

    def _attached(
        self,
        role: Role,
        candidates: Sequence[Broker],
        attach: Callable[[StreamClient], int],
        deadline: float,
    ) -> tuple[StreamClient, int]:
        while True:
            place = self._place(role, candidates, deadline)
            full = False
            # Not under the lock: a connection's own thread may be about to call `release`.
            try:
                return place.client, attach(place.client)
            except ClientFull:
                full = True
            except ConnectionLost as error:
                logger.debug("%s was lost before its use: %s", place.node, error)
            finally:
                with self._changed:
                    self._open.unpin(place, full)

    def _place(self, role: Role, candidates: Sequence[Broker], deadline: float) -> Place:
        """A connection with room, pinned for the caller."""
        searches = self._searches
        search: NodeSearch | None = None
        failed: list[NodeSearch] = []
        waited = False
        with self._changed:
            while True:
                if self._closed:
                    raise LocalError("the pool of connections is closed")
                if search is not None and search.error is not None:
                    failed.append(search)
                    search = None
                place = self._open.find(role, candidates[: searches.good_enough(search, failed)])
                if place is not None:
                    self._open.pin(place, role)
                    self._counters["reused"] += not waited
                    return place
                if failed and searches.are_hopeless(failed, candidates):
                    raise searches.failure(candidates, failed)
                search = searches.join(role, candidates[len(failed)], search)
                left = deadline - self._clock()
                if left <= 0:
                    raise searches.failure(candidates, [*failed, search])
                search.callers += 1
                self._changed.wait(left)
                search.callers -= 1
                waited = True

    def _close_idle(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = self._clock()
                idle = self._open.take_idle(now, self._idle_timeout)
                self._counters["idle_closed"] += len(idle)
                if not idle:
                    at = self._open.next_idle_at(now, self._idle_timeout)
                    self._changed.wait(None if at == inf else at - now)
            close_all(idle, CLOSE_TIMEOUT)


class DedicatedConnections:
    """A connection for each subscription, which ends with it.

    For single active consumers: that the connection ended is the one thing a broker is sure to
    notice. A subscription that ended while its coordinator was being elected stayed the active one
    for as long as its connection lived (seen on 4.0.5), and nobody else got the stream.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def subscriber(
        self,
        candidates: Sequence[Broker],
        stream: str,
        handler: SubscriberHandler,
        deadline: float,
    ) -> tuple[StreamClient, int]:
        return self._pool.subscriber(candidates, stream, handler, deadline)

    def release(self, client: StreamClient) -> None:
        client.close(_END_TIMEOUT)
        self._pool.release(client)
