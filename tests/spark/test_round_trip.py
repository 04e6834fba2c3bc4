"""Rows there and back: every one once, in order per key, and from replicas, says the broker.

`WARREN_ROUND_TRIP_ROWS` says how many rows; `make test-all` takes a million.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from sharding.stream.environment import StreamEnvironment
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.spark.round_trip import Found, Outcome, Trip
from tests.spark.stored import stream_uri, super_stream

ROWS = int(os.environ.get("WARREN_ROUND_TRIP_ROWS", "100000"))
PARTITIONS = 6
TIMEOUT = round(10 * PATIENCE) + ROWS // 2_000

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TIMEOUT + 60)]


def leaders_of(cluster: Cluster, streams: tuple[str, ...]) -> dict[str, str]:
    management = cluster.nodes[0].management
    return {stream: management.get("queues", cluster.vhost, stream)["leader"] for stream in streams}


in_one_process = pytest.mark.twin(
    "spark/test_pipeline.py::test_every_row_comes_back_once_in_order_and_from_a_replica"
)


@pytest.mark.parametrize(
    "master", ["local-cluster[2,1,1024]", pytest.param("local[2]", marks=in_one_process)]
)
def test_every_row_comes_back_once_and_no_partition_is_read_from_its_leader(
    cluster: Cluster, environment: StreamEnvironment, master: str
) -> None:
    with super_stream(environment, PARTITIONS) as name:
        streams = environment.partitions(name)
        trip = Trip(
            master=master,
            rows=ROWS,
            super_stream=name,
            partitions=list(streams),
            uri=stream_uri(cluster),
            management_url=cluster.nodes[0].management.url,
        )
        before = leaders_of(cluster, streams)
        outcome = run(trip)
        assert leaders_of(cluster, streams) == before, "leaders moved, so nothing can be said"
    print(f"\n{master}, {ROWS:,} rows, leaders {before}: {outcome}")
    for found in outcome.passes:
        assert (found.rows, found.different) == (ROWS, ROWS)
        assert (found.wrong, found.out_of_order) == (0, 0)
    assert {stream for stream, _, _ in outcome.seen} == set(streams)
    assert [(stream, node) for stream, node, _ in outcome.seen if node == before[stream]] == []


def run(trip: Trip) -> Outcome:
    command = [sys.executable, "-m", "tests.spark.round_trip", json.dumps(asdict(trip))]
    # Executors of a local cluster are processes that do not inherit the search path.
    paths = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        command, cwd=PROJECT, env=paths, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    told = json.loads(done.stdout.splitlines()[-1])
    passes = [Found(**found) for found in told.pop("passes")]
    seen = [(stream, node, times) for stream, node, times in told.pop("seen")]
    return Outcome(passes=passes, seen=seen, **told)
