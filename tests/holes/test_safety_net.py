"""What reaches the exchange of a logical queue and no shard is kept or refused, never confirmed and
dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from interceptors import ShardedChannel, ShardedPublisher
from sharding import InvalidInput, Policy, Topology, WarrenError
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.sharded import (
    connection_to,
    drain,
    fresh_queue,
    keys_of,
    make_sharded,
    messages_in,
    raw_channel,
    shards_in_broker,
    topology_of,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def topology(nodes: Cluster) -> Iterator[Topology]:
    with topology_of(nodes) as running:
        yield running


class EarlyProducer:
    """A service that starts before its operator: it tries again until the exchange is there."""

    def __init__(self, cluster: Cluster, logical: str) -> None:
        self._cluster = cluster
        self._logical = logical
        self._end = threading.Event()
        self.confirmed: list[bytes] = []
        self.refused = 0
        """How often there was no exchange."""
        self.confirmed_by_map = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(1) as thread:
            publishing = thread.submit(self._publish)
            try:
                yield
            finally:
                self._end.set()
            publishing.result(PATIENCE)

    def _publish(self) -> None:
        with (
            topology_of(self._cluster) as topology,
            connection_to(self._cluster.nodes[0]) as connection,
        ):
            topology.wait_until_ready(PATIENCE)
            channel, number = None, 0
            while not self._end.is_set():
                try:
                    if channel is None:
                        channel = ShardedChannel(
                            connection.channel(), topology, confirm_timeout=PATIENCE
                        )
                        channel.confirm_delivery()
                    is_known = topology.shard_map(self._logical) is not None
                    channel.basic_publish(self._logical, f"key-{number}", b"%d" % number)
                except ChannelClosedByBroker:
                    self.refused += 1
                    channel = None
                except WarrenError:  # it may be tried again
                    time.sleep(0.01)
                else:
                    self.confirmed.append(b"%d" % number)
                    self.confirmed_by_map += is_known
                    number += 1

    def lost(self) -> set[bytes]:
        """What was confirmed and is in no shard."""
        shards = shards_in_broker(self._cluster, self._logical)
        return {*self.confirmed} - {body for _, _, body in drain(self._cluster.nodes[0], shards)}


def test_what_a_wrapped_channel_sends_before_the_map_is_there_comes_to_its_shard(
    nodes: Cluster, topology: Topology
) -> None:
    """01 A. The exchange was declared seconds before the map was appended: 1,355 of 8,172 messages
    of a wrapped channel were confirmed meanwhile, and dropped."""
    logical = fresh_queue()
    producer = EarlyProducer(nodes, logical)
    with producer.running():
        wait_until(lambda: producer.refused)
        topology.set_policy(Policy.exactly(logical, 8, name=logical))
        topology.ensure(logical)
        wait_until(lambda: producer.confirmed_by_map > 50)
    assert producer.lost() == set()


def test_shards_that_can_not_be_made_lose_nothing(nodes: Cluster, topology: Topology) -> None:
    """01 B. An argument that the broker refuses left the exchange behind, alone: from then on
    everything was confirmed and dropped, 12,190 of 12,190 messages."""
    logical = fresh_queue()
    producer = EarlyProducer(nodes, logical)
    with producer.running():
        wait_until(lambda: producer.refused)
        bad = Policy(logical, f"^{logical}$", 2, queue_arguments={"x-max-length": -1})
        topology.set_policy(bad)
        with pytest.raises(InvalidInput, match="x-max-length"):
            topology.ensure(logical)
        tries = producer.refused + len(producer.confirmed)
        wait_until(lambda: producer.refused + len(producer.confirmed) > tries + 20)
    assert producer.lost() == set()


def test_a_copy_of_the_application_s_own_does_not_hide_that_no_shard_took_the_message(
    nodes: Cluster, topology: Topology
) -> None:
    """q09. The broker returns a message if no queue took it. With a CC that another queue took, a
    message whose shard was not there was confirmed, and no reader of shards ever saw it."""
    shard_map = make_sharded(topology)
    logical, gone = shard_map.logical, shard_map.shards[0].name
    key, audit = next(keys_of(shard_map, gone)), f"{logical}.audit"
    copied = pika.BasicProperties(headers={"CC": ["audit"]})
    with raw_channel(nodes.nodes[0]) as channel:
        channel.queue_declare(audit, durable=True)
        channel.queue_bind(audit, shard_map.exchange, "audit")
        channel.queue_delete(gone)
    with connection_to(nodes.nodes[0]) as connection:
        wrapped = ShardedChannel(connection.channel(), topology)
        wrapped.confirm_delivery()
        with pytest.raises(InvalidInput, match="CC"):
            wrapped.basic_publish(logical, key, b"1", copied)
    with ShardedPublisher(topology, logical) as publisher:
        with pytest.raises(InvalidInput, match="CC"):
            publisher.publish(key, b"2", copied)
        assert publisher.flush(PATIENCE).stored == 0
    assert messages_in(nodes.nodes[0], audit) == 0
