"""Topologies and wrapped channels for tests, on a real cluster."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from sharding import ShardName
from sharding.cluster.topology import Topology, TopologyOptions
from tests.cluster import Cluster, Node
from tests.support import patient


def fresh_queue() -> str:
    return f"images-{secrets.token_hex(3)}"


def topology_of(
    nodes: Iterable[Node], *, options: TopologyOptions | None = None, management: bool = True
) -> Topology:
    chosen = list(nodes)
    return Topology(
        *(node.endpoint.amqp_url for node in chosen),
        management_urls=[node.management.url for node in chosen] if management else [],
        options=options,
    )


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
