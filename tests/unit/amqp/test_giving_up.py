"""A connection that we give up ourselves is no error in the application's log."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pika.adapters.asyncio_connection import AsyncioConnection

from sharding.amqp import session
from sharding.amqp.addresses import connection_parameters
from sharding.amqp.session import Session
from sharding.errors import Unreachable
from tests.cluster.waiting import PATIENCE

Attempt = Callable[[int, asyncio.Event], Awaitable[None]]


async def cancelled_in_the_handshake(port: int, reached: asyncio.Event) -> None:
    parameters = connection_parameters(f"amqp://127.0.0.1:{port}")
    attempt = asyncio.create_task(Session.open(parameters, PATIENCE))
    await reached.wait()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt


async def cancelled_before_it_is_reached(port: int, _: asyncio.Event) -> None:
    parameters = connection_parameters(f"amqp://127.0.0.1:{port}")
    attempt = asyncio.create_task(Session.open(parameters, PATIENCE))
    await asyncio.sleep(0)
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt


async def too_late(port: int, _: asyncio.Event) -> None:
    with pytest.raises(Unreachable, match="no answer within"):
        await Session.open(connection_parameters(f"amqp://127.0.0.1:{port}"), 0.1)


async def refused(_: int, __: asyncio.Event) -> None:
    with pytest.raises(Unreachable, match="refused"):
        await Session.open(connection_parameters("amqp://127.0.0.1:1"), PATIENCE)


async def with_a_silent_peer(attempt: Attempt) -> None:
    reached, left = asyncio.Event(), asyncio.Event()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        while await reader.read(100):
            pass
        left.set()
        writer.close()

    async with await asyncio.start_server(stay_silent, "127.0.0.1", 0) as server:
        await attempt(server.sockets[0].getsockname()[1], reached)
        for _ in range(100):  # what pika has put on the loop
            await asyncio.sleep(0)
        if reached.is_set():
            await asyncio.wait_for(left.wait(), PATIENCE)


def errors_of_pika(attempt: Attempt, caplog: pytest.LogCaptureFixture) -> list[str]:
    asyncio.run(with_a_silent_peer(attempt))
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.ERROR and record.name.startswith("pika")
    ]


@pytest.mark.parametrize(
    "attempt", [cancelled_in_the_handshake, cancelled_before_it_is_reached, too_late]
)
def test_giving_up_is_no_error(attempt: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    assert errors_of_pika(attempt, caplog) == []


def test_a_peer_that_refuses_still_is_one(caplog: pytest.LogCaptureFixture) -> None:
    assert errors_of_pika(refused, caplog)


def test_no_socket_is_forgotten_at_whatever_moment_we_give_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pika forgets one that it opens for an address that it was just about to be told."""
    made: list[socket.socket] = []

    class Seen(socket.socket):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    async def give_up_at(port: int) -> None:
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[str] = loop.create_future()
        connection = AsyncioConnection(
            connection_parameters(f"amqp://127.0.0.1:{port}"),
            on_open_error_callback=lambda *_: session.settle(lost, "given up"),
            custom_ioloop=loop,
        )
        while not session._has_looked_up(connection):
            await asyncio.sleep(0)
        await session._drop(connection, lost)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("pika.adapters.utils.connection_workflow.socket.socket", Seen)
        asyncio.run(give_up_at(silent.getsockname()[1]))
        monkeypatch.undo()
    [dialled] = [each for each in made if each.proto == socket.IPPROTO_TCP]
    is_closed = dialled.fileno() == -1
    dialled.close()
    assert is_closed
