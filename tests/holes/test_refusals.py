"""What can't work is refused when it is set, with nothing half-made left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from interceptors import ShardedChannel
from sharding import InvalidInput, Policy, Topology
from sharding.groups import AioConsumerGroup, ConsumerGroup, Delivery
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.sharded import (
    connection_to,
    drain,
    fresh_queue,
    make_sharded,
    publish_all,
    raw_channel,
    shards_in_broker,
    topology_of,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def topology(nodes: Cluster) -> Iterator[Topology]:
    with topology_of(nodes) as running:
        yield running


# The plugin's routing key


def test_a_key_that_is_the_plugin_s_routing_key_is_stored_once(
    nodes: Cluster, topology: Topology
) -> None:
    """14. Every shard was bound by the policy's `routing_key` too, on a direct exchange: one
    message with that key was reported as stored once, and was in all six shards."""
    shard_map = make_sharded(topology, shards_per_node=2, routing_key="1234")
    publish_all(topology, shard_map.logical, [("1234", b"one order")])
    taken = drain(nodes.nodes[0], shards_in_broker(nodes, shard_map.logical))
    assert taken == [(shard_map.shard_of("1234").name, "1234", b"one order")]


def test_messages_without_a_key_are_stored_once_where_the_plugin_s_routing_key_is_empty(
    nodes: Cluster, topology: Topology
) -> None:
    """14b. The same with an empty key, for the publisher and for a wrapped channel: 20 messages
    were 120."""
    shard_map = make_sharded(topology, shards_per_node=2, routing_key="")
    publish_all(topology, shard_map.logical, [("", b"p%d" % number) for number in range(10)])
    with connection_to(nodes.nodes[0]) as connection:
        channel = ShardedChannel(connection.channel(), topology, confirm_timeout=PATIENCE)
        channel.confirm_delivery()
        for number in range(10):
            channel.basic_publish(shard_map.logical, "", b"w%d" % number)
    taken = drain(nodes.nodes[0], shards_in_broker(nodes, shard_map.logical))
    bodies = [body.decode() for _, _, body in taken]
    assert bodies == [f"{by}{number}" for by in "pw" for number in range(10)]


# Queues of another kind


@pytest.fixture
def quorum_by_default(nodes: Cluster) -> Iterator[Cluster]:
    """The nodes with a virtual host where a queue of no stated type is a quorum queue."""
    view = nodes.new_vhost("quorum-by-default")
    api = nodes.nodes[0].management
    kind = {"default_queue_type": "quorum"}
    api.call("PUT", "vhosts", view.vhost, body=kind, timeout=PATIENCE)
    yield view
    nodes.delete_vhost(view.vhost)


def types_of_queues(cluster: Cluster) -> dict[str, str]:
    queues: list[dict[str, Any]] = cluster.nodes[0].management.get("queues", cluster.vhost)
    return {queue["name"]: queue["type"] for queue in queues}


def test_shards_are_classic_where_another_type_is_the_default(quorum_by_default: Cluster) -> None:
    """15. Shards were declared without a type: where the virtual host's default is quorum, all of
    them were quorum queues, which no group can lock and the manager took for classic ones."""
    with raw_channel(quorum_by_default.nodes[0]) as channel:
        channel.queue_declare("of no stated type", durable=True)
    default = types_of_queues(quorum_by_default)["of no stated type"]
    if not quorum_by_default.version.startswith("3.10"):  # which knows no default
        assert default == "quorum"
    with topology_of(quorum_by_default) as topology:
        logical = make_sharded(topology).logical
        shards = shards_in_broker(quorum_by_default, logical)
        with ConsumerGroup(topology, logical, print, options=patient.group()) as group:
            wait_until(lambda: group.shards == {*shards}, explain=lambda: str(group.failure))
    types = types_of_queues(quorum_by_default)
    assert {types[shard] for shard in shards} == {"classic"}


def is_refused_when_a_group_starts(
    topology: Topology, logical: str, rule: str, **options: Any
) -> None:
    chosen = patient.group(**options)
    with pytest.raises(InvalidInput, match=rule):
        ConsumerGroup(topology, logical, print, options=chosen).start()

    async def handle(_: Delivery) -> None: ...

    async def start() -> None:
        with pytest.raises(InvalidInput, match=rule):
            await AioConsumerGroup(topology, logical, handle, options=chosen).start()

    asyncio.run(start())


def test_shards_with_a_single_active_consumer_are_refused_when_a_group_starts(
    topology: Topology,
) -> None:
    """q14. Such queues refuse exclusive consumers as if another had them: workers took every shard
    for one that somebody else reads, and waited for ever, without an error."""
    arguments = {"x-single-active-consumer": True}
    logical = make_sharded(topology, queue_arguments=arguments).logical
    is_refused_when_a_group_starts(topology, logical, "has no exclusive consumer")


def test_dead_letters_to_a_sharded_name_are_refused_when_a_group_starts(
    nodes: Cluster, topology: Topology
) -> None:
    """q13. They were put into an ordinary queue of that name, made beside its shards: the workers
    of that name never saw one."""
    logical, failures = (make_sharded(topology).logical for _ in range(2))
    rule = "must not be a sharded name"
    is_refused_when_a_group_starts(topology, logical, rule, dead_letter=failures)
    assert failures not in types_of_queues(nodes)


# Names and addresses


def test_a_name_with_a_line_break_is_refused(nodes: Cluster, topology: Topology) -> None:
    """q20. RabbitMQ takes line breaks out of names and answers with another one, for which pika
    waited in vain: after 30 s "not connected yet", and policy, exchange and queue left behind."""
    start = fresh_queue()
    name = f"{start}\nline"
    with pytest.raises(InvalidInput, match="line breaks"):
        topology.set_policy(Policy.exactly(name, 1, name=name))
    topology.set_policy(Policy.exactly(name, 1, name=start))
    with pytest.raises(InvalidInput, match="line breaks"):
        topology.ensure(name)
    topology.clear_policy(start)
    api = nodes.nodes[0].management
    made = [*api.get("queues", nodes.vhost), *api.get("exchanges", nodes.vhost)]
    assert not [each["name"] for each in made if each["name"].startswith(start)]


def test_addresses_of_two_virtual_hosts_are_refused(nodes: Cluster) -> None:
    """16. Each process followed the log of one of them by chance: of ten, some found no map and no
    error, and published to where nobody reads. (Users and TLS: unit/cluster/test_topology_urls.)"""
    here, there = (node.endpoint.amqp_url for node in nodes.nodes[:2])
    elsewhere = there.rpartition("/")[0] + "/"
    for urls in ([here, elsewhere], [elsewhere, here]):
        with pytest.raises(InvalidInput, match="must all have the same virtual host"):
            Topology(*urls)
