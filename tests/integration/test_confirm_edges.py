"""Confirms of wrapped channels where one message is not settled when the next is sent.

Found by an attack, each one seen failing.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import aio_pika
import pika
import pytest
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import AMQPError

from interceptors import AioShardedChannel, ShardedChannel
from interceptors.call_order import at_once
from sharding import OutcomeUnknown, Policy, ShardMap, ShardUnavailable, Topology
from sharding.maps.naming import shards_exchange
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.sharded import connection_to, drain, fresh_queue, raw_channel

pytestmark = pytest.mark.cluster


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[BlockingConnection]:
    with connection_to(cluster.nodes[0]) as opened:
        yield opened


@pytest.fixture
def images(topology: Topology) -> ShardMap:
    logical = fresh_queue()
    topology.set_policy(Policy.exactly(logical, 1, name=logical))
    return topology.ensure(logical).shard_map


def confirming(connection: BlockingConnection, topology: Topology) -> ShardedChannel:
    channel = ShardedChannel(connection.channel(), topology, confirm_timeout=PATIENCE)
    channel.confirm_delivery()
    return channel


def wait_for_the_broker(connection: BlockingConnection) -> None:
    """Until it has answered to what was published, and nobody has read the answer."""
    inner: Any = connection
    while inner._impl._get_write_buffer_size():
        inner._impl.ioloop.poll()
    answering = inner._impl._transport._sock
    wait_until(lambda: select.select([answering], [], [], 0)[0])


def test_a_message_sent_again_is_not_taken_for_the_first_that_comes_back(
    cluster: Cluster,
    topology: Topology,
    connection: BlockingConnection,
    images: ShardMap,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first was not confirmed in time: whoever sends it again wants to know of that one."""
    here = images.shard_of("user-1").name
    behind = shards_exchange(images.logical)
    channel = confirming(connection, topology)

    def out_of_time(*_: Any) -> None:
        raise OutcomeUnknown("no answer in time")

    # Through the channel's own node: others may route by the old table for a moment longer.
    with raw_channel(cluster.nodes[0]) as raw:
        raw.queue_unbind(here, behind, here)
        with monkeypatch.context() as hasty:
            hasty.setattr(channel._confirms, "wait_until", out_of_time)
            with pytest.raises(OutcomeUnknown):
                channel.basic_publish(images.logical, "user-1", b"hello")
        wait_for_the_broker(connection)
        raw.queue_bind(here, behind, here)
    wait_until(lambda: not topology.unavailable(here))
    channel.basic_publish(images.logical, "user-1", b"hello")
    assert drain(cluster.nodes[0], [here]) == [(here, "user-1", b"hello")]


def test_a_publish_that_is_interrupted_gives_its_confirm_to_no_other(
    cluster: Cluster,
    topology: Topology,
    connection: BlockingConnection,
    images: ShardMap,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {images.shard_of(f"user-{number}").name: f"user-{number}" for number in range(100)}
    gone, there = list(keys.values())[:2]
    with raw_channel(cluster.nodes[1]) as raw:
        raw.queue_delete(images.shard_of(gone).name)
    channel = confirming(connection, topology)
    inner: Any = connection
    kind = type(inner._impl)
    emit = kind._adapter_emit_data

    def interrupted(implementation: Any, data: bytes) -> None:
        emit(implementation, data)
        raise KeyboardInterrupt

    with monkeypatch.context() as pressed:
        pressed.setattr(kind, "_adapter_emit_data", interrupted)
        with pytest.raises(KeyboardInterrupt):
            channel.basic_publish(images.logical, there, b"sent")
    wait_for_the_broker(connection)

    def held_up(implementation: Any, data: bytes) -> None:  # so that the first is confirmed before
        implementation._adapter_call_later(0.1, lambda: emit(implementation, data))

    with monkeypatch.context() as slow:
        slow.setattr(kind, "_adapter_emit_data", held_up)
        with pytest.raises(ShardUnavailable):
            channel.basic_publish(images.logical, gone, b"nobody takes it")


def test_messages_with_one_id_are_not_overtaken(
    cluster: Cluster, topology: Topology, images: ShardMap
) -> None:
    """They go one at a time, and what is published later waits behind them."""
    ids = ["one", "one", "other", None, "one", "other", None, "one"]

    async def play() -> None:
        url = cluster.nodes[0].endpoint.amqp_url
        async with await aio_pika.connect(url) as connection:
            channel = AioShardedChannel(await connection.channel(), topology)
            exchange = await channel.get_exchange(images.logical, ensure=False)
            await asyncio.gather(
                *(
                    exchange.publish(aio_pika.Message(b"%d" % number, message_id=each), "user-1")
                    for number, each in enumerate(ids)
                )
            )
            await channel.close()

    asyncio.run(play())
    stored = [body for _, _, body in drain(cluster.nodes[0], [images.shard_of("user-1").name])]
    assert stored == [b"%d" % number for number in range(len(ids))]


def test_messages_with_one_id_that_come_back_do_not_wait_for_one_another(
    cluster: Cluster, topology: Topology, images: ShardMap
) -> None:
    with raw_channel(cluster.nodes[0]) as raw:
        raw.queue_delete(images.shard_of("user-1").name)

    async def play() -> list[Any]:
        url = cluster.nodes[0].endpoint.amqp_url
        async with await aio_pika.connect(url) as connection:
            channel = AioShardedChannel(await connection.channel(), topology)
            exchange = await channel.get_exchange(images.logical, ensure=False)
            message = aio_pika.Message(b"", message_id="one")
            publishing = [exchange.publish(message, "user-1", mandatory=False) for _ in range(5)]
            return await asyncio.gather(*publishing, return_exceptions=True)

    assert {type(each) for each in asyncio.run(play())} == {ShardUnavailable}


class DeafAfterPublish:
    """A way to a node that hears nothing more once a message was published through it.

    So does a broker with an alarm on: it reads no more from who publishes.
    """

    def __init__(self, node: Node) -> None:
        self._node = (node.endpoint.address, node.endpoint.ports["amqp"])
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._ended = threading.Event()
        self._serving = threading.Thread(target=self._serve, daemon=True)
        self._serving.start()

    def close(self) -> None:
        self._ended.set()
        self._serving.join()

    def _serve(self) -> None:
        with self._listening:
            client, _ = self._listening.accept()
        with client, socket.create_connection(self._node) as broker:
            ways = {client: broker, broker: client}
            while not self._ended.is_set():
                for heard in select.select(list(ways), [], [], 0.05)[0]:
                    data = heard.recv(65536)
                    if b"warren.nobody" in data:
                        del ways[client]
                    else:
                        ways[heard].sendall(data)


def test_a_broker_that_stops_reading_holds_up_no_consumer_for_ever(
    cluster: Cluster, topology: Topology, images: ShardMap
) -> None:
    """Behind a balancer the node is asked which one it is, by a message that comes back."""
    deaf = DeafAfterPublish(cluster.nodes[0])
    parameters = pika.URLParameters(cluster.nodes[0].endpoint.amqp_url)
    parameters.host, parameters.port = "127.0.0.1", deaf.port
    connection = pika.BlockingConnection(parameters)
    channel = ShardedChannel(connection.channel(), topology, confirm_timeout=0.5)
    raised: list[Exception] = []

    def consume() -> None:
        try:
            channel.basic_consume(images.logical, lambda *_: None)
        except Exception as error:
            raised.append(error)

    consuming = threading.Thread(target=consume, daemon=True)
    consuming.start()
    consuming.join(PATIENCE)
    still = consuming.is_alive()
    deaf.close()
    consuming.join(PATIENCE)
    with suppress(AMQPError):
        connection.close()
    assert not still
    assert [type(error) for error in raised] == [OutcomeUnknown]


def test_a_connection_can_be_closed_as_soon_as_its_node_has_said_which_one_it_is(
    connection: BlockingConnection, topology: Topology
) -> None:
    """pika's `close()` fails at a channel that ends while it waits for another (12 of 150)."""
    channel = ShardedChannel(connection.channel(), topology, confirm_timeout=PATIENCE)
    assert at_once(channel._calls.port.reply_to())
    inner: Any = connection
    assert list(inner._impl._channels) == [channel.channel_number]
