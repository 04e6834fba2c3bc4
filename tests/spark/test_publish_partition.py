"""`publish_partition`: below DataFrames, with the promises of the plain sink."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pika
import pytest

from sharding.errors import InvalidInput, WarrenError
from sharding.stream.environment import StreamEnvironment
from spark import PublishOptions, publish_partition
from spark.options.values import BadOption
from tests.cluster import Cluster
from tests.spark.stored import (
    Orders,
    StoredRow,
    amqp_uri,
    one_stream,
    reach,
    sharded_queue,
    stored_in,
    super_stream,
)
from tests.support.sharded import drain, raw_channel, shards_in_broker

pytestmark = pytest.mark.cluster


@pytest.fixture
def queue(cluster: Cluster) -> Iterator[str]:
    with sharded_queue(cluster) as logical:
        yield logical


def test_every_row_is_stored_in_the_partition_of_its_key_in_order(
    cluster: Cluster, environment: StreamEnvironment
) -> None:
    orders = Orders(keys=50, of_each=100)
    with super_stream(environment) as name:
        options = PublishOptions.of(superStream=name, **reach(cluster)).resolved()
        publish_partition(orders, options)
        stored = stored_in(environment, environment.partitions(name))
    assert orders.lost_and_twice(stored) == (0, 0)
    orders.assert_in_order(stored)


def test_rows_without_a_key_go_to_a_stream(
    cluster: Cluster, environment: StreamEnvironment
) -> None:
    with one_stream(environment) as name:
        options = PublishOptions.of(stream=name, **reach(cluster))
        publish_partition([b"a", "b", ("k", b"c")], options)
        assert stored_in(environment, [name])[name] == [
            StoredRow(None, b"a"),
            StoredRow(None, b"b"),
            StoredRow("k", b"c"),
        ]


def test_every_row_is_in_a_shard_of_the_queue(cluster: Cluster, queue: str) -> None:
    orders = Orders(keys=20, of_each=50)
    options = PublishOptions.of(queue=queue, amqpUri=amqp_uri(cluster)).resolved()
    publish_partition(orders, options)
    taken = drain(cluster.nodes[0], shards_in_broker(cluster, queue))
    assert sorted((key, body) for _, key, body in taken) == sorted(orders)


def test_headers_and_properties_reach_the_consumer_of_a_queue(cluster: Cluster, queue: str) -> None:
    options = PublishOptions.of(queue=queue, amqpUri=amqp_uri(cluster))
    row = {
        "key": "k",
        "value": "v",
        "headers": {"region": "eu"},
        "properties": {"message_id": "m", "content_type": "text/plain"},
    }
    publish_partition([row], options)
    with raw_channel(cluster.nodes[0]) as channel:
        found: list[pika.BasicProperties] = []
        for shard in shards_in_broker(cluster, queue):
            _, properties, _ = channel.basic_get(shard, auto_ack=True)
            found += [properties] if properties is not None else []
    (properties,) = found
    assert properties.headers == {"region": "eu"}
    assert (properties.message_id, properties.content_type) == ("m", "text/plain")
    assert properties.delivery_mode == 2


def test_bad_row_fails_the_partition_and_what_was_before_it_is_kept(
    cluster: Cluster, environment: StreamEnvironment
) -> None:
    with super_stream(environment) as name:
        options = PublishOptions.of(superStream=name, **reach(cluster))
        with pytest.raises(InvalidInput, match="row 1 of the task: 'value' must be bytes"):
            publish_partition([("k", b"a"), ("k", None)], options)
        # The connections are as good as before.
        publish_partition([("k", b"a")], options)


@pytest.mark.parametrize("kind", ["stream", "superStream", "queue"])
def test_target_that_is_not_there_is_found_when_resolved(cluster: Cluster, kind: str) -> None:
    wanted = {kind: "no-such-thing", **reach(cluster)}
    if kind == "queue":
        wanted["amqpUri"] = amqp_uri(cluster)
    with pytest.raises((BadOption, InvalidInput), match=f"option '{kind}'.*no-such-thing"):
        PublishOptions.of(**wanted).resolved()


def test_wrong_password_is_said_without_it(cluster: Cluster) -> None:
    canary = f"canary-{os.getpid()}"
    for wanted in ({"stream": "a"}, {"queue": "a", "amqpUri": amqp_uri(cluster)}):
        options = PublishOptions.of(**wanted, **reach(cluster), password=canary)
        with pytest.raises(WarrenError) as caught:
            options.resolved()
        assert canary not in str(caught.value)
        assert canary not in repr(caught.value)
