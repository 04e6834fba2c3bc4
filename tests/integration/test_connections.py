"""A connection that is wrapped once gives sharded channels, of every kind of client."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import aio_pika
import aio_pika.pool
import pika
import pytest
from aio_pika.abc import AbstractConnection, AbstractRobustConnection
from pika.adapters.asyncio_connection import AsyncioConnection

from interceptors import (
    AioShardedChannel,
    AioShardedConnection,
    AsyncShardedChannel,
    AsyncShardedConnection,
    ShardedChannel,
    ShardedConnection,
)
from sharding import InvalidInput, Policy, Topology
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.sharded import fresh_queue, topology_of

pytestmark = pytest.mark.cluster

KEYS = [f"user-{number}" for number in range(30)]


@pytest.fixture
def topology(cluster: Cluster) -> Iterator[Topology]:
    with topology_of(cluster) as opened:
        yield opened


@pytest.fixture
def images(topology: Topology) -> Iterator[str]:
    name = fresh_queue()
    topology.set_policy(Policy.exactly(name, 2, name=name))
    topology.ensure(name)
    yield name
    topology.forget(name)


def depths(topology: Topology, name: str) -> dict[str, int]:
    """How many messages each shard has."""
    shard_map = topology.shard_map(name)
    assert shard_map is not None
    seen = topology.look_at(shard.name for shard in shard_map.shards)
    return {shard: found.messages for shard, found in seen.items() if found is not None}


def expected(topology: Topology, name: str) -> dict[str, int]:
    shard_map = topology.shard_map(name)
    assert shard_map is not None
    owners = [shard_map.shard_of(key).name for key in KEYS]
    return {shard.name: owners.count(shard.name) for shard in shard_map.shards}


def test_blocking(cluster: Cluster, topology: Topology, images: str) -> None:
    inner = pika.BlockingConnection(patient.parameters(cluster.nodes[0].endpoint.amqp_url))
    with ShardedConnection(inner, topology, confirm_timeout=PATIENCE) as connection:
        channel = connection.channel()
        assert isinstance(channel, ShardedChannel)
        channel.confirm_delivery()
        for key in KEYS:
            channel.basic_publish(images, key, key.encode())
        numbered = connection.channel(7)
        assert (isinstance(numbered, ShardedChannel), int(numbered)) == (True, 7)
        assert isinstance(channel.connection.channel(), ShardedChannel)  # as callbacks find it
        connection.process_data_events()
        assert connection.is_open  # whatever else it can do is the wrapped one's
        assert repr(inner) in repr(connection)
    assert inner.is_closed
    assert depths(topology, images) == expected(topology, images)


def test_options_hold_for_every_channel(cluster: Cluster, topology: Topology, images: str) -> None:
    """By a placement that no other channel has: shards of all nodes."""
    inner = pika.BlockingConnection(patient.parameters(cluster.nodes[0].endpoint.amqp_url))
    with ShardedConnection(inner, topology, placement="any") as connection:
        shard_map = topology.shard_map(images)
        assert shard_map is not None
        channel = connection.channel()
        tags = [channel.basic_consume(images, lambda *_: None) for _ in shard_map.shards]
        consumers = topology.consumer_counts(shard.name for shard in shard_map.shards)
        assert len(tags) == len(shard_map.shards)
        assert set(consumers.values()) == {1}


def test_callbacks(cluster: Cluster, topology: Topology, images: str) -> None:
    loop = asyncio.new_event_loop()
    done, problems = threading.Event(), []

    def on_open(connection: Any) -> None:
        wrapped = AsyncShardedConnection(connection, topology)
        returned.append(wrapped.channel(on_open_callback=on_channel))

    def on_channel(channel: Any) -> None:
        given.append(channel)
        unconfirmed = set(range(1, len(KEYS) + 1))

        def settle(frame: Any) -> None:
            tag, multiple = frame.method.delivery_tag, frame.method.multiple
            unconfirmed.difference_update(range(1 if multiple else tag, tag + 1))
            if not unconfirmed:
                channel.connection.close()

        assert isinstance(channel.connection, AsyncShardedConnection)
        channel.confirm_delivery(settle)
        # Held back until the broker has answered; what can be said is said at once all the same.
        copies = pika.BasicProperties(headers={"BCC": "audit"})
        with pytest.raises(InvalidInput, match="must not be set for a sharded name"):
            channel.basic_publish(images, KEYS[0], b"", copies)
        for key in KEYS:
            channel.basic_publish(images, key, key.encode())

    def on_close(_: Any, why: Any) -> None:
        problems.append(why)
        done.set()
        loop.stop()

    given: list[Any] = []
    returned: list[Any] = []
    parameters = patient.parameters(cluster.nodes[0].endpoint.amqp_url)
    thread = threading.Thread(target=loop.run_forever)
    loop.call_soon(
        lambda: AsyncioConnection(
            parameters,
            on_open_callback=on_open,
            on_open_error_callback=on_close,
            on_close_callback=on_close,
            custom_ioloop=loop,
        )
    )
    thread.start()
    assert done.wait(PATIENCE)
    thread.join()
    loop.close()
    assert isinstance(given[0], AsyncShardedChannel)
    assert given == returned
    assert isinstance(problems[0], pika.exceptions.ConnectionClosedByClient)
    assert depths(topology, images) == expected(topology, images)


@pytest.mark.parametrize("connect", [aio_pika.connect, aio_pika.connect_robust])
def test_aio_pika(cluster: Cluster, topology: Topology, images: str, connect: Any) -> None:
    async def main() -> None:
        inner = await connect(cluster.nodes[0].endpoint.amqp_url)
        async with AioShardedConnection(inner, topology) as connection:
            async with connection.channel(publisher_confirms=True) as channel:
                assert isinstance(channel, AioShardedChannel)
                exchange = await channel.get_exchange(images, ensure=False)
                for key in KEYS:
                    await exchange.publish(aio_pika.Message(key.encode()), key)
            again = await connection.channel()
            assert isinstance(again, AioShardedChannel)
            await again.close()
        assert inner.is_closed

    asyncio.run(main())
    assert depths(topology, images) == expected(topology, images)


@pytest.mark.parametrize("connect", [aio_pika.connect, aio_pika.connect_robust])
def test_connection_of_aio_pika_is_one_to_isinstance_and_callbacks(
    cluster: Cluster, topology: Topology, connect: Any
) -> None:
    senders: list[Any] = []

    async def main() -> Any:
        inner = await connect(cluster.nodes[0].endpoint.amqp_url)
        connection = AioShardedConnection(inner, topology)
        robust = connect is aio_pika.connect_robust
        assert isinstance(connection, AbstractConnection)
        assert isinstance(connection, AbstractRobustConnection) == robust
        assert str(connection) == str(inner)
        connection.close_callbacks.add(lambda sender, _: senders.append(sender))
        if robust:
            reconnected = asyncio.Event()
            connection.reconnect_callbacks.add(lambda sender: senders.append(sender))
            connection.reconnect_callbacks.add(lambda _: reconnected.set())
            connection.reconnect_interval = 0.1
            assert inner.reconnect_interval == 0.1, "aio-pika would wait its own 5 s"
            await inner.transport.connection.close(asyncio.CancelledError)
            async with asyncio.timeout(PATIENCE):
                await reconnected.wait()
        # A channel is enough to keep what was asked of the connection.
        channel = await connection.channel()
        del connection
        gc.collect()
        await inner.close()
        return await asyncio.sleep(0, (robust, channel))

    robust, channel = asyncio.run(main())
    assert [type(sender) for sender in senders] == [AioShardedConnection] * (3 if robust else 1)
    assert {id(sender) for sender in senders} == {id(channel._connection)}


def test_pools_of_aio_pika(cluster: Cluster, topology: Topology, images: str) -> None:
    async def connected() -> Any:  # for mypy a pool holds what derives from aio-pika's class
        inner = await aio_pika.connect_robust(cluster.nodes[0].endpoint.amqp_url)
        return AioShardedConnection(inner, topology)

    async def main() -> None:
        connections: aio_pika.pool.Pool[Any] = aio_pika.pool.Pool(connected, max_size=2)

        async def opened() -> Any:
            async with connections.acquire() as connection:
                return await connection.channel()

        channels: aio_pika.pool.Pool[Any] = aio_pika.pool.Pool(opened, max_size=5)

        async def publish(key: str) -> None:
            async with channels.acquire() as channel:
                exchange = await channel.get_exchange(images, ensure=False)
                await exchange.publish(aio_pika.Message(key.encode()), key)

        async with connections, channels:
            await asyncio.gather(*map(publish, KEYS))

    asyncio.run(main())
    assert depths(topology, images) == expected(topology, images)
