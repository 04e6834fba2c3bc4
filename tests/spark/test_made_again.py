"""A stream that is deleted and made again under a query: what the old one had is never taken for
read, nor the new one's rows for the old one's.

What Spark calls on the driver and in tasks is called here, without Spark between.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from sharding.stream.environment import StreamEnvironment
from spark import process
from spark.options.read import ReadOptions
from spark.read.planning import StreamGone, StreamRange
from spark.read.readers import BatchReader, StreamReader
from tests.cluster import Cluster
from tests.spark.sources import bodies, send
from tests.spark.stored import reach
from tests.support.streams import await_replicas

pytestmark = pytest.mark.cluster


class Remade:
    """A stream, and others that take its place."""

    def __init__(self, environment: StreamEnvironment) -> None:
        self.environment = environment
        self.name = f"remade-{secrets.token_hex(4)}"

    def make(self, rows: int = 0, first: int = 0) -> None:
        self.environment.delete_stream(self.name, missing_ok=True)
        self.environment.create_stream(self.name)
        await_replicas(self.environment, self.name)
        if rows:
            send(self.environment, self.name, bodies(rows, first))
        process._environments.close_all()  # as if another process read it

    def options(self, cluster: Cluster, **more: str) -> ReadOptions:
        return ReadOptions.parse({**reach(cluster), "stream": self.name, **more})


@contextmanager
def remade(environment: StreamEnvironment) -> Iterator[Remade]:
    stream = Remade(environment)
    try:
        yield stream
    finally:
        environment.delete_stream(stream.name, missing_ok=True)


def read(reader: BatchReader | StreamReader, tasks: list[StreamRange]) -> list[bytes]:
    return [
        body for task in tasks for rows in reader.read(task) for body in rows["value"].to_pylist()
    ]


@pytest.mark.parametrize("rows", [0, 50, 2_000])
def test_range_that_was_planned_for_the_stream_before_is_not_read_from_another(
    cluster: Cluster, environment: StreamEnvironment, rows: int
) -> None:
    """A batch of 1,000 rows was 0, 50 or 1,000 others, and no error."""
    with remade(environment) as stream:
        stream.make(1_000)
        reader = BatchReader(stream.options(cluster, minPartitions="2").for_batch())
        tasks = reader.partitions()
        assert read(reader, tasks) == bodies(1_000)
        stream.make(rows, first=5_000)
        for task in tasks:
            with pytest.raises(StreamGone, match="deleted and made again after offsets"):
                read(reader, [task])
        allowed = BatchReader(stream.options(cluster, failOnDataLoss="false").for_batch())
        assert read(allowed, tasks) == []


def test_batch_that_is_repeated_after_a_restart_is_not_read_from_another_stream(
    cluster: Cluster, environment: StreamEnvironment
) -> None:
    with remade(environment) as stream:
        stream.make(1_000)
        options = stream.options(cluster, startingOffsets="earliest").for_streaming()
        planner = StreamReader(options)
        start = planner.initialOffset()
        end: dict[str, Any] = planner.latestOffset(start, ReadAllAvailable())
        stream.make(2_000, first=5_000)
        restarted = StreamReader(options)
        with pytest.raises(StreamGone, match="deleted and made again after offsets 0 to 1000"):
            read(restarted, restarted.partitions(start, end))


def test_stream_that_was_looked_at_while_it_was_empty_is_known_to_be_another(
    cluster: Cluster, environment: StreamEnvironment
) -> None:
    """100 of the new stream's 150 rows were skipped."""
    with remade(environment) as stream:
        stream.make(100)
        reader = StreamReader(stream.options(cluster, startingOffsets="earliest").for_streaming())
        start = reader.initialOffset()
        end: dict[str, Any] = reader.latestOffset(start, ReadAllAvailable())
        assert read(reader, reader.partitions(start, end)) == bodies(100)
        stream.make()
        assert reader.latestOffset(end, ReadAllAvailable()) == end
        send(environment, stream.name, bodies(150, first=5_000))
        with pytest.raises(StreamGone, match="it was deleted and made again"):
            reader.latestOffset(end, ReadAllAvailable())


@pytest.mark.parametrize("loss", ["true", "false"])
def test_running_query_forgets_a_stream_that_was_read_to_its_end_and_deleted(
    cluster: Cluster, environment: StreamEnvironment, loss: str
) -> None:
    """It failed, since its process still remembered where the stream was."""
    with remade(environment) as stream:
        stream.make(100)
        options = stream.options(cluster, startingOffsets="earliest", failOnDataLoss=loss)
        reader = StreamReader(options.for_streaming())
        start = reader.initialOffset()
        end: dict[str, Any] = reader.latestOffset(start, ReadAllAvailable())
        assert read(reader, reader.partitions(start, end)) == bodies(100)
        environment.delete_stream(stream.name)
        after: dict[str, Any] = reader.latestOffset(end, ReadAllAvailable())
        assert after["next"] == {}
        stream.make(70, first=5_000)
        again: dict[str, Any] = reader.latestOffset(after, ReadAllAvailable())
        assert read(reader, reader.partitions(after, again)) == bodies(70, first=5_000)
