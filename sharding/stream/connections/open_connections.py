"""Which connections there are, and which of them to use, to keep or to close.

A connection serves publishers or subscriptions, never both: a consumer that reads slowly must not
hold up confirms on their way. Until its first use it is a *spare*, for either.

Decides only. `pool` has the lock, and does what is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from sharding.stream.protocol.constants import MAX_PUBLISHERS, MAX_SUBSCRIPTIONS, Broker

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient

CAPACITY = min(MAX_PUBLISHERS, MAX_SUBSCRIPTIONS)
READERS = 200
"""Readers ask about their stream over their own connection, for which they take more ids."""


class Role(Enum):
    PUBLISHERS = "publishers"
    SUBSCRIPTIONS = "subscriptions"


@dataclass(slots=True, eq=False)
class Place:
    """One connection."""

    client: StreamClient
    node: Broker
    """The node that callers ask for to get it."""
    role: Role | None
    """None for a spare."""
    empty_since: float | None
    capacity: int
    pins: int = 0
    """Callers that were given it and have not attached yet."""

    @property
    def load(self) -> int:
        return self.client.publishers + self.client.subscribers + self.pins

    def has_room(self, role: Role) -> bool:
        most = min(self.capacity, READERS) if role is Role.SUBSCRIPTIONS else self.capacity
        return self.load < most and not self.client.lost_credit


class OpenConnections:
    """The connections of a pool."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._places: list[Place] = []

    def __len__(self) -> int:
        return len(self._places)

    def add(self, client: StreamClient, node: Broker, role: Role | None, now: float) -> None:
        self._places.append(Place(client, node, role, now, self._capacity))

    def find(self, role: Role, nodes: Sequence[Broker]) -> Place | None:
        """A connection with room to the first of the nodes that has one; a spare if need be."""
        self._places = [place for place in self._places if not place.client.closed]
        for node in nodes:
            fitting = [
                place
                for place in self._places
                if place.node == node and place.role in (role, None) and place.has_room(role)
            ]
            if fitting:
                # A spare only when there is nothing else; the fullest, so that others get empty.
                return max(fitting, key=lambda place: (place.role is not None, place.load))
        return None

    def pin(self, place: Place, role: Role) -> None:
        """A caller is about to attach to it."""
        place.role = role
        place.pins += 1
        place.empty_since = None

    def unpin(self, place: Place, was_full: bool = False) -> None:
        place.pins -= 1
        if was_full:
            place.capacity = place.load

    def has_spare(self, node: Broker) -> bool:
        return any(
            place.role is None and place.node == node and not place.client.closed
            for place in self._places
        )

    def take_idle(self, now: float, idle_timeout: float) -> list[StreamClient]:
        """Take out what has been empty for long enough, to be closed, and what is closed."""
        kept, idle = [], []
        for place in self._places:
            if place.load:
                place.empty_since = None
            elif place.empty_since is None:
                place.empty_since = now
            if place.empty_since is not None and now - place.empty_since >= idle_timeout:
                idle.append(place.client)
            elif not place.client.closed:
                kept.append(place)
        self._places = kept
        return idle

    def next_idle_at(self, now: float, idle_timeout: float) -> float:
        """When to look for idle connections next.

        At the latest after the idle time: an id that the broker freed is not told to the pool.
        """
        if not self._places:
            return inf
        empty = (place.empty_since for place in self._places if place.empty_since is not None)
        return min((since + idle_timeout for since in empty), default=now + idle_timeout)

    def take_all(self) -> list[StreamClient]:
        places, self._places = self._places, []
        return [place.client for place in places]
