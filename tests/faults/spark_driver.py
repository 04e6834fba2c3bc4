"""A driver program for tests that kill it: copies one super stream into a target and ends.

    python -m tests.faults.spark_driver '{"cores": "local[2,8]", "sink": "exactly_once", …}'

The query has a shuffle of its own, so that the order of rows differs from run to run.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass

from pyspark.sql import DataFrame, SparkSession

from spark import exactly_once


@dataclass(frozen=True)
class Copy:
    """What to copy, and how. `sink` is "exactly_once", "stream" or "queue"."""

    sink: str
    source: str
    target: str
    checkpoint: str
    uri: str
    amqp_uri: str
    cores: str = "local[2,8]"
    shuffled_into: int = 3
    tasks: int = 3
    rows_per_batch: int = 5_000
    read_partitions: int = 1
    max_unconfirmed: int = 10
    """So few that a batch takes long enough to be killed in its middle."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))


def session_of(copy: Copy) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master(copy.cores)
        .appName("copy")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", str(copy.shuffled_into))
        .getOrCreate()
    )


def rows_of(session: SparkSession, copy: Copy) -> DataFrame:
    return (
        session.readStream.format("warren")
        .option("uri", copy.uri)
        .option("superStream", copy.source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", str(copy.rows_per_batch))
        .option("minPartitions", str(copy.read_partitions))
        .load()
        .repartition(copy.shuffled_into, "value")
    )


def run(copy: Copy) -> None:
    session = session_of(copy)
    rows = rows_of(session, copy)
    if copy.sink == "exactly_once":
        writer = exactly_once(
            rows,
            order_by=["offset"],
            tasks=copy.tasks,
            superStream=copy.target,
            uri=copy.uri,
            maxUnconfirmed=copy.max_unconfirmed,
        )
    else:
        writer = rows.writeStream.format("warren").option("uri", copy.uri)
        writer = writer.option("maxUnconfirmed", str(copy.max_unconfirmed))
        if copy.sink == "queue":
            writer = writer.option("queue", copy.target).option("amqpUri", copy.amqp_uri)
        else:
            writer = writer.option("superStream", copy.target)
    query = writer.option("checkpointLocation", copy.checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    session.stop()


if __name__ == "__main__":
    run(Copy(**json.loads(sys.argv[1])))
