"""`exactly_once`: a replay stores nothing twice, and what would lose rows is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.readwriter import DataStreamWriter

from sharding.stream.environment import StreamEnvironment
from spark import PublishOptions, exactly_once, publish_partition
from spark.options.values import BadOption
from spark.write.exactly_once_rules import StreamOwners
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.spark.stored import Orders, one_stream, reach, stored_in, stream_uri, super_stream

pytestmark = pytest.mark.cluster

ORDERS = Orders(keys=40, of_each=50)


@pytest.fixture(scope="module")
def source(cluster: Cluster, environment: StreamEnvironment) -> Iterator[str]:
    with super_stream(environment) as name:
        publish_partition(ORDERS, PublishOptions.of(superStream=name, **reach(cluster)))
        yield name


def rows_of(session: SparkSession, cluster: Cluster, source: str) -> DataFrame:
    options = {"superStream": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "700"}
    return session.readStream.format("warren").options(**{**reach(cluster), **options}).load()


def run(writer: DataStreamWriter, checkpoint: Path) -> None:
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    assert query.awaitTermination(4 * round(PATIENCE))


def undo_last_commit(checkpoint: Path) -> int:
    """As if the driver had died before it noted that the last batch was done; which that is."""
    commits = checkpoint / "commits"
    newest = max(int(each.name) for each in commits.glob("[0-9]*"))
    for name in (f"{newest}", f".{newest}.crc"):
        (commits / name).unlink(missing_ok=True)
    return newest


def test_batch_that_is_run_again_in_another_order_and_other_tasks_is_stored_once(
    session: SparkSession,
    cluster: Cluster,
    environment: StreamEnvironment,
    source: str,
    tmp_path: Path,
) -> None:
    rows = rows_of(session, cluster, source)
    with super_stream(environment, partitions=4) as target:
        how: dict[str, Any] = {"superStream": target, **reach(cluster), "order_by": ["offset"]}
        run(exactly_once(rows.repartition(3, "value"), **how), tmp_path / "c")
        assert undo_last_commit(tmp_path / "c") >= 2
        run(exactly_once(rows.repartition(2, "offset"), **how, tasks=2), tmp_path / "c")
        stored = stored_in(environment, environment.partitions(target))
    assert ORDERS.lost_and_twice(stored) == (0, 0)
    ORDERS.assert_in_order(stored)


def test_plain_sink_stores_a_batch_that_is_run_again_twice(
    session: SparkSession,
    cluster: Cluster,
    environment: StreamEnvironment,
    source: str,
    tmp_path: Path,
) -> None:
    """What `exactly_once` is for; if this fails, the test above shows nothing."""
    rows = rows_of(session, cluster, source)
    with super_stream(environment, partitions=4) as target:
        for _ in range(2):
            writer = rows.writeStream.format("warren")
            run(writer.options(**reach(cluster), superStream=target), tmp_path / "c")
            undo_last_commit(tmp_path / "c")
        lost, twice = ORDERS.lost_and_twice(stored_in(environment, environment.partitions(target)))
    assert lost == 0
    assert twice > 0


def test_checkpoint_that_was_set_back_is_refused_instead_of_losing_rows(
    session: SparkSession,
    cluster: Cluster,
    environment: StreamEnvironment,
    source: str,
    tmp_path: Path,
) -> None:
    rows = rows_of(session, cluster, source)
    with one_stream(environment) as target:
        how: dict[str, Any] = {
            "stream": target,
            **reach(cluster),
            "order_by": ["partition", "offset"],
        }
        run(exactly_once(rows, **how), tmp_path / "c")
        for folder in ("commits", "offsets"):
            for each in (tmp_path / "c" / folder).iterdir():
                if each.name.strip(".").split(".")[0] not in ("0", "metadata"):
                    each.unlink()
        undo_last_commit(tmp_path / "c")
        with pytest.raises(PySparkException, match="the checkpoint is older than the stream"):
            run(exactly_once(rows, **how), tmp_path / "c")
        stored = stored_in(environment, [target])
    assert ORDERS.lost_and_twice(stored) == (0, 0)


def test_query_that_was_changed_afterwards_is_refused_before_it_publishes(
    session: SparkSession,
    cluster: Cluster,
    environment: StreamEnvironment,
    source: str,
    tmp_path: Path,
) -> None:
    rows = rows_of(session, cluster, source)
    with super_stream(environment, partitions=4) as target:
        own = StreamOwners(environment.partitions(target), tasks=4)
        writer = rows.repartition(4, "value").writeStream.format("warren")
        writer = writer.options(**reach(cluster), superStream=target, ownShards=own.dumps())
        with pytest.raises(PySparkException, match="let exactly_once\\(\\) make the query"):
            run(writer, tmp_path / "c")
        assert not any(stored_in(environment, environment.partitions(target)).values())


def test_what_can_not_hold_is_refused_when_the_query_is_made(
    session: SparkSession, cluster: Cluster, source: str
) -> None:
    rows = rows_of(session, cluster, source)
    for frame, options, words in (
        (rows, {"queue": "q"}, "queues know no publishing ids"),
        (rows, {"superStream": source, "compression": "gzip"}, "an id would stand for many"),
        (rows, {"superStream": source, "order_by": ["nothing"]}, "'nothing' is none"),
        (rows, {"superStream": source, "order_by": "offset"}, "must be a list of columns"),
        (rows, {"superStream": source, "tasks": 0}, "at least 1"),
        (rows, {"superStream": source, "keyColumn": "nothing"}, "must be a column"),
        (rows, {"superStream": "no-such-stream"}, "must exist"),
        (rows.withColumn("value", f.rand().cast("string")), {"superStream": source}, "same when"),
        (
            session.createDataFrame([("k", "v")], "key string, value string"),
            {"stream": "a"},
            "a batch",
        ),
    ):
        with pytest.raises(BadOption, match=words):
            exactly_once(frame, uri=stream_uri(cluster), **options)
