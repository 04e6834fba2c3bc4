"""Each message's outcome is its own, and so is each caller's report."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import aio_pika
import pika
import pytest

from interceptors import AioShardedChannel, NotStored, ShardedChannel, ShardedPublisher
from sharding import InvalidInput, ShardUnavailable, Topology
from sharding.outcomes import Report, Result
from sharding.stream.producer.producer import Batch
from spark import PublishOptions
from spark.write.messages import Messages
from spark.write.targets import Sender, sender_to
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.spark.stored import amqp_uri
from tests.support import patient
from tests.support.sharded import (
    connection_to,
    drain,
    keys_of,
    make_sharded,
    messages_in,
    raw_channel,
    topology_of,
)
from tests.support.streams import environment_of, super_stream_in

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def topology(nodes: Cluster) -> Iterator[Topology]:
    with topology_of(nodes) as running:
        yield running


def test_each_of_two_that_publish_at_once_is_told_of_its_own_rows(
    nodes: Cluster, topology: Topology
) -> None:
    """09. Spark's sink has one publisher in each process, and whoever flushed first was told of
    everybody's failures: one task failed for the other's row, and that one reported success for a
    row that is in no queue."""
    shard_map = make_sharded(topology)
    gone, there = (shard.name for shard in shard_map.shards[:2])
    options = PublishOptions.of(queue=shard_map.logical, amqpUri=amqp_uri(nodes)).resolved()
    with raw_channel(nodes.nodes[0]) as channel:
        channel.queue_delete(gone)

    def task() -> AbstractContextManager[Sender]:
        return sender_to(options.connect, options.write, options.target)

    with task() as first:
        first.send(Messages([b"lost"], [next(keys_of(shard_map, gone))]))
        sending: Any = first
        wait_until(lambda: sending._batch._of.counters["unroutable"])  # it has come back
        with task() as second:
            second.send(Messages([b"fine"], [next(keys_of(shard_map, there))]))
            assert second.finish() == 1
        with pytest.raises(NotStored, match="0 stored, 1 unroutable"):
            first.finish()


def test_each_of_two_that_flush_one_producer_at_once_is_told_of_its_own_messages(
    nodes: Cluster,
) -> None:
    """09, of stream producers. Whoever flushed first was told of everybody's messages: the one
    whose partition is there failed for the other's, and that one was told that all is stored."""
    with (
        environment_of(nodes, **patient.STREAMS) as environment,
        super_stream_in(environment, partitions=2) as invoices,
        # Nothing is written before the flush, so what goes to the deleted one can't be stored.
        environment.producer(invoices, linger=10 * PATIENCE, batch_messages=1000) as producer,
    ):
        gone, there = environment.partitions(invoices)
        keys = {producer.partition(key): key for key in map(str, range(99))}
        losing, storing = producer.batch(), producer.batch()
        lost = losing.send_many([b"lost"] * 50, [keys[gone]] * 50)
        for _ in range(50):
            storing.send(b"fine", key=keys[there])
        environment.delete_stream(gone)
        start = threading.Barrier(2, timeout=PATIENCE)

        def flush(batch: Batch) -> Report:
            start.wait()
            return batch.flush(PATIENCE)

        with ThreadPoolExecutor(2) as callers:
            report, fine = callers.map(flush, (losing, storing))
        assert fine == Report(stored=50)
        assert (report.stored, report.refused + report.unknown, report.pending) == (0, 50, 0)
        assert [each.number for each in report.not_stored] == list(lost)
        assert producer.flush(PATIENCE) == Report()


def test_messages_with_one_id_have_each_their_own_outcome(
    nodes: Cluster, topology: Topology
) -> None:
    """q06. aiormq finds what came back by its message id. Of two messages with one id the first,
    which no shard took, was confirmed, and the second, which was stored, was ShardUnavailable."""
    shard_map = make_sharded(topology)
    gone, there = (shard.name for shard in shard_map.shards[:2])
    with raw_channel(nodes.nodes[0]) as channel:
        channel.queue_delete(gone)

    async def publish_both() -> list[Any]:
        async with await aio_pika.connect(nodes.nodes[0].endpoint.amqp_url) as connection:
            wrapped = AioShardedChannel(await connection.channel(), topology)
            exchange = await wrapped.get_exchange(shard_map.logical)
            # So that the map is read, and both are on their way together.
            await exchange.publish(aio_pika.Message(b"warm"), next(keys_of(shard_map, there)))
            return await asyncio.gather(
                *(
                    exchange.publish(
                        aio_pika.Message(shard.encode(), message_id="event-1", delivery_mode=2),
                        next(keys_of(shard_map, shard)),
                        mandatory=False,
                    )
                    for shard in (gone, there)
                ),
                return_exceptions=True,
            )

    lost, stored = asyncio.run(publish_both())
    assert isinstance(lost, ShardUnavailable)
    assert type(stored).__name__ == "Ack"
    taken = drain(nodes.nodes[0], [there])
    assert [body for _, _, body in taken] == [b"warm", there.encode()]


def test_a_callback_that_exits_does_not_end_the_publisher(
    nodes: Cluster, topology: Topology
) -> None:
    """q10. `sys.exit` in `on_result` ended the publisher's thread: it went on to accept messages
    that nobody would ever send, and reported them as pending, for ever. The program took anything
    accepted after that for broken; now the thread goes on, so what is accepted has to be stored."""
    shard_map = make_sharded(topology)
    exited = threading.Event()

    def leave(_: Result) -> None:
        exited.set()
        sys.exit("enough")

    publisher = ShardedPublisher(
        topology, shard_map.logical, confirm_timeout=PATIENCE, on_result=leave
    )
    for number in range(20):
        publisher.publish(f"key-{number}", b"%d" % number)
    assert exited.wait(PATIENCE)
    for number in range(20, 70):
        publisher.publish(f"key-{number}", b"%d" % number)
    report = publisher.flush(PATIENCE)
    assert (report.stored, report.all_stored) == (70, True)
    assert publisher.close(PATIENCE).all_stored
    taken = drain(nodes.nodes[0], [shard.name for shard in shard_map.shards])
    assert sorted(int(body) for _, _, body in taken) == list(range(70))


def test_copies_are_refused_alike_also_one_that_is_no_list(
    nodes: Cluster, topology: Topology
) -> None:
    """q26. The channels took a BCC of text apart into letters, each a key of its own: it was
    confirmed, the copy that was asked for went nowhere, and a queue bound by a letter got one."""
    shard_map = make_sharded(topology)
    copies: Any = {"BCC": "audit"}
    queues = [f"{shard_map.logical}.{key}" for key in ("audit", "a")]
    with connection_to(nodes.nodes[0]) as connection:
        channel = connection.channel()
        for queue in queues:
            channel.queue_declare(queue, durable=True)
            channel.queue_bind(queue, shard_map.exchange, queue.rpartition(".")[2])
        wrapped = ShardedChannel(connection.channel(), topology)
        wrapped.confirm_delivery()
        with pytest.raises(InvalidInput, match="BCC"):
            wrapped.basic_publish(
                shard_map.logical, "key", b"1", pika.BasicProperties(headers=copies)
            )

    async def publish() -> None:
        async with await aio_pika.connect(nodes.nodes[0].endpoint.amqp_url) as connection:
            wrapped = AioShardedChannel(await connection.channel(), topology)
            exchange = await wrapped.get_exchange(shard_map.logical)
            with pytest.raises(InvalidInput, match="BCC"):
                await exchange.publish(aio_pika.Message(b"2", headers=copies), "key")

    asyncio.run(publish())
    assert [messages_in(nodes.nodes[0], queue) for queue in queues] == [0, 0]


def test_a_channel_that_is_closed_counts_nothing_as_sent(
    nodes: Cluster, topology: Topology
) -> None:
    """q32. aio-pika's wrapped channel counted before it sent, and whatever failed as unknown: ten
    publishes on a closed channel were ten messages that are perhaps stored."""
    logical = make_sharded(topology).logical

    async def publish() -> dict[str, float]:
        async with await aio_pika.connect(nodes.nodes[0].endpoint.amqp_url) as connection:
            channel = AioShardedChannel(await connection.channel(), topology)
            exchange = await channel.get_exchange(logical)
            await exchange.publish(aio_pika.Message(b"x"), "key")
            await channel.close()
            for _ in range(10):
                with pytest.raises(aio_pika.exceptions.ChannelInvalidStateError):
                    await exchange.publish(aio_pika.Message(b"x"), "key")
            return dict(channel.counters)

    counters = asyncio.run(publish())
    assert (counters["published"], counters["confirmed"], counters["unknown"]) == (1, 1, 0)
