"""The plain sinks: a task ends when all its rows are stored, in the partition of their key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from sharding.stream.environment import StreamEnvironment
from spark import PublishOptions, publish_partition
from spark.options.values import BadOption
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.spark.stored import Orders, one_stream, reach, stored_in, super_stream

pytestmark = pytest.mark.cluster

ORDERS = Orders(keys=40, of_each=100)


@pytest.fixture
def orders(session: SparkSession) -> DataFrame:
    return session.createDataFrame(list(ORDERS), "customer string, value binary")


def test_batch_is_stored_once_in_the_partitions_of_its_keys(
    cluster: Cluster, environment: StreamEnvironment, orders: DataFrame
) -> None:
    with super_stream(environment) as name:
        (
            orders.repartition(4, "customer")
            .write.format("warren")
            .options(**reach(cluster))
            .option("superStream", name)
            .option("keyColumn", "customer")
            .mode("append")
            .save()
        )
        stored = stored_in(environment, environment.partitions(name))
    assert ORDERS.lost_and_twice(stored) == (0, 0)


def test_properties_and_headers_are_stored_with_the_row(
    cluster: Cluster, environment: StreamEnvironment, session: SparkSession
) -> None:
    rows = session.sql(
        "SELECT 'k' AS key, 'v' AS value, map('region', 'eu', 'none', null) AS headers, "
        "named_struct('message_id', 'm', 'creation_time', timestamp '2026-11-16 12:00:00') "
        "AS properties"
    )
    with one_stream(environment) as name:
        rows.write.format("warren").options(**reach(cluster), stream=name).mode("append").save()
        with environment.consumer(name, offset="first") as consumer:
            message = next(iter(consumer.messages(timeout=PATIENCE)))
    assert (message.key, message.body) == ("k", b"v")
    assert message.application_properties == {"region": "eu", "none": None}
    assert message.properties is not None
    assert message.properties.message_id == "m"


def test_streaming_query_stores_every_row(
    cluster: Cluster, environment: StreamEnvironment, session: SparkSession, tmp_path: Path
) -> None:
    with super_stream(environment) as source, super_stream(environment, partitions=2) as target:
        publish_partition(ORDERS, PublishOptions.of(superStream=source, **reach(cluster)))
        rows = session.readStream.format("warren").options(
            **reach(cluster), superStream=source, startingOffsets="earliest"
        )
        query = (
            rows.load()
            .writeStream.format("warren")
            .options(**reach(cluster), superStream=target, checkpointLocation=str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(2 * round(PATIENCE))
        stored = stored_in(environment, environment.partitions(target))
    assert ORDERS.lost_and_twice(stored) == (0, 0)
    ORDERS.assert_in_order(stored)


def test_partitions_of_rdds_and_dataframes_are_published(
    cluster: Cluster, environment: StreamEnvironment, orders: DataFrame
) -> None:
    with super_stream(environment) as name:
        options = PublishOptions.of(
            superStream=name, keyColumn="customer", **reach(cluster)
        ).resolved()
        orders.foreachPartition(lambda rows: publish_partition(rows, options))
        pairs = orders.rdd.map(lambda row: (row.customer, bytes(row.value)))
        pairs.foreachPartition(lambda rows: publish_partition(rows, options))
        stored = stored_in(environment, environment.partitions(name))
    assert ORDERS.lost_and_twice(stored) == (0, len(ORDERS))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"superStream": "a", "stream": "b"}, "exactly one of"),
        ({"superStream": "no-such", "keyColumn": "customer"}, "'superStream': must exist"),
        ({"stream": "no-such-stream"}, "'stream': must exist"),
        ({"stream": "a", "keyColumn": "nothing"}, "'keyColumn': must be a column"),
        ({"stream": "a", "keyColum": "customer"}, "did you mean 'keyColumn'"),
    ],
)
def test_mistakes_fail_the_plan_in_one_sentence(
    cluster: Cluster, orders: DataFrame, options: dict[str, str], words: str
) -> None:
    writer = orders.write.format("warren").options(**{**reach(cluster), **options})
    with pytest.raises(PySparkException, match=words):
        writer.mode("append").save()


def test_stream_with_the_name_of_a_super_stream_is_refused(
    cluster: Cluster, environment: StreamEnvironment
) -> None:
    """A producer of that name is the super stream's: rows went to its partition."""
    with super_stream(environment, partitions=1) as name:
        environment.create_stream(name)
        with pytest.raises(BadOption, match="must not have the name of a super stream too"):
            PublishOptions.of(stream=name, **reach(cluster)).resolved()
        environment.delete_stream(name)


def test_row_that_can_not_be_sent_fails_the_task_and_is_named(
    cluster: Cluster, environment: StreamEnvironment, session: SparkSession
) -> None:
    rows = session.sql("SELECT 'k' AS key, CAST(null AS string) AS value")
    with super_stream(environment) as name:
        writer = rows.write.format("warren").options(**reach(cluster), superStream=name)
        with pytest.raises(PySparkException, match="row 0 of the task: 'value' must be bytes"):
            writer.mode("append").save()
        assert not any(stored_in(environment, environment.partitions(name)).values())
