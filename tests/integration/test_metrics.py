"""What Prometheus sees equals what was published, consumed and asked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import aio_pika
import pytest

from interceptors import ShardedChannel, ShardedPublisher
from interceptors.aio import AioShardedChannel
from interceptors.pika_callback import AsyncShardedChannel
from sharding import Policy, metrics
from sharding.cluster.topology import Topology
from sharding.groups import ConsumerGroup, StreamConsumerGroup
from sharding.metrics.names import Source
from sharding.stream import StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.integration.test_pika_async import Client
from tests.support import patient
from tests.support.sharded import connection_to, fresh_queue, raw_channel, topology_of
from tests.unit.test_metrics import scraped

pytestmark = pytest.mark.cluster


def test_every_counter_is_in_the_table(cluster: Cluster) -> None:
    """What is not is served without a type, and the document does not tell of it."""
    node, logical = cluster.nodes[0], fresh_queue()
    with ExitStack() as opened:
        enter = opened.enter_context
        topology = enter(topology_of(cluster))
        environment = enter(StreamEnvironment(node.endpoint.stream_url, **patient.STREAMS))
        topology.set_policy(Policy.exactly(logical, 1, name=logical))
        topology.ensure(logical)
        opened.callback(topology.forget, logical)
        environment.create_stream(logical)
        opened.callback(environment.delete_stream, logical)
        sources: list[Source] = [
            topology,
            environment,
            enter(environment.producer(logical)),
            enter(environment.consumer(logical)),
            enter(ShardedPublisher(topology, logical)),
            ShardedChannel(enter(connection_to(node)).channel(), topology),
            enter(ConsumerGroup(topology, logical, lambda _: None)),
        ]
        if environment.server_version >= (3, 11):
            group = StreamConsumerGroup(environment, logical, lambda _: None, group="audit")
            sources.append(enter(group))
        collected = list(metrics.collector(*sources).collect())
    assert [family.name for family in collected if family.type == "unknown"] == []
    assert {family.name.split("_")[1] for family in collected} >= {
        *("locator", "topology", "producer", "consumer", "publisher", "channel", "group"),
    }


def test_numbers_of_streams_equal_what_was_published(cluster: Cluster) -> None:
    stream, node = f"invoices-{secrets.token_hex(3)}", cluster.nodes[0]
    with StreamEnvironment(
        *(each.endpoint.stream_url for each in cluster),
        amqp_url=node.endpoint.amqp_url,
        **patient.STREAMS,
    ) as environment:
        environment.create_super_stream(stream, partitions=3)
        try:
            with (
                environment.producer(stream) as producer,
                environment.consumer(
                    stream, offset="first", name="audit", **patient.READER
                ) as consumer,
                metrics.serve(0, environment, producer, consumer) as server,
            ):
                for number in range(1_000):
                    producer.send(b"one", key=f"customer-{number}")
                assert producer.flush(timeout=PATIENCE).stored == 1_000
                producer.send_many([b"two"] * 500, [str(number) for number in range(500)])
                producer.flush(timeout=PATIENCE).raise_for_failures()
                messages = consumer.messages(timeout=PATIENCE)
                taken = sum(1 for _, _ in zip(range(1_500), messages, strict=False))
                seen = scraped(server.port)
        finally:
            environment.delete_super_stream(stream)
    of_stream = (("stream", stream),)
    assert taken == 1_500
    assert seen[("warren_producer_accepted_total", of_stream)] == 1_500
    assert seen[("warren_producer_stored_total", of_stream)] == 1_500
    assert seen[("warren_producer_refused_total", of_stream)] == 0
    assert seen[("warren_producer_unknown_total", of_stream)] == 0
    of_group = (("group", "audit"), ("stream", stream))
    assert seen[("warren_consumer_messages_total", of_group)] == 1_500
    assert seen[("warren_consumer_bytes_total", of_group)] > 1_500 * len(b"one")
    assert seen[("warren_routes_queries_total", ())] >= 1
    assert seen[("warren_pool_dials_total", ())] >= 1


def test_numbers_of_queues_equal_what_was_published(cluster: Cluster) -> None:
    logical = fresh_queue()
    with (
        topology_of(cluster) as topology,
        connection_to(cluster.nodes[0]) as connection,
    ):
        topology.set_policy(Policy.exactly(logical, 1, name=logical))
        topology.ensure(logical)
        channel = ShardedChannel(connection.channel(), topology)
        channel.confirm_delivery()
        with (
            ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher,
            metrics.serve(0, topology, publisher, channel) as server,
        ):
            for number in range(700):
                publisher.publish(f"user-{number}", b"one")
            assert publisher.flush(PATIENCE).stored == 700
            for number in range(300):
                publisher.publish(f"user-{number}", b"two")
            assert publisher.flush(PATIENCE).stored == 300
            for number in range(20):
                channel.basic_publish(logical, f"user-{number}", b"three")
            seen = scraped(server.port)
        channel.exchange_delete(logical)
    of_queue = (("logical", logical),)
    assert seen[("warren_publisher_accepted_total", of_queue)] == 1_000
    assert seen[("warren_publisher_stored_total", of_queue)] == 1_000
    assert seen[("warren_publisher_unsettled", of_queue)] == 0
    assert seen[("warren_channel_published_total", ())] == 20
    assert seen[("warren_channel_confirmed_total", ())] == 20
    assert seen[("warren_topology_map_changes_total", ())] >= 1
    assert seen[("warren_topology_epoch", ())] >= 1


def test_asynchronous_channels_count_what_became_of_their_messages(cluster: Cluster) -> None:
    """Stored ones, and some that came back because their shard is gone."""
    logical, node = fresh_queue(), cluster.nodes[0]
    keys = [f"user-{number}" for number in range(40)]
    with topology_of(cluster) as topology:
        topology.set_policy(Policy.exactly(logical, 1, name=logical))
        shard_map = topology.ensure(logical).shard_map
        lost = shard_map.shards[0].name
        gone = sum(shard_map.shard_of(key).name == lost for key in keys)
        with raw_channel(node) as raw:
            raw.queue_delete(lost)
        expected = {"published": 40, "confirmed": 40 - gone, "returned": gone, "nacked": 0}

        async def with_aio_pika() -> Mapping[str, float]:
            async with await aio_pika.connect(node.endpoint.amqp_url) as connection:
                channel = AioShardedChannel(
                    await connection.channel(on_return_raises=False), unsuspecting
                )
                exchange = await channel.get_exchange(logical)
                for key in keys:
                    await exchange.publish(aio_pika.Message(b"x"), key, mandatory=True)
                return dict(channel.counters)

        unsuspecting = cast(Topology, Unsuspecting(topology))
        assert asyncio.run(with_aio_pika()) == expected | {"unknown": 0}

        client = Client(
            "select", node.endpoint.amqp_url, lambda raw: AsyncShardedChannel(raw, unsuspecting)
        )
        try:
            channel = client.channel
            client.ask(lambda answer: channel.confirm_delivery(lambda _: None, answer))
            for key in keys:
                client.do(partial(channel.basic_publish, logical, key, b"x", None, True))
            wait_until(lambda: channel.counters == expected | {"unknown": 0})
        finally:
            client.end()
        topology.forget(logical)


class Unsuspecting:
    """A topology that never takes a shard for away, so that every message is sent."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topology, name)

    def suspect(self, shard: str) -> None:
        pass
