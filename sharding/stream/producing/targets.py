"""Which partitions of a producer a message goes to, by its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from sharding.errors import InvalidInput, LocalError
from sharding.maps.slots import Key
from sharding.stream.producing.broker_routes import BrokerRoutes
from sharding.stream.producing.outgoing_messages import text_of
from sharding.stream.producing.partitioning import PartitionFunction

P = TypeVar("P")


class Unroutable(LocalError):
    """No partition of the super stream is bound to the key."""


class Targets(Generic[P]):
    """The partitions by stream, in the order of the super stream, and the way to choose one."""

    def __init__(self, partitions: dict[str, P], routing: PartitionFunction | BrokerRoutes) -> None:
        self._by_stream = partitions
        self._in_order = tuple(partitions.values())
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
        streams = self._routing.streams(text_of(key))
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
