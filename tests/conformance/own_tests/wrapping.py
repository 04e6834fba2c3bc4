"""A pytest plugin under which the tests of pika and aio-pika get our channels and connections.

It is loaded by its file name, because those projects call their tests `tests` too. WARREN_WRAP says
what is wrapped: the channels that a connection gives, or the connection itself.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

import aio_pika
import pika
import pika.adapters.blocking_connection
import pika.connection
import pytest
from aio_pika.abc import AbstractConnection

from interceptors import (
    AioShardedChannel,
    AioShardedConnection,
    AsyncShardedChannel,
    AsyncShardedConnection,
    ShardedChannel,
    ShardedConnection,
)
from sharding import Topology

CLIENT, WHAT = os.environ["WARREN_WRAP"].split()
TOPOLOGY = Topology(os.environ["WARREN_URL"])
wrapped = 0


def is_ours() -> bool:
    """Whether the topology itself asks for a channel, over a connection of its own."""
    return threading.current_thread().name == "warren-topology"


def count(made: Any) -> Any:
    global wrapped
    wrapped += 1
    return made


def wrap_blocking_channels() -> None:
    real = pika.BlockingConnection.channel

    def channel(self: Any, channel_number: int | None = None) -> Any:
        return count(ShardedChannel(real(self, channel_number), TOPOLOGY))

    pika.BlockingConnection.channel = channel  # type: ignore[method-assign]


def wrap_blocking_connections() -> None:
    real = pika.BlockingConnection

    class Wrapped(type):
        def __call__(cls, *arguments: Any, **options: Any) -> Any:
            return count(ShardedConnection(real(*arguments, **options), TOPOLOGY))

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, ShardedConnection)

    class BlockingConnection(metaclass=Wrapped):
        pass

    pika.BlockingConnection = BlockingConnection  # type: ignore[misc, assignment]


def wrap_callback_channels() -> None:
    real = pika.connection.Connection.channel

    def channel(self: Any, channel_number: Any = None, on_open_callback: Any = None) -> Any:
        if is_ours():
            return real(self, channel_number, on_open_callback)

        def opened(inner: Any) -> None:
            if on_open_callback is not None:
                on_open_callback(count(AsyncShardedChannel(inner, TOPOLOGY)))

        return real(self, channel_number, opened)

    pika.connection.Connection.channel = channel  # type: ignore[method-assign]


def wrap_callback_connections() -> None:
    real = pika.connection.Connection.channel

    class Unwrapped:
        """The connection, whose own `channel` is not ours."""

        def __init__(self, connection: Any) -> None:
            self._connection = connection

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

        def channel(self, *arguments: Any) -> Any:
            return real(self._connection, *arguments)

    def channel(self: Any, channel_number: Any = None, on_open_callback: Any = None) -> Any:
        if is_ours():
            return real(self, channel_number, on_open_callback)
        connection: Any = Unwrapped(self)
        sharded = AsyncShardedConnection(connection, TOPOLOGY)
        return count(sharded.channel(channel_number, on_open_callback))

    pika.connection.Connection.channel = channel  # type: ignore[method-assign]


def wrap_aio_channels() -> None:
    for kind in (aio_pika.Connection, aio_pika.RobustConnection):
        real = kind.channel

        def channel(
            self: Any, *arguments: Any, _kind: type = kind, _real: Any = real, **options: Any
        ) -> Any:
            made = _real(self, *arguments, **options)
            # A robust connection asks its base class for the channel, and then keeps it.
            is_outermost = _kind is aio_pika.RobustConnection or not isinstance(
                self, aio_pika.RobustConnection
            )
            return count(AioShardedChannel(made, TOPOLOGY)) if is_outermost else made

        if "channel" in vars(kind):
            kind.channel = channel  # type: ignore[method-assign]


def wrap_aio_connections() -> None:
    for name in ("connect", "connect_robust"):
        real = getattr(aio_pika, name)

        async def connect(*arguments: Any, _real: Any = real, **options: Any) -> Any:
            made = await _real(*arguments, **options)
            if not isinstance(made, AbstractConnection):  # a test's mock of one
                return made
            return count(AioShardedConnection(made, TOPOLOGY))

        setattr(aio_pika, name, connect)


WRAP = {
    ("blocking", "channels"): wrap_blocking_channels,
    ("blocking", "connections"): wrap_blocking_connections,
    ("callback", "channels"): wrap_callback_channels,
    ("callback", "connections"): wrap_callback_connections,
    ("aio", "channels"): wrap_aio_channels,
    ("aio", "connections"): wrap_aio_connections,
}


def stand_in_for_docker() -> None:
    """aio-pika's tests ask Docker for a broker; they get the one that runs."""
    port = int(os.environ["WARREN_PORT"])

    class Container:
        id = "ours"
        host = "127.0.0.1"
        ports = types.MappingProxyType({"5672/tcp": port, "5671/tcp": port})

    class DockerClient:
        def __init__(self, _: Any = None) -> None: ...

        def run(self, *_: Any, **__: Any) -> Any:
            return Container

        def kill(self, _: str) -> None: ...

        def remove(self, _: str) -> None: ...

    stand_in: Any = types.ModuleType("tests.docker_client")
    stand_in.ContainerInfo = Container
    stand_in.DockerClient = DockerClient
    stand_in.DockerHostInfo = object
    stand_in.DockerNotAvailableError = RuntimeError
    stand_in.check_docker_available = lambda: None
    sys.modules[stand_in.__name__] = stand_in


if WHAT != "nothing":
    WRAP[CLIENT, WHAT]()
if CLIENT == "aio":
    stand_in_for_docker()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{wrapped} {WHAT} were wrapped")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    TOPOLOGY.close()
