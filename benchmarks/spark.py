"""What the Spark source and sink give against the engine, the client alone and the naive way.

Run it with `python -m benchmarks.spark`. It starts a cluster of its own and Spark in local[2]. All
ways take turns in one run, after rounds that do not count: Spark compiles what it runs often, and
its Python workers and their connections stay.

* Reading a super stream of six partitions, with all default columns, into Spark's `noop` sink, from
  the call of `save()` on, so with the planning. Against the same number of rows of the same schema
  from memory: what the engine takes from Python at best. Against the client alone: one process
  whose one consumer reads all partitions, bodies and keys, into Arrow batches.
* Writing rows with a key and a body of 100 bytes, all confirmed, from a cached table. Against the
  client alone: one process whose one producer gets the same keys and bodies, 10,000 in a call, as
  many as Spark hands to a sink. Against `foreachPartition` with pika's blocking channel and
  `confirm_delivery`, which is measured with fewer rows: it takes that long.

Spark has two tasks at a time, the client one process: that is how each is used. Brokers, Spark and
clients share the machine. Where it has few cores, what Spark itself needs for a row is taken from
the brokers and from its Python workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import pika
import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from benchmarks.rounds import Ratio, alternate, print_ratio
from sharding.maps.slots import murmur3
from sharding.stream import Columns, StreamArguments, StreamEnvironment
from tests.cluster import Cluster

PARTITIONS = 6
READ = 9_000_000
WRITTEN = 3_000_000
NAIVE = 20_000
KEYS = 1_000
ROUNDS = 5
WARM_UP = 2
BATCH = 10_000
STORED, SCRATCH = "stored", "scratch"
SOURCE, SINK = "Spark batch read", "Spark batch write, all confirmed"
MEMORY = "an in-memory Arrow data source in Spark"
CLIENT_READING, CLIENT_WRITING = "the client alone, reading", "the client alone, writing"
NAIVE_WAY = "`foreachPartition` with blocking pika and confirms"


def main() -> list[Ratio]:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # a laptop may have no other address
    with (
        Cluster.start(nodes=3) as cluster,
        StreamEnvironment(*(node.endpoint.stream_url for node in cluster)) as environment,
    ):
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.memory", "4g")
            .config("spark.sql.shuffle.partitions", "2")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        node = cluster.nodes[0].endpoint
        try:
            return Measurement(
                spark, environment, node.amqp_url, node.address, node.ports["stream"]
            ).run()
        finally:
            spark.stop()


class Measurement:
    def __init__(
        self, spark: SparkSession, environment: StreamEnvironment, amqp: str, host: str, port: int
    ) -> None:
        self._spark = spark
        self._environment = environment
        self._amqp = amqp
        self._uri = f"rabbitmq-stream://{host}:{port}"
        self._bodies = [b"x" * 100] * BATCH
        self._keys = [f"user-{number % KEYS}" for number in range(BATCH)]

    def run(self) -> list[Ratio]:
        self._environment.create_super_stream(STORED, PARTITIONS)
        kept = StreamArguments(max_length_bytes=200_000_000, max_segment_bytes=50_000_000)
        self._environment.create_super_stream(SCRATCH, PARTITIONS, kept)
        self._produce(STORED, READ)
        rows = self._spark.range(WRITTEN, numPartitions=2).select(
            f.concat(f.lit("user-"), (f.col("id") % KEYS).cast("string")).alias("key"),
            f.lit(bytearray(b"x" * 100)).alias("value"),
        )
        rows = rows.cache()
        rows.count()
        schema = self._read_options().load().schema
        self._spark.dataSource.register(in_memory(schema))
        ways: dict[str, Callable[[], float]] = {
            SOURCE: lambda: read_speed(self._read_options().load()),
            MEMORY: lambda: read_speed(self._spark.read.format("memory").load()),
            CLIENT_READING: self._consume,
            SINK: lambda: self._write(rows),
            CLIENT_WRITING: lambda: self._produce(SCRATCH, WRITTEN),
            NAIVE_WAY: lambda: self._write_naively(rows.limit(NAIVE)),
        }
        for way in [*ways.values()] * WARM_UP:
            way()
        speeds = alternate(ways, ROUNDS)
        return [
            print_ratio(speeds, SOURCE, MEMORY, 0.25),
            print_ratio(speeds, SOURCE, CLIENT_READING, 0.6),
            print_ratio(speeds, SINK, CLIENT_WRITING, 0.7),
            print_ratio(speeds, SINK, NAIVE_WAY, 20),
        ]

    def _read_options(self) -> Any:
        reader = self._spark.read.format("warren").option("uri", self._uri)
        return reader.option("superStream", STORED)

    def _consume(self) -> float:
        began = perf_counter()
        rows = 0
        with self._environment.consumer(
            STORED, offset="first", columns=Columns(key=True)
        ) as consumer:
            for batch in consumer:
                rows += batch.num_rows
                if rows == READ:
                    break
        return READ / (perf_counter() - began)

    def _produce(self, name: str, count: int) -> float:
        began = perf_counter()
        with self._environment.producer(name) as producer:
            for _ in range(count // BATCH):
                producer.send_many(self._bodies, self._keys)
            producer.flush(timeout=120).raise_for_failures()
        return count / (perf_counter() - began)

    def _write(self, rows: DataFrame) -> float:
        began = perf_counter()
        writer = rows.write.format("warren").option("uri", self._uri)
        writer.option("superStream", SCRATCH).mode("append").save()
        return WRITTEN / (perf_counter() - began)

    def _write_naively(self, rows: DataFrame) -> float:
        url, partitions = self._amqp, self._environment.partitions(SCRATCH)

        def publish(part: Iterator[Row]) -> None:
            with pika.BlockingConnection(pika.URLParameters(url)) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                for row in part:
                    stream = partitions[murmur3(row["key"]) % len(partitions)]
                    channel.basic_publish("", stream, bytes(row["value"]))

        began = perf_counter()
        rows.repartition(2).foreachPartition(publish)
        return NAIVE / (perf_counter() - began)


def read_speed(rows: DataFrame) -> float:
    began = perf_counter()
    rows.write.format("noop").mode("overwrite").save()
    return READ / (perf_counter() - began)


def in_memory(schema: StructType) -> type[DataSource]:
    """A source whose rows are there already, in batches as large as Spark's own."""

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(PARTITIONS)]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            from pyspark.sql.pandas.types import to_arrow_schema

            wanted = to_arrow_schema(schema, timezone="UTC")
            made = {"key": "user-7", "value": b"x" * 100, "stream": "stored-0"}
            columns = [
                pa.array([made.get(field.name, partition.value)] * BATCH).cast(field.type)
                for field in wanted
            ]
            batch = pa.RecordBatch.from_arrays(columns, schema=wanted)
            for _ in range(READ // PARTITIONS // BATCH):
                yield batch

    class Memory(DataSource):
        @classmethod
        def name(cls) -> str:
            return "memory"

        def schema(self) -> StructType:
            return schema

        def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
            return Reader()

    return Memory


if __name__ == "__main__":
    main()
