"""Topologies and wrapped channels for tests, on a real cluster."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from sharding import Policy, ShardMap, ShardName
from sharding.cluster.topology import Topology, TopologyOptions
from sharding.publishing.publisher import ShardedPublisher
from tests.cluster import Cluster, Node
from tests.cluster.waiting import PATIENCE
from tests.support import patient


def fresh_queue() -> str:
    return f"images-{secrets.token_hex(3)}"


def topology_of(
    nodes: Iterable[Node],
    *,
    options: TopologyOptions | None = patient.TOPOLOGY,
    management: bool = True,
) -> Topology:
    """With `options=None` it has the product's own deadlines, for what is harmed."""
    chosen = list(nodes)
    return Topology(
        *(node.endpoint.amqp_url for node in chosen),
        management_urls=[node.management.url for node in chosen] if management else [],
        options=options,
    )


def set_up(nodes: Iterable[Node], policy: Policy, *, management: bool = True) -> ShardMap:
    """Every shard is made, however slow the machine is: nothing is harmed yet."""
    with topology_of(nodes, management=management) as topology:
        topology.set_policy(policy)
        return topology.ensure(policy.name).shard_map


@contextmanager
def before_harm(
    nodes: Iterable[Node],
    policy: Policy,
    *,
    options: TopologyOptions | None = None,
    management: bool = True,
) -> Iterator[tuple[Topology, ShardMap]]:
    """A topology with the product's own deadlines, which knows the shards that the policy made."""
    chosen = list(nodes)
    shard_map = set_up(chosen, policy, management=management)
    with topology_of(chosen, options=options, management=management) as topology:
        topology.wait_until_ready(PATIENCE)
        assert topology.shard_map(shard_map.logical) == shard_map
        yield topology, shard_map


@contextmanager
def connection_to(node: Node) -> Iterator[BlockingConnection]:
    connection = pika.BlockingConnection(patient.parameters(node.endpoint.amqp_url))
    try:
        yield connection
    finally:
        if connection.is_open:
            connection.close()


@contextmanager
def raw_channel(node: Node) -> Iterator[BlockingChannel]:
    with connection_to(node) as connection:
        yield connection.channel()


def make_sharded(topology: Topology, shards_per_node: int = 1, **policy: Any) -> ShardMap:
    """A logical queue of a new name; `policy` is what else its policy says."""
    logical = fresh_queue()
    topology.set_policy(Policy(logical, f"^{logical}$", shards_per_node, **policy))
    return topology.ensure(logical).shard_map


def keys_of(shard_map: ShardMap, shard: str) -> Iterator[str]:
    """Keys without end that belong to one shard."""
    keys = (f"user-{number}" for number in count())
    return (key for key in keys if shard_map.shard_of(key).name == shard)


def publish_all(topology: Topology, logical: str, messages: Iterable[tuple[str, bytes]]) -> None:
    """Store these messages, (key, body) each."""
    with ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher:
        for key, body in messages:
            publisher.publish(key, body)
        assert publisher.flush(PATIENCE).all_stored


def shards_in_broker(cluster: Cluster, logical: str) -> dict[str, str]:
    """Queue → node of every shard of `logical`, as the management API sees it."""
    queues: list[dict[str, Any]] = cluster.a_running_node().management.get("queues", cluster.vhost)
    return {
        queue["name"]: queue["node"]
        for queue in queues
        if (name := ShardName.parse(queue["name"])) is not None and name.logical == logical
    }


def drain(node: Node, queues: Iterable[str]) -> list[tuple[str, str, bytes]]:
    """Take every message out of these queues: (queue, routing key, body)."""
    taken = []
    with raw_channel(node) as channel:
        for queue in queues:
            while True:
                method, _, body = channel.basic_get(queue, auto_ack=True)
                if method is None:
                    break
                taken.append((queue, method.routing_key or "", body or b""))
    return taken


def messages_in(node: Node, queue: str) -> int:
    """How many are ready in a queue."""
    with raw_channel(node) as channel:
        return int(channel.queue_declare(queue, passive=True).method.message_count)
