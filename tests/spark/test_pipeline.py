"""The example pipeline, there and back: every row once, in order per key, read from replicas.

`WARREN_PIPELINE_ORDERS` says with how many rows.
"""

from __future__ import annotations

import io
import os
import secrets
import subprocess
import sys

import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from examples.spark_pipeline import Proof, Settings, publish_and_read
from sharding.stream import StreamEnvironment
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.spark.stored import super_stream

pytestmark = pytest.mark.cluster

ORDERS = int(os.environ.get("WARREN_PIPELINE_ORDERS", "100000"))
PARTITIONS = 6


def judge(shown: str, name: str) -> None:
    """What the pipeline shows, if it was right."""
    assert f"{ORDERS:,} orders worth " in shown
    assert ": lost 0 · twice 0 · out of order within a customer 0" in shown
    rows = [line for line in shown.splitlines() if f"{name}-" in line and "│" in line]
    read = [[cell.strip() for cell in line.split("│")[1:4]] for line in rows]
    assert {stream for stream, _, _ in read} == {f"{name}-{n}" for n in range(PARTITIONS)}
    assert all(leader != node for _, leader, node in read)


def test_every_row_comes_back_once_in_order_and_from_a_replica(
    session: SparkSession, cluster: Cluster, environment: StreamEnvironment
) -> None:
    shown = io.StringIO()
    with super_stream(environment, PARTITIONS) as name:
        uri = cluster.nodes[0].endpoint.url("stream")
        settings = Settings(uri, ORDERS, PARTITIONS, super_stream=name)
        proof = publish_and_read(session, settings, environment, Console(file=shown, width=120))
    assert proof == Proof(0, 0, 0)
    judge(shown.getvalue(), name)


@pytest.mark.twin(
    "spark/test_pipeline.py::test_every_row_comes_back_once_in_order_and_from_a_replica"
)
@pytest.mark.timeout(11 * PATIENCE)
@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_the_same_as_a_program_with_a_spark_of_its_own(cluster: Cluster, master: str) -> None:
    node = cluster.nodes[0].endpoint
    name = f"orders-{secrets.token_hex(4)}"
    command = [
        *(sys.executable, "-m", "examples.spark_pipeline"),
        *("--uri", node.url("stream")),
        *("--orders", str(ORDERS), "--partitions", str(PARTITIONS)),
        *("--master", master, "--super-stream", name, "--amqp-url", node.amqp_url),
    ]
    # Executors of a local cluster are processes that do not inherit the search path.
    paths = {**os.environ, "PYTHONPATH": str(PROJECT), "COLUMNS": "120"}
    done = subprocess.run(
        command, cwd=PROJECT, env=paths, capture_output=True, text=True, timeout=10 * PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    judge(done.stdout, name)
