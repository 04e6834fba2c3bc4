"""Connections that are wrapped once: every channel they give is sharded.

    connection = ShardedConnection(pika.BlockingConnection(parameters), topology)
    channel = connection.channel()                  # a ShardedChannel

An application changes the line that makes its connection, and none that makes a channel. Whatever
else a connection can do is the wrapped one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pika
from pika.connection import Connection

from interceptors.method_rules import Placement
from interceptors.pika_blocking import ShardedChannel
from interceptors.pika_callback import AsyncShardedChannel
from sharding.cluster.topology import Topology

C = TypeVar("C")
OnBlocked = Callable[["ShardedConnection", Any], object]


class WrappedConnection(Generic[C]):
    """What all kinds share: a connection, and how its channels are wrapped."""

    def __init__(
        self,
        connection: C,
        topology: Topology,
        *,
        placement: Placement | str = Placement.LOCAL,
        confirm_timeout: float = 30.0,
        node: str | None = None,
    ) -> None:
        self._wrapped: Any = connection
        self._topology = topology
        self._options: dict[str, Any] = {
            "placement": Placement(placement),
            "confirm_timeout": confirm_timeout,
            "node": node,
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._wrapped!r}>"


class ShardedConnection(WrappedConnection[pika.BlockingConnection]):
    """A pika `BlockingConnection` whose channels are `ShardedChannel`s.

    The options are those of `ShardedChannel`, and hold for every channel.
    """

    def __enter__(self) -> ShardedConnection:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._wrapped.__exit__(*problem)

    def channel(self, channel_number: int | None = None) -> ShardedChannel:
        inner = self._wrapped.channel(channel_number)
        wrapped = ShardedChannel(inner, self._topology, **self._options)
        wrapped.connection = self  # or a channel of it would not be sharded
        return wrapped

    def add_on_connection_blocked_callback(self, callback: OnBlocked) -> None:
        self._wrapped.add_on_connection_blocked_callback(lambda _, frame: callback(self, frame))

    def add_on_connection_unblocked_callback(self, callback: OnBlocked) -> None:
        self._wrapped.add_on_connection_unblocked_callback(lambda _, frame: callback(self, frame))


class AsyncShardedConnection(WrappedConnection[Connection]):
    """A callback connection of pika's (`SelectConnection`, `AsyncioConnection`, …) whose channels
    are `AsyncShardedChannel`s. pika hands its own connection to callbacks; wrap it there.

        def on_open(connection):
            AsyncShardedConnection(connection, topology).channel(on_open_callback=on_channel)
    """

    def channel(
        self,
        channel_number: int | None = None,
        on_open_callback: Callable[[AsyncShardedChannel], Any] | None = None,
    ) -> AsyncShardedChannel:
        """As pika's: the channel may be used when `on_open_callback` gets it."""

        def opened(_: Any) -> None:
            if on_open_callback is not None:
                on_open_callback(wrapped)

        inner = self._wrapped.channel(channel_number, opened)
        wrapped = AsyncShardedChannel(inner, self._topology, **self._options)
        wrapped.connection = self
        return wrapped
