"""The example pipeline, there and back: every row once, in order per key, read from replicas.

`WARREN_PIPELINE_ORDERS` says with how many rows.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import pytest

from tests.cluster import Cluster
from tests.machine import PROJECT

pytestmark = pytest.mark.cluster

ORDERS = int(os.environ.get("WARREN_PIPELINE_ORDERS", "100000"))
PARTITIONS = 6


in_one_process = pytest.mark.twin(
    "spark/test_pipeline.py::test_every_row_comes_back_once_in_order_and_from_a_replica"
)


@pytest.mark.parametrize(
    "master", ["local-cluster[2,1,1024]", pytest.param("local[2]", marks=in_one_process)]
)
def test_every_row_comes_back_once_in_order_and_from_a_replica(
    cluster: Cluster, master: str
) -> None:
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
        command, cwd=PROJECT, env=paths, capture_output=True, text=True, timeout=250
    )
    shown = done.stdout
    assert done.returncode == 0, shown + done.stderr
    assert f"{ORDERS:,} orders worth " in shown
    assert ": lost 0 · twice 0 · out of order within a customer 0" in shown
    rows = [line for line in shown.splitlines() if f"{name}-" in line and "│" in line]
    read = [[cell.strip() for cell in line.split("│")[1:4]] for line in rows]
    assert {stream for stream, _, _ in read} == {f"{name}-{n}" for n in range(PARTITIONS)}
    assert all(leader != node for _, leader, node in read)
