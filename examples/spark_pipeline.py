"""Orders through RabbitMQ with Spark: published by key, read back from replicas, every row checked.

    python examples/spark_pipeline.py --uri rabbitmq-stream://rmq0:5552 --orders 300000

Spark makes an order stream in which few customers order much, and publishes it through the hashed
partitions of a super stream. A streaming query reads it back from replicas and adds up; at the end
everything is read once more, as a batch, to show that nothing is lost, nothing is there twice and
each customer's orders are in order. WARREN_USER and WARREN_PASSWORD say who you are.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from urllib.parse import quote

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sharding.stream import StreamEnvironment

CUSTOMERS = 2_000
ORDER = "number LONG, customer STRING, amount DOUBLE"


@dataclass(frozen=True)
class Settings:
    uri: str
    orders: int = 300_000
    partitions: int = 6
    master: str = "local[2]"
    super_stream: str = ""
    amqp_url: str | None = None

    @property
    def with_login(self) -> str:
        user = quote(os.environ.get("WARREN_USER", "guest"), safe="")
        password = quote(os.environ.get("WARREN_PASSWORD", "guest"), safe="")
        return self.uri.replace("://", f"://{user}:{password}@", 1)


@dataclass(frozen=True)
class Proof:
    lost: int
    twice: int
    out_of_order: int

    def __str__(self) -> str:
        return (
            f"lost {self.lost:,} · twice {self.twice:,} · "
            f"out of order within a customer {self.out_of_order:,}"
        )


def run(settings: Settings, console: Console) -> Proof:
    spark = session(settings.master)
    try:
        with StreamEnvironment(settings.with_login, amqp_url=settings.amqp_url) as environment:
            environment.create_super_stream(settings.super_stream, settings.partitions)
            try:
                return publish_and_read(spark, settings, environment, console)
            finally:
                environment.delete_super_stream(settings.super_stream)
    finally:
        spark.stop()


def publish_and_read(
    spark: SparkSession, settings: Settings, environment: StreamEnvironment, console: Console
) -> Proof:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        publishing = progress.add_task("publish", total=None)
        publish(orders(spark, settings), settings)
        progress.update(publishing, total=settings.orders, completed=settings.orders)
        reading = progress.add_task("read and add up", total=settings.orders)
        began = time.monotonic()
        query = totals(spark, settings)
        while query.isActive:
            query.awaitTermination(1)
            progress.update(reading, completed=rows_read(query))
        took = time.monotonic() - began
        progress.update(reading, completed=rows_read(query))
        checking = progress.add_task("check every row", total=None)
        proof = prove(spark, settings)
        progress.update(checking, total=settings.orders, completed=settings.orders)
    console.print(partition_table(spark, environment, settings, took))
    revenue = spark.table("totals").agg(f.sum("revenue")).first()
    assert revenue is not None
    summary = f"{settings.orders:,} orders worth {revenue[0]:,.2f}: {proof}"
    console.print(summary, soft_wrap=True)
    return proof


def orders(spark: SparkSession, settings: Settings) -> DataFrame:
    """One task has all orders of a customer, in order: what one task sends stays in order."""
    skewed = f.floor(f.pow(f.rand(seed=7), f.lit(3)) * CUSTOMERS).cast("string")
    numbered = spark.range(settings.orders).select(
        f.col("id").alias("number"),
        f.concat(f.lit("customer-"), skewed).alias("customer"),
        f.round(f.rand(seed=11) * 100, 2).alias("amount"),
    )
    return numbered.repartition(4, "customer").sortWithinPartitions("number")


def publish(made: DataFrame, settings: Settings) -> None:
    messages = made.select(
        f.col("customer").alias("key"),
        f.to_json(f.struct("number", "customer", "amount")).cast("binary").alias("value"),
    )
    (
        messages.write.format("warren")
        .option("uri", settings.uri)
        .option("superStream", settings.super_stream)
        .mode("append")
        .save()
    )


def totals(spark: SparkSession, settings: Settings) -> StreamingQuery:
    """A streaming query over what there is, in some batches; its result is the table `totals`."""
    stream = (
        spark.readStream.format("warren")
        .option("uri", settings.uri)
        .option("superStream", settings.super_stream)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", max(1, settings.orders // 4))
        .option("includeNode", "true")
        .load()
    )
    order = f.from_json(f.col("value").cast("string"), ORDER)
    summed = stream.groupBy("stream", "node").agg(
        f.count("*").alias("rows"), f.sum(order["amount"]).alias("revenue")
    )
    return (
        summed.writeStream.outputMode("complete")
        .format("memory")
        .queryName("totals")
        .option("checkpointLocation", tempfile.mkdtemp(prefix="warren-pipeline-"))
        .trigger(availableNow=True)
        .start()
    )


def rows_read(query: StreamingQuery) -> int:
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def prove(spark: SparkSession, settings: Settings) -> Proof:
    stored = (
        spark.read.format("warren")
        .option("uri", settings.uri)
        .option("superStream", settings.super_stream)
        .load()
    )
    order = f.from_json(f.col("value").cast("string"), ORDER)
    rows = stored.select("key", "offset", order["number"].alias("number"))
    in_stream = Window.partitionBy("key").orderBy("offset")
    steps = rows.withColumn("before", f.lag("number").over(in_stream))
    found = steps.agg(
        f.count("*").alias("rows"),
        f.count_distinct("number").alias("distinct"),
        f.count_if(f.col("number") <= f.col("before")).alias("backwards"),
    ).first()
    assert found is not None
    return Proof(
        settings.orders - found["distinct"], found["rows"] - found["distinct"], found["backwards"]
    )


def partition_table(
    spark: SparkSession, environment: StreamEnvironment, settings: Settings, took: float
) -> Table:
    table = Table(title=f"'{settings.super_stream}', partition by partition")
    for name in ("partition", "leader", "read from"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "rows/s"):
        table.add_column(name, justify="right")
    for row in spark.table("totals").orderBy("stream", "node").collect():
        leader = environment.route(row["stream"]).leader
        table.add_row(
            row["stream"],
            str(leader),
            row["node"],
            f"{row['rows']:,}",
            f"{row['rows'] / took:,.0f}",
        )
    return table


def session(master: str) -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master(master)
        .appName("warren-pipeline")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--uri", default="rabbitmq-stream://localhost:5552")
    parser.add_argument("--orders", type=int, default=300_000)
    parser.add_argument("--partitions", type=int, default=6)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--super-stream", default=f"orders-{secrets.token_hex(3)}")
    parser.add_argument("--amqp-url", help="needed on brokers before 3.13")
    proof = run(Settings(**vars(parser.parse_args())), Console())
    sys.exit(0 if proof == Proof(0, 0, 0) else 1)


if __name__ == "__main__":
    main()
