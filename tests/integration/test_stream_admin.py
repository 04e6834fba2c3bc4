"""Streams and super streams made, looked at and deleted, on every version."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import timedelta

import pytest

from sharding import InvalidInput, LocalError
from sharding.stream import (
    StreamArguments,
    StreamEnvironment,
    StreamExists,
    StreamNotFound,
)
from tests.cluster import Cluster, wait_until
from tests.support import patient

pytestmark = pytest.mark.cluster


@pytest.fixture
def environment(nodes: Cluster) -> Iterator[StreamEnvironment]:
    node = nodes.nodes[0].endpoint
    with StreamEnvironment(node.stream_url, amqp_url=node.amqp_url, **patient.STREAMS) as opened:
        yield opened


def fresh() -> str:
    return f"invoices-{secrets.token_hex(3)}"


def queue_in_broker(nodes: Cluster, name: str) -> dict[str, object]:
    queue: dict[str, object] = nodes.nodes[1].management.get("queues", nodes.vhost, name)
    return queue


def test_stream_is_made_as_asked(nodes: Cluster, environment: StreamEnvironment) -> None:
    name = fresh()
    asked = StreamArguments(
        max_length_bytes=5_000_000,
        max_age=timedelta(hours=1),
        max_segment_bytes=1_000_000,
        initial_cluster_size=2,
    )
    environment.create_stream(name, asked)
    queue = queue_in_broker(nodes, name)
    assert queue["type"] == "stream"
    assert queue["arguments"] == asked.over_amqp()
    assert environment.exists(name)
    environment.delete_stream(name)
    assert not environment.exists(name)


def test_stream_that_is_there_or_is_not_is_an_error_unless_allowed(
    environment: StreamEnvironment,
) -> None:
    name = fresh()
    environment.create_stream(name)
    with pytest.raises(StreamExists, match=name):
        environment.create_stream(name)
    environment.create_stream(name, exist_ok=True)
    environment.delete_stream(name)
    with pytest.raises(StreamNotFound, match=name):
        environment.delete_stream(name)
    environment.delete_stream(name, missing_ok=True)


def test_super_stream_has_its_partitions_in_order(
    nodes: Cluster, environment: StreamEnvironment
) -> None:
    name = fresh()
    environment.create_super_stream(name, partitions=12)
    assert environment.partitions(name) == tuple(f"{name}-{n}" for n in range(12))
    exchange = nodes.nodes[1].management.get("exchanges", nodes.vhost, name)
    assert exchange["arguments"].get("x-super-stream") is True
    with pytest.raises(StreamExists):
        environment.create_super_stream(name, partitions=12)
    environment.create_super_stream(name, partitions=12, exist_ok=True)
    environment.delete_super_stream(name)
    with pytest.raises(StreamNotFound):
        environment.partitions(name)
    with pytest.raises(StreamNotFound):
        environment.delete_super_stream(name)
    environment.delete_super_stream(name, missing_ok=True)
    wait_until(lambda: not environment.exists(f"{name}-3"))


def test_super_stream_by_binding_keys_routes_as_the_broker_says(
    environment: StreamEnvironment,
) -> None:
    name = fresh()
    environment.create_super_stream(name, binding_keys=["emea", "apac", "amer"])
    assert environment.partitions(name) == (f"{name}-emea", f"{name}-apac", f"{name}-amer")
    with environment.producer(name, partitioning="broker") as producer:
        assert producer.partition("apac") == f"{name}-apac"
    environment.delete_super_stream(name)


def test_half_made_super_stream_is_taken_back(
    nodes: Cluster, environment: StreamEnvironment
) -> None:
    name = fresh()
    environment.create_stream(f"{name}-2", StreamArguments(max_length_bytes=123_456))
    with pytest.raises(Exception, match=name):  # whatever this broker says of it
        environment.create_super_stream(name, partitions=4)
    assert not environment.exists(f"{name}-0")
    names = [
        exchange["name"] for exchange in nodes.nodes[0].management.get("exchanges", nodes.vhost)
    ]
    assert name not in names
    environment.delete_stream(f"{name}-2")


def test_old_broker_without_an_amqp_url_says_what_to_give(nodes: Cluster) -> None:
    if not nodes.version.startswith("3.10"):
        return  # newer brokers need none, which the other tests show
    with (
        StreamEnvironment(nodes.nodes[0].endpoint.stream_url, **patient.STREAMS) as environment,
        pytest.raises(LocalError, match="amqp_url"),
    ):
        environment.create_super_stream(fresh())


def test_stats_are_the_brokers_where_it_has_them(
    nodes: Cluster, environment: StreamEnvironment
) -> None:
    name = fresh()
    environment.create_stream(name)
    if nodes.version.startswith("3.10"):
        with pytest.raises(InvalidInput, match=r"3\.11"):
            environment.stats(name)
    else:
        assert environment.stats(name)["committed_chunk_id"] == -1
    environment.delete_stream(name)


def test_names_that_no_broker_takes_are_refused_before_anything_is_sent() -> None:
    with StreamEnvironment("rabbitmq-stream://127.0.0.1:1") as nowhere:
        for name in ("", "x" * 256, "\ud800"):
            with pytest.raises(InvalidInput):
                nowhere.create_stream(name)
        with pytest.raises(InvalidInput, match="partitions"):
            nowhere.create_super_stream("invoices", partitions=0)
