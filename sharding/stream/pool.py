"""The connections of a process, by node and role, made when they are needed and shared.

Without a balancer a node is dialled at its own address. With one every dial goes to the balancer,
and the Open answer says which node it reached. If that is not the one wanted, the connection is
kept as a spare, for whoever wants that node now or soon, and closed like any other when it stays
idle; so the leaders of many partitions are found with about one connect a node. A second spare of
the same node is closed at once.

A dial runs on a thread of its own, so that callers keep their deadlines, and all callers that want
the same node share it. `shelf` decides which connection is used, `balancer` how often to try.
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

from sharding.errors import LocalError, ShardUnavailable, Unreachable, WarrenError, is_retryable
from sharding.stream.background import close_all, in_background
from sharding.stream.balancer import Tries
from sharding.stream.errors import ClientFull, ConnectionLost, NodeNotReached
from sharding.stream.handlers import PublisherHandler, SubscriberHandler
from sharding.stream.protocol import Broker
from sharding.stream.shelf import Place, Role, Shelf

if TYPE_CHECKING:
    from sharding.stream.client import StreamClient

logger = logging.getLogger("warren.stream.pool")

CLOSE_TIMEOUT = 5.0


class _Search:
    """The way to one node, under way on a thread of its own."""

    def __init__(self, role: Role, node: Broker, tries: Tries) -> None:
        self.role = role
        self.node = node
        self.tries = tries
        self.callers = 0
        """How many wait for it; with none left it ends."""
        self.error: Exception | None = None


class Pool:
    """`dial` connects to an address, with a time limit of its own. Safe for threads."""

    def __init__(
        self,
        dial: Callable[[Broker], StreamClient],
        *,
        balancer: Broker | None = None,
        tries_per_node: int = 10,
        idle_timeout: float = 30.0,
        rng: random.Random | None = None,
    ) -> None:
        self._dial = dial
        self._balancer = balancer
        self._tries_per_node = tries_per_node
        self._idle_timeout = idle_timeout
        self._rng = rng or random.Random()
        self._shelf = Shelf()
        self._searches: dict[tuple[Role, Broker], _Search] = {}
        self._counters: Counter[str] = Counter()
        self._closing = threading.Event()
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._aged = threading.Condition(lock)
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
            with self._aged:
                self._aged.notify()

    @property
    def counters(self) -> Mapping[str, int]:
        """dials, failed_dials, reused, shared, kept, unwanted, idle_closed."""
        with self._changed:
            return Counter(self._counters)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Close every connection, all at the same time; who waits for one gets an error."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closing.set()
            clients = self._shelf.take_all()
            self._changed.notify_all()
            self._aged.notify()
        close_all(clients, timeout)
        with self._changed:
            self._changed.wait_for(
                lambda: not self._searches, max(0.0, deadline - time.monotonic())
            )
        self._closer.join(max(0.0, deadline - time.monotonic()))

    def __repr__(self) -> str:
        return f"<Pool: {len(self._shelf)} connections>"

    # Callers

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
                    self._shelf.unpin(place, full)

    def _place(self, role: Role, candidates: Sequence[Broker], deadline: float) -> Place:
        """A connection with room, pinned for the caller."""
        search: _Search | None = None
        failed: list[_Search] = []
        searched = False
        with self._changed:
            while True:
                if self._closing.is_set():
                    raise LocalError("the pool of connections is closed")
                if search is not None and search.error is not None:
                    failed.append(search)
                    search = None
                place = self._shelf.find(role, candidates[: self._good_enough(search, failed)])
                if place is not None:
                    self._shelf.pin(place, role)
                    self._counters["reused"] += not searched
                    return place
                if failed and self._is_hopeless(failed, candidates):
                    raise self._given_up(candidates, failed)
                # The one that was waited for may have ended well, and others been quicker.
                search = self._search(role, candidates[len(failed)], search)
                searched = True
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._given_up(candidates, [*failed, search])
                search.callers += 1
                self._changed.wait(left)
                search.callers -= 1

    def _good_enough(self, search: _Search | None, failed: Sequence[_Search]) -> int | None:
        """How many of the candidates will do; None for all."""
        if self._balancer is None:
            return len(failed) + 1
        if failed:
            return None
        return search.tries.good_enough if search is not None else 1

    def _is_hopeless(self, failed: Sequence[_Search], candidates: Sequence[Broker]) -> bool:
        """Through a balancer one search is enough: it would have come upon the others as well."""
        error = failed[-1].error
        final = error is not None and not is_retryable(error)
        return final or self._balancer is not None or len(failed) == len(candidates)

    def _given_up(self, candidates: Sequence[Broker], searches: Sequence[_Search]) -> Exception:
        last = searches[-1]
        if last.error is not None and not is_retryable(last.error):
            return last.error
        if self._balancer is not None:
            seen: Counter[Broker] = sum((each.tries.seen for each in searches), Counter())
            error = NodeNotReached(candidates, seen.elements(), f"the balancer {self._balancer}")
        else:
            reasons = "; ".join(
                f"{each.node}: {each.error or 'not connected in time'}" for each in searches
            )
            error = Unreachable(f"no node can be connected to; {reasons}")
        error.__cause__ = last.error
        return error

    # Searches

    def _search(self, role: Role, node: Broker, joined: _Search | None) -> _Search:
        """The search for a node that is under way, or a new one."""
        search = self._searches.get((role, node))
        if search is not None:
            self._counters["shared"] += search is not joined
            return search
        search = _Search(role, node, Tries(self._tries_per_node))
        self._searches[role, node] = search
        in_background(lambda: self._run(search), f"warren-dial-{node}")
        return search

    def _run(self, search: _Search) -> None:
        error: Exception | None = None
        try:
            if self._balancer is None:
                self._connect(search, search.node)
            else:
                self._try_until_found(search, self._balancer)
        except Exception as problem:  # whatever it is, the callers must hear of it
            error = problem
        with self._changed:
            search.error = error
            self._forget(search)
            self._changed.notify_all()

    def _forget(self, search: _Search) -> None:
        if self._searches.get((search.role, search.node)) is search:
            del self._searches[search.role, search.node]

    def _connect(self, search: _Search, node: Broker) -> None:
        client = self._dialled(node)
        self._put(client, node, search.role)

    def _try_until_found(self, search: _Search, balancer: Broker) -> None:
        tries = search.tries
        problem: WarrenError | None = None
        while not self._is_over(search):
            if tries.are_used_up or self._closing.is_set():
                raise problem or Unreachable(f"{search.node} was not reached")
            try:
                client = self._dialled(balancer)
            except WarrenError as error:
                if not is_retryable(error):
                    raise
                problem = error
                with self._changed:
                    tries.failures += 1
                    self._changed.notify_all()
            else:
                self._note(search, client)
            if not self._is_over(search):
                self._closing.wait(tries.pause(self._rng))

    def _is_over(self, search: _Search) -> bool:
        """Whether there is a connection, perhaps one that another search came upon, or nobody
        waits for one any more."""
        with self._changed:
            if not search.callers:
                self._forget(search)
                return True
            return self._shelf.find(search.role, [search.node]) is not None

    def _note(self, search: _Search, client: StreamClient) -> None:
        """A try reached some node: the one wanted, or one to be kept, or one of no use."""
        wanted = client.node == search.node
        with self._changed:
            search.tries.seen[client.node] += 1
            elsewhere = any(other.node == client.node for other in self._searches.values())
            keep = not wanted and (elsewhere or not self._shelf.has_spare(client.node))
            if not wanted:
                self._counters["kept" if keep else "unwanted"] += 1
            self._changed.notify_all()  # with each try, more candidates may be good enough
        if wanted or keep:
            self._put(client, client.node, search.role if wanted else None)
        else:
            client.close(CLOSE_TIMEOUT)

    def _dialled(self, address: Broker) -> StreamClient:
        with self._changed:
            self._counters["dials"] += 1
        try:
            return self._dial(address)
        except BaseException:
            with self._changed:
                self._counters["failed_dials"] += 1
            raise

    def _put(self, client: StreamClient, node: Broker, role: Role | None) -> None:
        with self._changed:
            closing = self._closing.is_set()
            if not closing:
                self._shelf.add(client, node, role, time.monotonic())
                self._changed.notify_all()
                self._aged.notify()
        if closing:
            client.close(CLOSE_TIMEOUT)

    # Idle connections

    def _close_idle(self) -> None:
        while not self._closing.is_set():
            with self._aged:
                now = time.monotonic()
                idle = self._shelf.take_idle(now, self._idle_timeout)
                self._counters["idle_closed"] += len(idle)
                if not idle and not self._closing.is_set():
                    at = self._shelf.next_idle_at(now, self._idle_timeout)
                    self._aged.wait(None if at == inf else at - now)
            close_all(idle, CLOSE_TIMEOUT)
