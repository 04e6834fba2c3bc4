"""On real brokers behind HAProxy: the node that is wanted is found, in few connects."""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from sharding.stream.connections.connection import ConnectOptions, Login, StreamClient, connect
from sharding.stream.connections.locator import Locator
from sharding.stream.connections.pool import Pool
from sharding.stream.environment import EnvironmentOptions
from sharding.stream.errors import NodeNotReached
from sharding.stream.protocol.commands import Create, DeclarePublisher, Delete, Subscribe
from sharding.stream.protocol.constants import FIRST, NEXT, Broker, OffsetSpec
from sharding.stream.routes.cache import RouteCache
from sharding.stream.routes.near_replicas import Placement, consumer_candidates
from tests.cluster import Balancer, Cluster, Node
from tests.cluster.waiting import PATIENCE

pytestmark = pytest.mark.cluster

PARTITIONS = 12


class Handler:
    """A publisher or subscription that nothing is sent to."""

    def on_confirms(self, publishing_ids: Sequence[int]) -> None: ...

    def on_refusals(self, refusals: Sequence[tuple[int, int]]) -> None: ...

    def on_chunk(self, chunk: memoryview) -> None: ...

    def on_activity(self, active: bool) -> OffsetSpec:
        return FIRST if active else NEXT

    def on_lost(self, reason: Exception) -> None: ...


def address(node: Node | Balancer) -> Broker:
    return Broker(node.endpoint.address, node.endpoint.ports["stream"])


def dialer(node: Node | Balancer) -> Callable[[Broker], StreamClient]:
    login = Login(vhost=node.endpoint.vhost)
    options = ConnectOptions(login, connect_timeout=PATIENCE, request_timeout=PATIENCE)
    return partial(connect, options=options)


def deadline() -> float:
    return time.monotonic() + PATIENCE


@pytest.fixture(scope="module")
def balancer(cluster: Cluster) -> Iterator[Balancer]:
    running = cluster.balancer()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def partitions(cluster: Cluster) -> Iterator[dict[str, Broker]]:
    """Streams and their leaders: four on each node, in an order without a pattern."""
    found: dict[str, Broker] = {}
    nodes = random.Random(4).sample(cluster.nodes * (PARTITIONS // 3), PARTITIONS)
    for node in nodes:
        client = dialer(node)(address(node))
        name = f"balancer-{secrets.token_hex(6)}"
        client.call(Create(name, {"queue-leader-locator": "client-local"}))
        found[name] = address(node)
        client.close()
    yield found
    client = dialer(node)(address(node))
    for name in found:
        client.call(Delete(name))
    client.close()


@contextmanager
def behind(balancer: Balancer) -> Iterator[tuple[RouteCache, Pool]]:
    """Routes and connections of a client that knows the balancer's address only."""
    dial = dialer(balancer)
    locator = Locator([address(balancer)], dial)
    routes = RouteCache(locator, pressure=lambda: 0.0)
    pool = Pool(dial, balancers=[address(balancer)])
    try:
        yield routes, pool
    finally:
        pool.close()
        routes.close()
        locator.close()


def publish(routes: RouteCache, pool: Pool, stream: str) -> Broker:
    """Declare a publisher at the stream's leader, and return the node it really is on."""
    client, number = pool.publisher(routes.leader(stream, PATIENCE), stream, Handler(), deadline())
    client.call(DeclarePublisher(number, None, stream))
    return client.node


def subscribe(routes: RouteCache, pool: Pool, stream: str) -> Broker:
    nodes = consumer_candidates(routes.route(stream, PATIENCE), Placement(), random.Random())
    client, number = pool.subscriber(nodes, stream, Handler(), deadline())
    client.call(Subscribe(number, stream, FIRST, credit=1))
    return client.node


def test_leaders_of_twelve_partitions_in_turn_take_two_connects_a_node_at_most(
    balancer: Balancer, partitions: dict[str, Broker]
) -> None:
    with behind(balancer) as (routes, pool):
        assert {name: publish(routes, pool, name) for name in partitions} == partitions
        assert pool.counters["dials"] <= 2 * 3


def test_leaders_of_twelve_partitions_at_once_take_two_connects_a_node_at_most(
    balancer: Balancer, partitions: dict[str, Broker]
) -> None:
    with behind(balancer) as (routes, pool), ThreadPoolExecutor(PARTITIONS) as threads:
        reached = threads.map(lambda name: publish(routes, pool, name), partitions)
        assert list(reached) == list(partitions.values())
        assert pool.counters["dials"] <= 2 * 3


def test_consumers_go_to_both_replicas_and_none_to_the_leader(
    balancer: Balancer, partitions: dict[str, Broker]
) -> None:
    name, leader = next(iter(partitions.items()))
    with behind(balancer) as (routes, pool), ThreadPoolExecutor(20) as threads:
        reached = Counter(threads.map(lambda _: subscribe(routes, pool, name), range(20)))
        assert leader not in reached
        assert len(reached) == 2


def test_balancer_that_reaches_one_node_gives_an_error_that_names_all_after_bounded_tries(
    cluster: Cluster, partitions: dict[str, Broker]
) -> None:
    only = cluster.nodes[0]
    name = next(name for name, leader in partitions.items() if leader != address(only))
    balancer = cluster.balancer(nodes=[only])
    try:
        with behind(balancer) as (routes, pool):
            with pytest.raises(NodeNotReached) as error:
                publish(routes, pool, name)
            assert error.value.wanted == (partitions[name],)
            # One node was ever seen, and each gets so many tries.
            tries = EnvironmentOptions().tries_per_node
            assert error.value.seen == {address(only): tries}
            assert str(partitions[name]) in str(error.value)
            assert str(address(only)) in str(error.value)
    finally:
        balancer.stop()
