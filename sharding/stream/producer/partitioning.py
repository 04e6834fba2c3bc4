"""Which partition of a super stream a key belongs to.

* `by_hash`: murmur3, as the Java, .NET, Go and Rust clients do, so all agree on a key's partition.
* by the broker: the binding whose key is the message's (`Route`); for super streams that were made
  with binding keys.
* any function of the key and the number of partitions.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from sharding.errors import InvalidInput, LocalError
from sharding.maps.slots import Key, key_text, murmur3
from sharding.stream.protocol.answers import Answer
from sharding.stream.protocol.commands import Request, Route

PartitionFunction = Callable[[Key, int], int]
"""From a key and the number of partitions to a partition's number, from 0."""


def by_hash(key: Key, partitions: int) -> int:
    """
    >>> by_hash("hello1", 3)
    1
    """
    return murmur3(key) % partitions


A = TypeVar("A", bound=Answer)

MAX_KEYS = 10_000
MAX_AGE = 30.0
"""Seconds; a binding that was added or removed is seen after that."""


class Locator(Protocol):
    """Who can be asked about the whole cluster."""

    def call(self, request: Request[A], timeout: float) -> A: ...


class BrokerRoutes:
    """The partitions of a super stream by key. Safe for threads.

    A key that is bound nowhere has none, and one may be bound to several.
    """

    def __init__(
        self,
        super_stream: str,
        locator: Locator,
        timeout: float,
        *,
        max_keys: int = MAX_KEYS,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._super_stream = super_stream
        self._locator = locator
        self._timeout = timeout
        self._max_keys = max_keys
        self._max_age = max_age
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()

    def streams(self, key: str) -> tuple[str, ...]:
        """The streams that a message with this key goes to."""
        now = self._clock()
        with self._lock:
            asked_at, streams = self._known.get(key, (None, ()))
            if asked_at is not None and now - asked_at < self._max_age:
                self._known.move_to_end(key)
                return streams
        streams = self._locator.call(Route(key, self._super_stream), self._timeout).streams
        with self._lock:
            self._known[key] = now, streams
            self._known.move_to_end(key)
            while len(self._known) > self._max_keys:
                self._known.popitem(last=False)
        return streams


P = TypeVar("P")


class Unroutable(LocalError):
    """No partition of the super stream is bound to the key."""


class Targets(Generic[P]):
    """The partitions by stream, in the order of the super stream, and the way to choose one.

    `bound` has the stream of each binding: the hash chooses from it, as in all stream clients, and
    a partition that is bound twice gets twice the keys. Any other function chooses a partition.
    """

    def __init__(
        self,
        partitions: dict[str, P],
        routing: PartitionFunction | BrokerRoutes,
        bound: Sequence[str] = (),
    ) -> None:
        self._by_stream = partitions
        choices = bound if bound and routing is by_hash else partitions
        self._in_order = tuple(partitions[stream] for stream in choices)
        self._routing = routing
        self.only = self._in_order[0] if len(partitions) == 1 else None
        """Where messages without a key go, if there is no choice."""
        self.has_function = not isinstance(routing, BrokerRoutes)

    def by_function(self, key: Key) -> P:
        """The one partition that the function gives."""
        # Called only where `has_function`: the broker's routes are no function.
        index: int = self._routing(key, len(self._in_order))  # type: ignore[operator]
        if not 0 <= index < len(self._in_order):
            raise InvalidInput("partitioning", f"must give 0 to {len(self._in_order) - 1}", index)
        return self._in_order[index]

    def of(self, key: Key | None) -> tuple[P, ...]:
        """All partitions for a key; by the broker's bindings that may be several."""
        if key is None:
            if self.only is None:
                raise InvalidInput("key", "is needed to choose a partition", key)
            return (self.only,)
        if not isinstance(self._routing, BrokerRoutes):
            return (self.by_function(key),)
        streams = dict.fromkeys(self._routing.streams(key_text(key)))
        found = tuple(self._by_stream[each] for each in streams if each in self._by_stream)
        if not found:
            raise Unroutable(f"no partition of this producer is bound to the key {key!r}")
        return found

    def spread(
        self, keys: Sequence[Key] | None, count: int
    ) -> tuple[dict[P, Sequence[int]], dict[int, Unroutable]]:
        """Which positions of `count` messages go to which partition, and which to none."""
        if keys is None:
            return {self.of(None)[0]: range(count)}, {}
        shares: dict[P, list[int]] = {}
        unroutable: dict[int, Unroutable] = {}
        for position, key in enumerate(keys):
            try:
                targets = self.of(key)
            except Unroutable as error:
                unroutable[position] = error
                continue
            for partition in targets:
                shares.setdefault(partition, []).append(position)
        return dict(shares), unroutable
