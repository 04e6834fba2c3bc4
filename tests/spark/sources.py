"""Short ways to read with Spark, and streams in the states that a source has to cope with."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from sharding.stream.environment import StreamEnvironment
from sharding.stream.options import ConsumerOptions, StreamArguments
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.spark.stored import reach
from tests.support.sharded import raw_channel


def load(session: SparkSession, cluster: Cluster, **options: str) -> DataFrame:
    """A batch."""
    options = {**reach(cluster), **options}
    return session.read.format("warren").options(**options).load()


def follow(session: SparkSession, cluster: Cluster, **options: str) -> DataFrame:
    """A streaming source."""
    options = {**reach(cluster), **options}
    return session.readStream.format("warren").options(**options).load()


def send(environment: StreamEnvironment, name: str, bodies: Sequence[bytes], **how: Any) -> None:
    with environment.producer(name) as producer:
        producer.send_many(bodies, **how)
        producer.flush(timeout=PATIENCE).raise_for_failures()


def bodies(count: int, first: int = 0) -> list[bytes]:
    return [b"row %d" % number for number in range(first, first + count)]


def values(frame: DataFrame) -> list[bytes]:
    """The values in order of the offsets; for one stream."""
    return [bytes(row.value) for row in sorted(frame.collect(), key=lambda row: row.offset)]


def run_available(frame: DataFrame, folder: Path) -> list[list[Any]]:
    """The rows of each batch of a query that reads what there is, and then stops."""
    batches: list[list[Any]] = []

    def keep(batch: DataFrame, _: int) -> None:
        batches.append(batch.collect())

    query = (
        frame.writeStream.foreachBatch(keep)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(2 * round(PATIENCE))
    finally:
        query.stop()
    return batches


def last_offset(folder: Path) -> dict[str, Any]:
    """What the checkpoint says of the source, after the last batch."""
    logs = [file for file in (folder / "checkpoint" / "offsets").iterdir() if file.name.isdigit()]
    newest = max(logs, key=lambda file: int(file.name))
    found: dict[str, Any] = json.loads(newest.read_text().splitlines()[-1])
    return found


@contextmanager
def truncated_stream(environment: StreamEnvironment) -> Iterator[tuple[str, int]]:
    """A stream whose retention has deleted its beginning, and the first offset that is left."""
    name = f"truncated-{secrets.token_hex(4)}"
    limits = StreamArguments(max_length_bytes=200_000, max_segment_bytes=100_000)
    environment.create_stream(name, limits)
    try:
        # Retention runs when a segment is full, on each member by itself. Little is sent at once:
        # the leader must not delete what its replicas do not have yet.
        settled: list[int] = []

        def has_settled() -> bool:
            send(environment, name, [b"x" * 1_000] * 50)
            ends = environment.offsets(name)
            settled.append(ends.first if ends is not None else 0)
            return settled[-1] > 0

        wait_until(has_settled)
        yield name, settled[-1]
    finally:
        environment.delete_stream(name)


def leave_gaps(environment: StreamEnvironment, stream: str, first: int) -> None:
    """Store an offset, which takes one away from messages."""
    with environment.consumer(stream, ConsumerOptions(name="gap-maker", credits=2)) as consumer:
        consumer.store_offset(stream, first)


def add_partitions(cluster: Cluster, super_stream: str, first: int, count: int) -> list[str]:
    """More partitions for a super stream, as an operator adds them."""
    names = [f"{super_stream}-{number}" for number in range(first, first + count)]
    with raw_channel(cluster.nodes[0]) as channel:
        for number, name in enumerate(names, start=first):
            channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
            order = {"x-stream-partition-order": number}
            channel.queue_bind(name, super_stream, str(number), arguments=order)
    return names


def now_ms() -> int:
    return time.time_ns() // 1_000_000
