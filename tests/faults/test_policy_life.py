"""Every kind of client publishes from before a policy exists until its shards are made, changed and
removed: nothing that one was told is stored is lost, and a key's messages stay in order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pika.exceptions import ChannelClosedByBroker

from interceptors import ShardedChannel
from sharding import InvalidInput, Policy, Topology
from sharding.maps.naming import unrouted
from sharding.publishing.unrouted import bring_unrouted
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.faults.policy_load import CHANNELS, Found, Publishers, Timed, Watch
from tests.support.sharded import (
    connection_to,
    fresh_queue,
    raw_channel,
    shards_in_broker,
    topology_of,
)

pytestmark = pytest.mark.cluster

ROUNDS = int(os.environ.get("WARREN_POLICY_ROUNDS", "1"))
MESSAGES = 30 if ROUNDS > 1 else 6
"""Of each thread, at least, between two steps of the operator."""


class Life:
    """What an operator does to a name; after each step every thread publishes on."""

    def __init__(
        self, cluster: Cluster, topology: Topology, logical: str, publishers: Publishers
    ) -> None:
        self._cluster = cluster
        self._topology = topology
        self._logical = logical
        self._publishers = publishers
        self.timed = Timed()

    def before(self) -> None:
        """There is nothing, and everybody is told so."""
        self._publishers.wait_for(MESSAGES, "RU")

    def shard(self, shards_per_node: int, *, bring: bool = False) -> None:
        began = time.monotonic()
        policy = Policy.exactly(self._logical, shards_per_node, name=self._logical)
        self._topology.set_policy(policy)
        self._topology.ensure(self._logical)
        self.timed.note("ensure", began)
        if bring:  # as `warren shards ensure` does
            began = time.monotonic()
            bring_unrouted(self._topology, self._logical).result(2 * PATIENCE)
            self.timed.note("bring", began)
        self._publishers.wait_for(MESSAGES, "S")

    def declare_again(self) -> None:
        """An application declares the exchange, as with the plugin; the policy still matches."""
        with connection_to(self._cluster.nodes[2]) as connection:
            channel = ShardedChannel(connection.channel(), self._topology)
            channel.exchange_declare(self._logical, "x-modulus-hash", durable=True)
        self._publishers.wait_for(MESSAGES, "S")

    def forget(self) -> None:
        """The exchange stays: what channels publish is kept."""
        self._topology.forget(self._logical)
        self._publishers.wait_for(MESSAGES, "S", CHANNELS)
        self._publishers.wait_for(MESSAGES, "R", ["publisher"])

    def delete(self) -> None:
        """The exchange goes too, and everybody is told so."""
        with connection_to(self._cluster.nodes[1]) as connection:
            ShardedChannel(connection.channel(), self._topology).exchange_delete(self._logical)
        self._publishers.wait_for(MESSAGES)

    def clear(self) -> None:
        """The policy goes, and its shards stay, until the name is forgotten."""
        self._topology.clear_policy(self._logical)
        self._publishers.wait_for(MESSAGES, "S")
        self._topology.ensure(self._logical)
        self.forget()
        with pytest.raises(InvalidInput, match="must match a policy"):
            self._topology.ensure(self._logical)


def lives(life: Life, number: int) -> None:
    """One life of a policy; each round removes in another order."""
    life.before()
    for shards_per_node in (1, 2, 3):
        life.shard(shards_per_node, bring=number % 2 == 1)
    removals: list[tuple[Callable[[], None], Callable[[], None]]] = [
        (life.forget, lambda: life.shard(2)),
        (life.delete, life.declare_again),
        (life.clear, lambda: life.shard(1, bring=True)),
    ]
    turn = number % len(removals)
    for remove, make_again in [*removals[turn:], *removals[:turn]]:
        remove()
        make_again()
    removals[turn][0]()


@pytest.fixture
def operator(cluster: Cluster) -> Iterator[Topology]:
    with topology_of(cluster) as topology:
        yield topology


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_nothing_is_lost_and_keys_stay_in_order_while_a_policy_lives(
    cluster: Cluster, operator: Topology, tmp_path: Path, number: int
) -> None:
    logical = fresh_queue()
    kept = unrouted(logical)
    urls = [node.endpoint.amqp_url for node in cluster.nodes]
    watch = Watch(operator) if number % 2 else None
    with Publishers(tmp_path, logical, urls) as publishers:
        life = Life(cluster, operator, logical, publishers)
        try:
            lives(life, number)
        finally:
            if watch is not None:
                watch.end()
        publishers.end()
        queues = [*shards_in_broker(cluster, logical), *_if_there(cluster, kept)]
        found = Found.read(urls[0], queues)
        stored, refused, unknown = (publishers.told(what) for what in "SRU")
        times = found.times()
        lost = stored - times.keys()
        disorder = found.disorder(unknown) + found.overtaken(kept, unknown)
        twice = {body for body, count in times.items() if count > 1} - unknown
        print(
            f"\nround {number}, RabbitMQ {cluster.version}: {len(stored)} stored, {len(refused)} "
            f"refused, {len(unknown)} unknown ({len(unknown & times.keys())} of them stored); "
            f"{len(lost)} lost, {len(disorder)} out of order, {len(twice)} twice; "
            f"{len(found.by_queue.get(kept, []))} kept in the end; longest: {life.timed}; "
            f"watched {watch.looks if watch else 0} times"
        )
        for what in "RUX":
            for (kind, reason), count in sorted(publishers.reasons(what).items()):
                print(f"  {what} {kind}: {count} {reason}")
    assert not publishers.told("X")
    assert not lost, sorted(lost)[:10]
    assert not disorder, disorder[:10]
    assert not twice, sorted(twice)[:10]
    assert not refused & times.keys()


def _if_there(cluster: Cluster, queue: str) -> list[str]:
    with raw_channel(cluster.nodes[0]) as channel:
        try:
            channel.queue_declare(queue, passive=True)
        except ChannelClosedByBroker:
            return []
    return [queue]
