"""What was published over AMQP 0-9-1 to a stream, read as messages and as Arrow."""

from __future__ import annotations

from collections.abc import Iterator

import pika
import pytest

from sharding.stream import Columns, StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.sharded import raw_channel
from tests.support.streams import environment_of, stream_in

pytestmark = pytest.mark.cluster

COUNT = 20
SENT_AT = 1_700_000_000


@pytest.fixture(scope="module")
def environment(nodes: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(nodes, **patient.STREAMS) as opened:
        yield opened


@pytest.fixture(scope="module")
def stream(environment: StreamEnvironment, nodes: Cluster) -> Iterator[str]:
    """A stream with messages that came through a topic exchange under keys of their own."""
    with stream_in(environment) as name, raw_channel(nodes.nodes[0]) as channel:
        channel.confirm_delivery()
        channel.queue_bind(name, "amq.topic", f"{name}.#")
        for number in range(COUNT):
            properties = pika.BasicProperties(
                content_type="text/plain",
                correlation_id=f"correlation-{number}",
                message_id=f"id-{number}",
                reply_to="answers",
                timestamp=SENT_AT,
                headers={"color": "rot", "number": number},
            )
            channel.basic_publish(
                "amq.topic", f"{name}.key-{number}", b"body %d" % number, properties
            )
        channel.basic_publish("", name, b"bare")
        wait_until(lambda: is_stored(environment, name))
        yield name


def is_stored(environment: StreamEnvironment, stream: str) -> bool:
    ends = environment.offsets(stream)
    return ends is not None and ends.last == COUNT


def test_messages_have_the_key_and_properties_they_were_published_with(
    environment: StreamEnvironment, stream: str
) -> None:
    with environment.consumer(stream, offset="first", **patient.READER) as consumer:
        messages = consumer.messages(timeout=PATIENCE)
        for number in range(COUNT):
            message = next(messages)
            assert message.body == b"body %d" % number
            assert message.key == f"{stream}.key-{number}"
            assert message.stream == stream
            assert message.offset == number
            assert message.properties is not None
            assert message.properties.content_type == "text/plain"
            assert message.properties.correlation_id == f"correlation-{number}"
            assert message.properties.message_id == f"id-{number}"
            assert message.properties.creation_time == SENT_AT * 1000  # milliseconds
            assert message.application_properties == {"color": "rot", "number": number}
            assert message.annotations["x-exchange"] == "amq.topic"
        bare = next(messages)
        assert (bare.body, bare.key) == (b"bare", stream)


def test_batches_have_them_as_columns(environment: StreamEnvironment, stream: str) -> None:
    columns = Columns(key=True, properties=True, application_properties=True)
    with environment.consumer(
        stream, offset="first", columns=columns, **patient.READER
    ) as consumer:
        rows = []
        for batch in consumer.batches(timeout=PATIENCE):
            rows += batch.to_pylist()
            if len(rows) > COUNT:
                break
    for number, row in enumerate(rows[:COUNT]):
        assert row["offset"] == number
        assert row["body"] == b"body %d" % number
        assert row["key"] == f"{stream}.key-{number}"
        assert row["properties"]["content_type"] == "text/plain"
        assert row["properties"]["correlation_id"] == f"correlation-{number}"
        assert dict(row["application_properties"]) == {"color": "rot", "number": str(number)}
    assert rows[COUNT]["body"] == b"bare"
    assert rows[COUNT]["key"] == stream


def test_plain_columns_do_without_the_rest(environment: StreamEnvironment, stream: str) -> None:
    batch = next(environment.read_range(stream, 0, 5))
    assert batch.schema.names == ["offset", "timestamp", "body"]
    assert batch.column("body")[0].as_py() == b"body 0"
