"""The batch source: exactly the rows of the range, once, from replicas, with honest errors."""

from __future__ import annotations

import json
import secrets
import socket
from collections import Counter
from datetime import UTC, datetime

import pika
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sharding.stream.environment import StreamEnvironment
from sharding.stream.messages.codecs import Compression
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.spark.sources import (
    bodies,
    leave_gaps,
    load,
    now_ms,
    send,
    truncated_stream,
    values,
)
from tests.spark.stored import Orders, one_stream, reach, super_stream
from tests.support.sharded import raw_channel

pytestmark = pytest.mark.cluster

NOWHERE = "rabbitmq-stream://127.0.0.1:1"


def test_every_row_of_a_super_stream_comes_once_with_all_its_columns(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    orders = list(Orders(keys=40, of_each=250))
    with super_stream(environment) as name:
        before = now_ms()
        send(environment, name, [body for _, body in orders], keys=[key for key, _ in orders])
        rows = load(session, cluster, superStream=name).collect()
        streams = environment.partitions(name)
    assert Counter((row.key, bytes(row.value)) for row in rows) == Counter(orders)
    assert {(row.stream, row.partition) for row in rows} == {
        (stream, number) for number, stream in enumerate(streams)
    }
    for stream in streams:
        offsets = sorted(row.offset for row in rows if row.stream == stream)
        assert offsets == list(range(len(offsets)))
    times = [row.timestamp.replace(tzinfo=UTC).timestamp() * 1000 for row in rows]
    assert before - 1_000 < min(times)
    assert max(times) < now_ms() + 1_000


def test_ranges_that_cut_chunks_neither_lose_nor_repeat_rows(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with one_stream(environment) as name:
        for part in range(5):
            send(environment, name, bodies(211, first=211 * part))
        frame = load(session, cluster, stream=name, maxRecordsPerPartition="97")
        assert frame.rdd.getNumPartitions() == 11
        assert values(frame) == bodies(1055)
        assert load(session, cluster, stream=name, minPartitions="5").rdd.getNumPartitions() == 5


def test_gaps_between_offsets_are_no_rows_and_no_loss(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with one_stream(environment) as name:
        leave_gaps(environment, name, 0)
        for part in range(4):
            send(environment, name, bodies(50, first=50 * part))
            leave_gaps(environment, name, 50 * part + 10)
        rows = load(session, cluster, stream=name, maxRecordsPerPartition="13").collect()
        assert sorted(bytes(row.value) for row in rows) == sorted(bodies(200))
        assert max(row.offset for row in rows) > 200


def test_an_empty_stream_has_no_rows_but_a_schema(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with one_stream(environment) as name:
        frame = load(session, cluster, stream=name)
        assert frame.collect() == []
    assert frame.schema.simpleString() == (
        "struct<key:string,value:binary,stream:string,partition:int,offset:bigint,"
        "timestamp:timestamp>"
    )


def test_only_what_was_there_when_the_query_was_planned_is_read(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with one_stream(environment) as name:
        send(environment, name, bodies(100))
        frame = load(session, cluster, stream=name)
        planned = frame.rdd.getNumPartitions()
        send(environment, name, bodies(100, first=100))
        assert planned == 1
        assert values(frame) == bodies(100)
        assert len(values(load(session, cluster, stream=name))) == 200


def test_a_range_may_begin_and_end_anywhere(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with one_stream(environment) as name:
        send(environment, name, bodies(100))
        sent = now_ms()
        wait_until(lambda: now_ms() > sent + 1)  # stored times have milliseconds only
        middle = datetime.now(UTC)
        send(environment, name, bodies(100, first=100))

        def between(start: str, end: str) -> list[bytes]:
            frame = load(session, cluster, stream=name, startingOffsets=start, endingOffsets=end)
            return values(frame)

        assert between(f'{{"{name}": 17}}', f'{{"{name}": 23}}') == bodies(6, first=17)
        assert between("earliest", middle.isoformat()) == bodies(100)
        assert between(middle.isoformat(), "latest") == bodies(100, first=100)


def test_streams_are_chosen_by_list_and_by_pattern(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    prefix = f"chosen-{secrets.token_hex(4)}"
    names = [f"{prefix}-{letter}" for letter in "abc"]
    for name in names:
        environment.create_stream(name)
    try:
        for name in names:
            send(environment, name, [name.encode()])
        several = load(session, cluster, streams=f"{names[0]},{names[2]}").collect()
        assert {bytes(row.value).decode() for row in several} == {names[0], names[2]}
        matching = load(
            session,
            cluster,
            streamPattern=f"{prefix}-[bc]",
            managementUrl=cluster.nodes[0].management.url,
        ).collect()
        assert {row.stream for row in matching} == {names[1], names[2]}
    finally:
        for name in names:
            environment.delete_stream(name)


def test_properties_and_headers_come_on_request(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with one_stream(environment) as name:
        with raw_channel(cluster.nodes[0]) as channel:
            channel.confirm_delivery()
            properties = pika.BasicProperties(
                message_id="m-1", content_type="text/plain", headers={"region": "eu", "n": 3}
            )
            channel.basic_publish("", name, b"with", properties)
        send(environment, name, [b"without"])
        wanted = {"stream": name, "includeProperties": "true", "includeHeaders": "true"}
        first, second = sorted(
            load(session, cluster, **wanted).collect(), key=lambda row: row.offset
        )
    assert (first.properties.message_id, first.properties.content_type) == ("m-1", "text/plain")
    assert first.headers["region"] == "eu"
    assert first.headers["n"] == "3"
    assert (second.properties, second.headers) == (None, None)


def test_columns_are_those_asked_for_in_their_order(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with one_stream(environment) as name:
        send(environment, name, [b"x"])
        frame = load(session, cluster, stream=name, columns="offset,value")
        assert [tuple(row) for row in frame.collect()] == [(0, bytearray(b"x"))]


def test_tasks_read_from_replicas_and_never_from_the_leader(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with super_stream(environment, partitions=6) as name:
        send(environment, name, bodies(600), keys=[str(n) for n in range(600)])
        found = load(session, cluster, superStream=name, includeNode="true", minPartitions="12")
        seen = {(row.stream, row.node) for row in found.collect()}
        for stream, node in seen:
            route = environment.route(stream)
            assert node in [str(replica) for replica in route.replicas]
    assert len({stream for stream, _ in seen}) == 6


def test_a_task_reads_from_the_replica_in_its_own_zone(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with one_stream(environment) as name:
        send(environment, name, bodies(200))
        near = environment.route(name).replicas[-1]
        zones = json.dumps({near.host: "here", socket.gethostname(): "here"})
        for _ in range(2):
            rows = load(
                session, cluster, stream=name, columns="node", zones=zones, minPartitions="4"
            ).collect()
            assert {row.node for row in rows} == {str(near)}


def test_the_broker_leaves_out_chunks_that_the_filter_does_not_want(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, broker_version: str
) -> None:
    if broker_version.startswith("3.10"):
        pytest.skip("brokers filter since 3.13")
    regions = ("eu", "us", "asia")
    with one_stream(environment) as name:
        with environment.producer(name, filtering=True) as producer:
            for region in (*regions, *regions):
                for _ in range(100):
                    producer.send(region.encode(), filter_value=region)
                producer.flush(timeout=PATIENCE).raise_for_failures()  # so that each has its chunks

        def found(filter_values: str) -> dict[str, int]:
            frame = load(
                session, cluster, stream=name, filterValues=filter_values, minPartitions="4"
            )
            return dict(Counter(bytes(row.value).decode() for row in frame.collect()))

        assert found("eu") == {"eu": 200}
        assert found("us, asia") == {"us": 200, "asia": 200}
        assert found("nobody") == {}


def test_what_retention_deleted_fails_the_query_and_says_what_is_gone(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with truncated_stream(environment) as (name, first):
        wanted = {"stream": name, "startingOffsets": f'{{"{name}": 0}}', "columns": "offset"}
        with pytest.raises(PySparkException) as caught:
            load(session, cluster, **wanted).collect()
        assert f"'{name}' no longer has what was to be read from offset 0" in str(caught.value)
        offsets = load(session, cluster, **wanted, failOnDataLoss="false").collect()
        assert min(row.offset for row in offsets) >= first > 0
        everything = load(session, cluster, stream=name, columns="offset").collect()
        assert len(everything) > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stream": "a", "superStream": "b"}, "must have exactly one of stream, superStream"),
        ({"stream": "a", "quixotic": "1"}, "must be among batchMax, chunkMax, columns"),
        ({"stream": "a", "minPartition": "1"}, "did you mean 'minPartitions'?"),
        ({"stream": "a", "maxOffsetsPerTrigger": "1"}, "is for streaming only"),
        ({"stream": "no-such-stream"}, "option 'stream': must exist; found 'no-such-stream'"),
        ({"superStream": "no-such"}, "must be a super stream that exists; found 'no-such'"),
        ({"stream": "a", "uri": "rabbitmq-stream://ann:canary-1@h"}, "passwordFile"),
        ({"stream": "a", "uri": NOWHERE, "requestTimeout": "1s"}, "127.0.0.1:1"),
        ({"stream": "a", "password": "canary-1"}, "authentication failure"),
        ({"stream": "a", "passwordEnv": "NOBODY_SETS_THIS"}, "'NOBODY_SETS_THIS' is not set"),
    ],
)
def test_what_can_not_be_read_is_said_when_the_query_is_planned(
    session: SparkSession, cluster: Cluster, options: dict[str, str], said: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        load(session, cluster, **options).collect()
    assert said in str(caught.value)
    assert "Job aborted" not in str(caught.value)  # it failed before a task ran
    assert "\tat org.apache.spark" not in str(caught.value)
    assert "canary-1" not in str(caught.value)


def test_offsets_of_a_partition_that_does_not_exist_are_refused(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    with one_stream(environment) as name:
        wanted = f'{{"{name}": 0, "{name}-7": 0}}'
        with pytest.raises(PySparkException, match=f"must name only {name}; found '{name}-7'"):
            load(session, cluster, stream=name, startingOffsets=wanted).collect()


def test_another_schema_is_refused(session: SparkSession, cluster: Cluster) -> None:
    reader = session.read.format("warren").schema("value string")
    with pytest.raises(PySparkException, match="is given by the option columns"):
        reader.options(stream="a", **reach(cluster)).load().collect()


def test_end_that_retention_has_passed_goes_on_where_that_is_allowed_and_is_said_where_not(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    """s08: a batch of what is gone could not be planned though losses are allowed."""
    with truncated_stream(environment) as (name, first):
        assert first > 10
        range_of: dict[str, str] = {"stream": name, "endingOffsets": f'{{"{name}": 10}}'}
        for start in ("earliest", f'{{"{name}": 0}}'):
            range_of["startingOffsets"] = start
            allowed = load(session, cluster, **range_of, failOnDataLoss="false")
            assert allowed.count() == 0
            with pytest.raises(PySparkException, match=f"'{name}' no longer has what was to be"):
                load(session, cluster, **range_of).count()


def test_chunks_that_unpack_to_much_are_read_in_parts_and_a_batch_beyond_the_limit_is_named(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    sent = [b"%05d" % number * 200 for number in range(5_000)]
    with one_stream(environment) as name:
        with environment.producer(
            name, compression=Compression.GZIP, sub_entry_messages=500
        ) as producer:
            producer.send_many(sent)
            producer.flush(PATIENCE).raise_for_failures()
        rows = load(session, cluster, stream=name, batchMax="100000", credits="2")
        assert sorted(values(rows)) == sent
        with pytest.raises(PySparkException, match=f"'{name}', offsets .* uncompressedMax"):
            load(session, cluster, stream=name, uncompressedMax="100000").collect()
