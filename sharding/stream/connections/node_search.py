"""The ways to nodes that are under way: dials on threads of their own, shared by who wants a node.

Without a balancer a node is dialled once, at its own address. With one every dial goes to the
balancer (where there are several, to the next one after a dial that failed), and the Open answer
says which node it reached. If that is not the one wanted, the connection is kept as a spare, for
whoever wants that node now or soon; so the leaders of many partitions are found with about one
connect a node. A second spare of the same node is closed.

Callers hold the lock of `changed`, which is told of every step; searches take it for themselves.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sharding.backoff import Backoff
from sharding.errors import Unreachable, WarrenError, is_retryable
from sharding.stream.connections.background import in_background
from sharding.stream.connections.open_connections import OpenConnections, Role
from sharding.stream.errors import NodeNotReached
from sharding.stream.protocol.constants import Broker

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient


@dataclass(slots=True, eq=False)
class NodeSearch:
    """The way to one node."""

    role: Role
    node: Broker
    tries: Tries
    callers: int = 0
    """How many wait for it; with none left it ends."""
    error: Exception | None = None
    """Why it ended without a connection."""


class NodeSearches:
    """The searches of a pool. What they find is noted in `open_connections`."""

    def __init__(
        self,
        dial: Callable[[Broker], StreamClient],
        balancers: Sequence[Broker],
        tries_per_node: int,
        rng: random.Random,
        open_connections: OpenConnections,
        changed: threading.Condition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._dial = dial
        self._balancers = tuple(balancers)
        self._failed_balancers = 0
        self._tries_per_node = tries_per_node
        self._rng = rng
        self._open = open_connections
        self._changed = changed
        self._clock = clock
        self._closing = threading.Event()
        self._under_way: dict[tuple[Role, Broker], NodeSearch] = {}

    def join(self, role: Role, node: Broker, joined: NodeSearch | None) -> NodeSearch:
        """The search for a node that is under way, or a new one; `joined` is the caller's so far,
        which may have ended well, and others been quicker to use what it found."""
        search = self._under_way.get((role, node))
        if search is not None:
            self.counters["shared"] += search is not joined
            return search
        search = NodeSearch(role, node, Tries(self._tries_per_node))
        self._under_way[role, node] = search
        in_background(lambda: self._run(search), f"warren-dial-{node}")
        return search

    def good_enough(self, search: NodeSearch | None, failed: Sequence[NodeSearch]) -> int | None:
        """How many of the candidates, the best first, a caller may take; None for all."""
        if not self._balancers:
            return len(failed) + 1
        if failed:
            return None
        return search.tries.good_enough if search is not None else 1

    def are_hopeless(self, failed: Sequence[NodeSearch], candidates: Sequence[Broker]) -> bool:
        """Through a balancer one search is enough: it would have come upon the others as well."""
        error = failed[-1].error
        final = error is not None and not is_retryable(error)
        return final or bool(self._balancers) or len(failed) == len(candidates)

    def failure(self, candidates: Sequence[Broker], searches: Sequence[NodeSearch]) -> Exception:
        """The error that says what was wanted, and what came of it."""
        reason = searches[-1].error
        if reason is not None and not is_retryable(reason):
            return reason
        error: Unreachable
        if self._balancers:
            seen = [node for search in searches for node in search.tries.seen.elements()]
            names = " and ".join(map(str, self._balancers))
            error = NodeNotReached(candidates, seen, f"the balancer {names}")
        else:
            reasons = "; ".join(
                f"{search.node}: {search.error or 'not connected in time'}" for search in searches
            )
            error = Unreachable(f"no node can be connected to; {reasons}")
        error.__cause__ = reason
        return error

    def close(self, timeout: float) -> None:
        """Begin no try any more, and wait for those under way."""
        self._closing.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, timeout)

    # On the search's own thread

    def _run(self, search: NodeSearch) -> None:
        error: Exception | None = None
        try:
            if self._balancers:
                self._try_until_found(search)
            else:
                self._put(self._dialled(search.node), search.node, search.role)
        except Exception as problem:  # whatever it is, the callers must hear of it
            error = problem
        with self._changed:
            search.error = error
            self._forget(search)
            self._changed.notify_all()

    def _try_until_found(self, search: NodeSearch) -> None:
        tries = search.tries
        problem: WarrenError | None = None
        while not self._is_over(search):
            if tries.are_used_up or self._closing.is_set():
                raise problem or Unreachable(f"{search.node} was not reached")
            turn = self._failed_balancers
            try:
                client = self._dialled(self._balancers[turn % len(self._balancers)])
            except WarrenError as error:
                if not is_retryable(error):
                    raise
                problem = error
                with self._changed:
                    tries.failures += 1
                    if turn == self._failed_balancers:  # no other search has gone on from it
                        self._failed_balancers += 1
                    self._changed.notify_all()
            else:
                self._note(search, client)
            if not self._is_over(search):
                self._closing.wait(tries.pause(self._rng))

    def _is_over(self, search: NodeSearch) -> bool:
        """Whether nobody waits any more, or there is a connection, perhaps from another search."""
        with self._changed:
            if not search.callers:
                self._forget(search)
                return True
            return self._open.find(search.role, [search.node]) is not None

    def _forget(self, search: NodeSearch) -> None:
        if self._under_way.get((search.role, search.node)) is search:
            del self._under_way[search.role, search.node]

    def _note(self, search: NodeSearch, client: StreamClient) -> None:
        """A try reached some node: the one wanted, or one to be kept, or one of no use."""
        wanted = client.node == search.node
        with self._changed:
            search.tries.seen[client.node] += 1
            elsewhere = any(other.node == client.node for other in self._under_way.values())
            keep = not wanted and (elsewhere or not self._open.has_spare(client.node))
            if not wanted:
                self.counters["kept" if keep else "unwanted"] += 1
            self._changed.notify_all()  # with each try, more candidates may be good enough
        if wanted or keep:
            self._put(client, client.node, search.role if wanted else None)
        else:
            client.close()

    def _dialled(self, address: Broker) -> StreamClient:
        with self._changed:
            self.counters["dials"] += 1
        try:
            return self._dial(address)
        except BaseException:
            with self._changed:
                self.counters["failed_dials"] += 1
            raise

    def _put(self, client: StreamClient, node: Broker, role: Role | None) -> None:
        with self._changed:
            closing = self._closing.is_set()
            if not closing:
                self._open.add(client, node, role, self._clock())
                self._changed.notify_all()
        if closing:
            client.close()


PATIENCE = 2
_BACKOFF = Backoff(first=0.05, longest=0.5)


# How long to try for a node behind a load balancer, and from when on another one will do.
#
# A balancer can't be told which node to connect to; the node says who it is once a connection
# stands. Balancers deal connections out in turn, at random, or to who has least to do, so how many
# tries are reasonable depends on how many nodes were seen to be behind it:
#
# * `tries_per_node` times the nodes seen, then the search ends;
# * for each `PATIENCE` times the nodes seen, the next best candidate is good enough too. A consumer
#   gets its first choice from a balancer that deals in turn, and does not wait long for a node that
#   is down;
# * the first tries follow at once, as many as there are nodes and one more; from then on there are
#   pauses that double.
#
# Pure: no clock, no connection.


@dataclass(slots=True)
class Tries:
    """What came of the tries of one search so far."""

    per_node: int
    seen: Counter[Broker] = field(default_factory=Counter)
    failures: int = 0
    """Tries that reached no node at all."""

    @property
    def count(self) -> int:
        return self.seen.total() + self.failures

    @property
    def are_used_up(self) -> bool:
        return self.count >= self.per_node * self._nodes

    @property
    def good_enough(self) -> int:
        """How many of the candidates, the best first, are accepted now."""
        return 1 + self.count // (PATIENCE * self._nodes + 1)

    def pause(self, rng: random.Random) -> float:
        """How long to wait before the next try."""
        over = self.count - self._nodes - 1
        if over < 0 and not self.failures:
            return 0.0
        return _BACKOFF.pause(max(over, 0) + 1, rng.random())

    @property
    def _nodes(self) -> int:
        return max(1, len(self.seen))
