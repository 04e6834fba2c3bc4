"""A channel or a connection that is closed frees what it reads and requeues it in one step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pika
import pika.frame
import pika.spec
import pytest

from sharding.amqp.addresses import connection_parameters
from sharding.amqp.session import Channel, Session
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.support.sharded import fresh_queue

pytestmark = pytest.mark.cluster

MESSAGES = 5
PROTOCOL_HEADER = 8


@asynccontextmanager
async def overheard(url: str) -> AsyncIterator[tuple[str, bytearray]]:
    """The same broker at another address, and what a client sends to it."""
    broker = connection_parameters(url)
    said = bytearray()
    carrying: list[asyncio.Task[None] | None] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await asyncio.open_connection(broker.host, broker.port)

        async def copy(
            source: asyncio.StreamReader, target: asyncio.StreamWriter, heard: bytearray | None
        ) -> None:
            while data := await source.read(65_536):
                if heard is not None:
                    heard += data
                target.write(data)
            target.close()
            await target.wait_closed()

        carrying.append(asyncio.current_task())
        await asyncio.gather(copy(reader, to_broker, said), copy(from_broker, writer, None))

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield url.replace(f"{broker.host}:{broker.port}", f"127.0.0.1:{port}"), said
        await asyncio.gather(*filter(None, carrying))


def methods(said: bytearray) -> list[str]:
    """The names of the methods that a client has sent."""
    rest, found = bytes(said[PROTOCOL_HEADER:]), []
    while rest:
        consumed, frame = pika.frame.decode_frame(rest)
        if frame is None:
            break
        rest = rest[consumed:]
        if isinstance(frame, pika.frame.Method):
            found.append(frame.method.NAME)
    return found


async def read_exclusively(channel: Channel, queue: str) -> None:
    """Have all messages of the queue out and unacknowledged."""
    await channel.declare(queue, durable=True, arguments={"x-queue-type": "classic"})
    for number in range(MESSAGES):
        channel.send("", queue, b"%d" % number, pika.BasicProperties())
    out: asyncio.Queue[bytes] = asyncio.Queue()
    await channel.consume(queue, lambda message: out.put_nowait(message.body), exclusive=True)
    async with asyncio.timeout(PATIENCE):
        assert [await out.get() for _ in range(MESSAGES)] == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("closed", ["channel", "connection"])
def test_nothing_frees_a_queue_before_what_is_out_of_it_is_requeued(
    nodes: Cluster, closed: str
) -> None:
    """A consumer that is cancelled frees the lock, and the next reader gets later messages first.

    The moment between the two is short; so it is asked what is said on the wire.
    """
    asyncio.run(close_and_look(nodes.nodes[0].endpoint.amqp_url, closed))


async def close_and_look(broker: str, closed: str) -> None:
    queue = fresh_queue()
    async with overheard(broker) as (url, said):
        session = await Session.open(connection_parameters(url), PATIENCE)
        channel = await session.channel()
        await read_exclusively(channel, queue)
        if closed == "channel":
            await channel.wait_closed()
        await session.close(PATIENCE)
        assert "Channel.Close" in methods(said)
        assert "Basic.Cancel" not in methods(said)
    session = await Session.open(connection_parameters(broker), PATIENCE)
    try:
        left = await (await session.channel()).declare(queue, passive=True)
        assert (left.messages, left.consumers) == (MESSAGES, 0)
    finally:
        await session.close()
