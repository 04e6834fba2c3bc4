"""Ranges of a stream: from which node, from which time, and with chunks left out by the broker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from sharding.stream import StreamEnvironment
from sharding.stream.consumer.probe import PROBE_NAME
from sharding.stream.errors import NotSupported
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.streams import environment_of, publish, stream_in

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def environment(nodes: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(nodes, **patient.STREAMS) as opened:
        yield opened


def test_range_is_read_from_a_replica_and_says_from_which(environment: StreamEnvironment) -> None:
    with stream_in(environment) as stream:
        publish(environment, stream, [b"x"] * 100)
        reading = environment.read_range(stream, 0, 1_000)  # past the end: the leader is asked too
        assert sum(batch.num_rows for batch in reading) == 100
        assert reading.node in environment.route(stream).replicas


def test_time_is_found_in_a_stream(environment: StreamEnvironment) -> None:
    with stream_in(environment) as stream:
        long_ago = datetime(2020, 1, 1, tzinfo=UTC)
        assert environment.offset_at(stream, long_ago) is None
        publish(environment, stream, [b"before"] * 50)
        wait_until(lambda: last_stored(environment, stream) < datetime.now(UTC))
        between = datetime.now(UTC)
        publish(environment, stream, [b"after"] * 50)
        assert environment.offset_at(stream, long_ago) == 0
        assert environment.offset_at(stream, between) == 50
        assert environment.offset_at(stream, datetime.now(UTC) + timedelta(minutes=1)) is None


def last_stored(environment: StreamEnvironment, stream: str) -> datetime:
    """When the last chunk was stored, with the millisecond that it was stored in over."""
    batch = next(environment.read_range(stream, 0, 1_000))
    stored: datetime = batch.column("timestamp")[-1].as_py()
    return stored + timedelta(milliseconds=1)


def test_range_is_read_with_chunks_left_out(
    environment: StreamEnvironment, any_version: str
) -> None:
    with stream_in(environment) as stream:
        if any_version == "3.10":
            publish(environment, stream, [b"x"])
            with pytest.raises(NotSupported):
                list(environment.read_range(stream, 0, 1, filter_values=("eu",)))
            return
        with environment.producer(stream, filtering=True) as producer:
            for region in ("eu", "us", "eu", "us"):
                for _ in range(100):
                    producer.send(region.encode(), filter_value=region)
                producer.flush(timeout=PATIENCE).raise_for_failures()  # so that each has its chunks
        reading = environment.read_range(stream, 50, 350, filter_values=("eu",))
        found = [body.as_py() for batch in reading for body in batch.column("body")]
        assert found == [b"eu"] * 150
        assert reading.node in environment.route(stream).replicas


def test_management_lists_short_looks_under_their_name(
    environment: StreamEnvironment, nodes: Cluster
) -> None:
    """So that whoever counts who reads from a leader can leave them out."""
    with stream_in(environment) as stream:
        publish(environment, stream, [b"x"] * 100)
        names: set[str | None] = set()
        enough = threading.Event()

        def look() -> None:
            while not enough.is_set():
                environment.offsets(stream)

        def seen() -> bool:
            listed = nodes.nodes[0].management.get("stream", "consumers", timeout=PATIENCE)
            ours = [each for each in listed if each["queue"]["name"] == stream]
            names.update(each["properties"].get("name") for each in ours)
            return bool(names)

        with ThreadPoolExecutor() as workers:
            looking = workers.submit(look)
            try:
                wait_until(seen)
            finally:
                enough.set()
            looking.result(PATIENCE)
    assert names == {PROBE_NAME}
