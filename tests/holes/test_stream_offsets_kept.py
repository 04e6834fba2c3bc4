"""What a consumer has not dealt with is not left out because no offset of its name is stored.

The broker has none before the first one is stored, and none any more when retention has deleted
what it names. In both cases the next consumer of the name began at the end of the stream, by
default, and nobody was told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from pika import BlockingConnection, URLParameters

from sharding.stream import DataLost, StreamEnvironment
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE, wait_until
from tests.support import patient
from tests.support.streams import environment_of, fresh_stream, publish, stream_in

pytestmark = pytest.mark.cluster

KEPT = {"max_length_bytes": 400_000, "max_segment_bytes": 100_000}


@pytest.fixture(scope="module")
def environment(nodes: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(nodes, **patient.STREAMS) as opened:
        yield opened


class HandlerFailed(Exception):
    pass


@pytest.mark.parametrize("before", [0, 10])
@pytest.mark.parametrize("offset", ["next", "last"])
def test_what_came_before_the_first_stored_offset_comes_again(
    environment: StreamEnvironment, offset: str, before: int
) -> None:
    how: Any = {"name": "billing", "offset": offset, "store_every_messages": 1000}
    with stream_in(environment) as stream:
        if before:
            publish(environment, stream, [b"old"] * before)
        with suppress(HandlerFailed), environment.consumer(stream, **how) as consumer:
            publish(environment, stream, [b"failed at"])
            for message in consumer.messages(PATIENCE):
                if message.body == b"failed at":
                    raise HandlerFailed
        publish(environment, stream, [b"meanwhile"])
        with environment.consumer(stream, **how) as consumer:
            publish(environment, stream, [b"last"])
            bodies = []
            for message in consumer.messages(PATIENCE):
                bodies.append(message.body)
                if message.body == b"last":
                    break
        assert bodies[-3:] == [b"failed at", b"meanwhile", b"last"]


@pytest.mark.parametrize("stores", [{"store_every_messages": 1}, {}])
@pytest.mark.parametrize("offset", ["next", "first"])
def test_loss_is_told_though_retention_deleted_the_stored_offset_too(
    environment: StreamEnvironment, offset: str, stores: Any
) -> None:
    with stream_in(environment, **KEPT) as stream:
        publish(environment, stream, [b"old"] * 50)
        with environment.consumer(stream, name="away", offset="first", **stores) as consumer:
            next(consumer.messages(PATIENCE))
            consumer.store_offset()

        def is_deleted() -> bool:
            publish(environment, stream, [bytes(1000)] * 200)
            return environment.stored_offset("away", stream) is None

        wait_until(is_deleted)
        with environment.consumer(stream, name="away", offset=offset, **stores) as consumer:
            publish(environment, stream, [b"last"])
            with pytest.raises(DataLost) as told:
                next(consumer.messages(PATIENCE))
            assert next(consumer.messages(PATIENCE)).offset == told.value.found


def one_partition_on_each_node(cluster: Cluster, name: str) -> None:
    """A super stream whose partitions have one replica each; the protocol puts all on one node."""
    for number, node in enumerate(cluster.nodes):
        with BlockingConnection(URLParameters(node.endpoint.amqp_url)) as connection:
            channel = connection.channel()
            stream = f"{name}-{number}"
            alone = {"x-queue-type": "stream", "x-initial-cluster-size": 1}
            channel.queue_declare(stream, durable=True, arguments=alone)
            marked = {"x-super-stream": True}
            channel.exchange_declare(name, "direct", durable=True, arguments=marked)
            order = {"x-stream-partition-order": number}
            channel.queue_bind(stream, name, str(number), arguments=order)


def test_partition_that_is_away_keeps_no_offset_of_the_others_from_being_stored(
    harmed: Cluster,
) -> None:
    name = fresh_stream("one-replica")
    one_partition_on_each_node(harmed, name)
    with environment_of(harmed, **patient.STREAMS) as environment:
        streams = environment.partitions(name)
        for stream in streams:
            publish(environment, stream, [b"a message"])
        consumer = environment.consumer(name, name="all", offset="first", store_every_messages=1000)
        for _ in zip(streams, consumer.messages(PATIENCE), strict=False):
            continue
        assert next(consumer.messages(timeout=0.1), None) is None  # all of it is dealt with
        harmed.nodes[0].kill()
        try:
            wait_until(lambda: consumer.nodes[streams[0]] is None)
            consumer.close()
        finally:
            harmed.nodes[0].restart()
            harmed.wait_until_whole()
        wait_until(lambda: environment.route(streams[0]).leader)
        stored = [environment.stored_offset("all", stream) for stream in streams]
        assert stored == [None, 0, 0]
        environment.delete_super_stream(name)
