"""Environments, streams and readers for tests, on a real cluster."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sharding.errors import Unreachable
from sharding.stream import Consumer, StreamArguments, StreamEnvironment
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE


def fresh_stream(kind: str = "events") -> str:
    return f"{kind}-{secrets.token_hex(4)}"


def environment_of(nodes: Iterable[Node], **options: Any) -> StreamEnvironment:
    """An environment that knows all of these nodes, and makes super streams on old ones too."""
    chosen = list(nodes)
    options.setdefault("amqp_url", chosen[0].endpoint.amqp_url)
    return StreamEnvironment(*(node.endpoint.stream_url for node in chosen), **options)


@contextmanager
def stream_in(environment: StreamEnvironment, **arguments: Any) -> Iterator[str]:
    """A new stream with all its replicas, deleted afterwards."""
    name = fresh_stream()
    environment.create_stream(name, StreamArguments(**arguments))
    try:
        await_replicas(environment, name, arguments.get("initial_cluster_size", 3) - 1)
        yield name
    finally:
        environment.delete_stream(name, missing_ok=True)


@contextmanager
def super_stream_in(
    environment: StreamEnvironment, partitions: int = 3, **arguments: Any
) -> Iterator[str]:
    """A new super stream with all its replicas, deleted afterwards."""
    name = fresh_stream("invoices")
    environment.create_super_stream(name, partitions, StreamArguments(**arguments))
    try:
        for stream in environment.partitions(name):
            await_replicas(environment, stream)
        yield name
    finally:
        environment.delete_super_stream(name, missing_ok=True)


def await_replicas(environment: StreamEnvironment, stream: str, count: int = 2) -> None:
    """Wait until the cluster says that the stream has a leader and so many replicas."""

    seen: object = None

    def has_them() -> bool:
        nonlocal seen
        environment._routes.suspect(stream, "asked by a test")
        try:
            seen = route = environment.route(stream)
        except Unreachable as error:  # no answer in time is "not yet"
            seen = error
            return False
        return route.leader is not None and len(route.replicas) >= count

    wait_until(has_them, explain=lambda: f"{seen}")


def read_all(consumer: Consumer, count: int, timeout: float = PATIENCE) -> dict[str, list[bytes]]:
    """By stream, the bodies of the first `count` messages, in the order they were handed out."""
    found: dict[str, list[bytes]] = defaultdict(list)
    total = 0
    for batch in consumer.batches(timeout=timeout):
        found[batch.schema.metadata[b"stream"].decode()] += batch.column("body").to_pylist()
        total += batch.num_rows
        if total >= count:
            break
    assert total == count, f"{total} messages instead of {count}"
    return found


def publish(
    environment: StreamEnvironment, stream: str, bodies: list[bytes], **options: Any
) -> None:
    """Store all of these in a stream, in order."""
    with environment.producer(stream, **options) as producer:
        producer.send_many(bodies)
        producer.flush(timeout=PATIENCE).raise_for_failures()


def leader_node(cluster: Cluster, environment: StreamEnvironment, stream: str) -> Node:
    """The node that leads a stream; an election is waited for."""
    environment._routes.suspect(stream, "asked by a test")
    leader = environment._routes.leader(stream, PATIENCE)
    return next(node for node in cluster.nodes if leader == stream_address(node))


def stream_address(node: Node) -> tuple[str, int]:
    return node.endpoint.address, node.endpoint.ports["stream"]
