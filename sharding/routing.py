"""What the parts that move messages need of the control plane, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pika

from sharding.shard_map import ShardMap


class Routing(Protocol):
    """The view of a `Topology` that channels and publishers work with. Safe from any thread."""

    def shard_map(self, logical: str) -> ShardMap | None:
        """The map in force, or None if the name is not sharded. Never waits for the network.

        Raises `StaleMap` if the map could not be checked for longer than the bound.
        """

    def connection_parameters(self, node: str) -> Sequence[pika.ConnectionParameters]:
        """How to connect to a node, the best way first; empty if no address is known."""

    def unavailable(self, shard: str) -> bool:
        """Whether the shard is known to be away at this moment."""

    def suspect(self, shard: str) -> None:
        """Say that a publish to the shard failed: it is checked at once, and until it is back."""

    def refresh(self, timeout: float) -> None:
        """Read the map log up to its end; for whoever finds that its map may be old."""
