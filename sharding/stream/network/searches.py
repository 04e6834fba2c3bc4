"""The ways to nodes that are under way: dials on threads of their own, shared by who wants a node.

Without a balancer a node is dialled once, at its own address. With one every dial goes to the
balancer, and the Open answer says which node it reached. If that is not the one wanted, the
connection is kept as a spare, for whoever wants that node now or soon; so the leaders of many
partitions are found with about one connect a node. A second spare of the same node is closed.

Callers hold the lock of `changed`, which is told of every step; searches take it for themselves.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharding.errors import Unreachable, WarrenError, is_retryable
from sharding.stream.errors import NodeNotReached
from sharding.stream.network.background import in_background
from sharding.stream.network.balancer import Tries
from sharding.stream.network.shelf import Role, Shelf
from sharding.stream.protocol import Broker

if TYPE_CHECKING:
    from sharding.stream.network.client import StreamClient


@dataclass(slots=True, eq=False)
class Search:
    """The way to one node."""

    role: Role
    node: Broker
    tries: Tries
    callers: int = 0
    """How many wait for it; with none left it ends."""
    error: Exception | None = None
    """Why it ended without a connection."""


class Searches:
    """The searches of a pool. What they find is put on the `shelf`."""

    def __init__(
        self,
        dial: Callable[[Broker], StreamClient],
        balancer: Broker | None,
        tries_per_node: int,
        rng: random.Random,
        shelf: Shelf,
        changed: threading.Condition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._dial = dial
        self._balancer = balancer
        self._tries_per_node = tries_per_node
        self._rng = rng
        self._shelf = shelf
        self._changed = changed
        self._clock = clock
        self._closing = threading.Event()
        self._under_way: dict[tuple[Role, Broker], Search] = {}

    def join(self, role: Role, node: Broker, joined: Search | None) -> Search:
        """The search for a node that is under way, or a new one; `joined` is the caller's so far,
        which may have ended well, and others been quicker to use what it found."""
        search = self._under_way.get((role, node))
        if search is not None:
            self.counters["shared"] += search is not joined
            return search
        search = Search(role, node, Tries(self._tries_per_node))
        self._under_way[role, node] = search
        in_background(lambda: self._run(search), f"warren-dial-{node}")
        return search

    def good_enough(self, search: Search | None, failed: Sequence[Search]) -> int | None:
        """How many of the candidates, the best first, a caller may take; None for all."""
        if self._balancer is None:
            return len(failed) + 1
        if failed:
            return None
        return search.tries.good_enough if search is not None else 1

    def are_hopeless(self, failed: Sequence[Search], candidates: Sequence[Broker]) -> bool:
        """Through a balancer one search is enough: it would have come upon the others as well."""
        error = failed[-1].error
        final = error is not None and not is_retryable(error)
        return final or self._balancer is not None or len(failed) == len(candidates)

    def failure(self, candidates: Sequence[Broker], searches: Sequence[Search]) -> Exception:
        """The error that says what was wanted, and what came of it."""
        reason = searches[-1].error
        if reason is not None and not is_retryable(reason):
            return reason
        error: Unreachable
        if self._balancer is not None:
            seen = [node for search in searches for node in search.tries.seen.elements()]
            error = NodeNotReached(candidates, seen, f"the balancer {self._balancer}")
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

    def _run(self, search: Search) -> None:
        error: Exception | None = None
        try:
            if self._balancer is None:
                self._put(self._dialled(search.node), search.node, search.role)
            else:
                self._try_until_found(search, self._balancer)
        except Exception as problem:  # whatever it is, the callers must hear of it
            error = problem
        with self._changed:
            search.error = error
            self._forget(search)
            self._changed.notify_all()

    def _try_until_found(self, search: Search, balancer: Broker) -> None:
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

    def _is_over(self, search: Search) -> bool:
        """Whether nobody waits any more, or there is a connection, perhaps from another search."""
        with self._changed:
            if not search.callers:
                self._forget(search)
                return True
            return self._shelf.find(search.role, [search.node]) is not None

    def _forget(self, search: Search) -> None:
        if self._under_way.get((search.role, search.node)) is search:
            del self._under_way[search.role, search.node]

    def _note(self, search: Search, client: StreamClient) -> None:
        """A try reached some node: the one wanted, or one to be kept, or one of no use."""
        wanted = client.node == search.node
        with self._changed:
            search.tries.seen[client.node] += 1
            elsewhere = any(other.node == client.node for other in self._under_way.values())
            keep = not wanted and (elsewhere or not self._shelf.has_spare(client.node))
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
                self._shelf.add(client, node, role, self._clock())
                self._changed.notify_all()
        if closing:
            client.close()
