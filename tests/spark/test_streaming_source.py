"""The streaming source: batches as asked for, and a checkpoint that bears with changes."""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sharding.stream.environment import StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.spark.sources import (
    add_partitions,
    bodies,
    follow,
    last_offset,
    run_available,
    send,
    truncated_stream,
)
from tests.spark.stored import one_stream, super_stream

pytestmark = pytest.mark.cluster


def found(batches: list[list[Any]]) -> list[bytes]:
    return sorted(bytes(row.value) for rows in batches for row in rows)


def keyed(environment: StreamEnvironment, name: str, count: int, first: int = 0) -> None:
    keys = [str(number) for number in range(first, first + count)]
    send(environment, name, bodies(count, first), keys=keys)


def test_available_now_with_a_limit_gives_the_batches_it_should(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    with super_stream(environment) as name:
        keyed(environment, name, 1_000)
        frame = follow(
            session,
            cluster,
            superStream=name,
            startingOffsets="earliest",
            maxOffsetsPerTrigger="300",
        )
        batches = run_available(frame, tmp_path)
    assert [len(rows) for rows in batches] == [300, 300, 300, 100]
    assert found(batches) == sorted(bodies(1_000))


def test_a_restarted_query_goes_on_where_it_was(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    with one_stream(environment) as name:
        send(environment, name, bodies(100))
        frame = follow(session, cluster, stream=name)
        assert found(run_available(frame, tmp_path)) == []  # from the latest on
        send(environment, name, bodies(50, first=100))
        assert found(run_available(frame, tmp_path)) == sorted(bodies(50, first=100))
        assert found(run_available(frame, tmp_path)) == []
        send(environment, name, bodies(1, first=150))
        assert found(run_available(frame, tmp_path)) == bodies(1, first=150)


def test_three_partitions_may_become_six_under_a_running_checkpoint(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    with super_stream(environment) as name:
        keyed(environment, name, 200)
        options = {"superStream": name, "startingOffsets": "earliest"}
        first = run_available(follow(session, cluster, **options), tmp_path)
        assert found(first) == sorted(bodies(200))
        streams = environment.partitions(name)
        added = add_partitions(cluster, name, first=3, count=3)
        try:
            for number, stream in enumerate(added):
                send(environment, stream, bodies(10, first=200 + 10 * number))
            send(environment, streams[0], bodies(5, first=230))

            second: list[list[Any]] = []

            def all_found() -> bool:
                # The driver's routes are told of new partitions by their poll.
                second.extend(run_available(follow(session, cluster, **options), tmp_path))
                return len(found(second)) >= 35

            wait_until(all_found, timeout=90)
        finally:
            for stream in added:
                environment.delete_stream(stream)
    assert found(second) == sorted(bodies(35, first=200))
    numbers = {row.stream: row.partition for rows in second for row in rows}
    assert numbers == {streams[0]: 0, **{stream: 3 + n for n, stream in enumerate(added)}}
    assert set(last_offset(tmp_path)["next"]) == {*streams, *added}


def test_a_query_that_never_stops_sees_new_rows_and_reports_its_lag(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    seen: Counter[bytes] = Counter()
    with one_stream(environment) as name:
        frame = follow(session, cluster, stream=name, startingOffsets="earliest")
        query = (
            frame.writeStream.foreachBatch(
                lambda batch, _: seen.update(bytes(row.value) for row in batch.collect())
            )
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        try:
            for part in range(3):
                send(environment, name, bodies(100, first=100 * part))
                wait_until(lambda: len(seen) >= 100 * (part + 1))  # noqa: B023
            progress = query.lastProgress
        finally:
            query.stop()
    assert seen == Counter(bodies(300))
    assert progress is not None
    assert name in str(progress["sources"][0]["latestOffset"])


def test_how_far_the_query_is_can_be_stored_in_the_broker(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    with one_stream(environment) as name:
        options = {"stream": name, "startingOffsets": "earliest", "storeOffsets": "billing"}
        send(environment, name, bodies(100))
        run_available(follow(session, cluster, **options), tmp_path)
        assert environment.stored_offset("billing", name) == 99


def test_what_retention_deleted_fails_the_query_unless_that_is_allowed(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    with truncated_stream(environment) as (name, first):
        options = {"stream": name, "startingOffsets": f'{{"{name}": 0}}', "columns": "offset"}
        with pytest.raises(PySparkException, match="no longer has what was to be read"):
            run_available(follow(session, cluster, **options), tmp_path)
        frame = follow(session, cluster, **options, failOnDataLoss="false")
        batches = run_available(frame, tmp_path / "allowed")
    offsets = [row.offset for rows in batches for row in rows]
    assert min(offsets) >= first
    assert len(set(offsets)) == len(offsets)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stream": "a", "endingOffsets": "latest"}, "is for batches only"),
        ({"stream": "no-such-stream"}, "must exist; found 'no-such-stream'"),
        ({"stream": "a", "password": "canary-1"}, "authentication failure"),
    ],
)
def test_what_can_not_be_read_fails_the_query_with_one_sentence(
    session: SparkSession, cluster: Cluster, tmp_path: Path, options: dict[str, str], said: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        run_available(follow(session, cluster, **options), tmp_path)
    assert said in str(caught.value)
    assert "canary-1" not in str(caught.value)


def test_stream_that_was_read_to_its_end_and_deleted_is_forgotten(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    """s13: the query failed for good."""
    with one_stream(environment) as kept:
        gone = f"gone-{secrets.token_hex(4)}"
        environment.create_stream(gone)
        for stream in (kept, gone):
            send(environment, stream, bodies(10))
        options = {"streams": f"{kept},{gone}", "startingOffsets": "earliest"}
        first = run_available(follow(session, cluster, **options), tmp_path)
        assert sum(map(len, first)) == 20
        environment.delete_stream(gone)
        send(environment, kept, [b"more"])
        second = run_available(follow(session, cluster, **options), tmp_path)
        assert found(second) == [b"more"]
        assert set(last_offset(tmp_path)["next"]) == {kept}


def test_stream_made_again_under_a_query_is_noticed_though_it_grew_past_the_checkpoint(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment, tmp_path: Path
) -> None:
    """21: what the new stream has up to the checkpoint's offset was skipped."""
    with one_stream(environment) as name:
        send(environment, name, bodies(100))
        frame = follow(session, cluster, stream=name, startingOffsets="earliest")
        assert sum(map(len, run_available(frame, tmp_path))) == 100
        environment.delete_stream(name)
        environment.create_stream(name)
        send(environment, name, bodies(150, first=1_000))
        with pytest.raises(PySparkException, match=f"'{name}' .* it was deleted and made again"):
            run_available(frame, tmp_path)
        allowed = follow(session, cluster, stream=name, failOnDataLoss="false")
        assert found(run_available(allowed, tmp_path)) == sorted(bodies(150, first=1_000))
