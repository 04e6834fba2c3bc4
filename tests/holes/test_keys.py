"""What a key may be is one rule for queues, streams and Spark: text or bytes.

s07: the key 7 was stored as seven NUL bytes, with a partitioning function of one's own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from interceptors import ShardedPublisher
from sharding import InvalidInput
from sharding.stream import StreamEnvironment
from spark import PublishOptions, publish_partition
from spark.options.write import MessageColumns
from spark.write.messages import of_rows
from tests.cluster import Cluster
from tests.spark.stored import amqp_uri, environment_of, reach, sharded_queue, stored_in
from tests.support.sharded import topology_of

pytestmark = pytest.mark.cluster

NO_KEYS: list[Any] = [7, 0, 10**12, True, 1.5, ("a",), object()]


def test_key_that_is_no_text_and_no_bytes_is_refused_everywhere_and_nothing_is_stored(
    cluster: Cluster,
) -> None:
    name = f"keys-{secrets.token_hex(4)}"
    with environment_of(cluster) as environment, sharded_queue(cluster) as queue:
        environment.create_super_stream(name, partitions=2)
        try:
            tries = [
                *stream_producers(environment, name),
                *spark_sinks(cluster, name, queue),
                *queue_publisher(cluster, queue),
            ]
            for publish in tries:
                for key in NO_KEYS:
                    with pytest.raises(InvalidInput, match="must be text or bytes"):
                        publish(key)
            stored = stored_in(environment, environment.partitions(name))
        finally:
            environment.delete_super_stream(name)
    assert not any(stored.values())


def stream_producers(environment: StreamEnvironment, name: str) -> list[Callable[[Any], object]]:
    def publish(partitioning: Any, many: bool) -> Callable[[Any], object]:
        def send(key: Any) -> object:
            with environment.producer(name, partitioning=partitioning) as producer:
                return producer.send_many([b"x"], [key]) if many else producer.send(b"x", key=key)

        return send

    first: Any = lambda key, partitions: 0  # noqa: ARG005, E731
    return [publish(how, many) for how in (first, "hash", "broker") for many in (True, False)]


def spark_sinks(cluster: Cluster, name: str, queue: str) -> list[Callable[[Any], object]]:
    targets = [
        {"superStream": name},
        {"stream": f"{name}-0"},
        {"queue": queue, "amqpUri": amqp_uri(cluster)},
    ]

    def publish(target: dict[str, str]) -> Callable[[Any], object]:
        options = PublishOptions.of(**{**reach(cluster), **target})
        return lambda key: publish_partition([(key, b"x")], options)

    return [publish(target) for target in targets]


def queue_publisher(cluster: Cluster, queue: str) -> list[Callable[[Any], object]]:
    def publish(key: Any) -> object:
        with (
            topology_of(cluster.nodes) as topology,
            ShardedPublisher(topology, queue) as publisher,
        ):
            return publisher.publish(key, b"x")

    return [publish]


def test_row_of_a_bad_key_is_named() -> None:
    columns = MessageColumns(value="value", key="key")
    rows = [("a", b"x"), (b"b", b"x"), (bytearray(b"c"), b"x"), (7, b"x")]
    with pytest.raises(InvalidInput, match="row 3 of the task: 'key' must be text or bytes; found"):
        list(of_rows(rows, columns, key_needed=True))
