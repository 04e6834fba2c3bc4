"""The example pipeline, there and back: every row once, in order per key, read from replicas.

`WARREN_PIPELINE_ORDERS` says with how many rows; `make faults` takes a million.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.machine import PROJECT

pytestmark = pytest.mark.cluster

ORDERS = int(os.environ.get("WARREN_PIPELINE_ORDERS", "100000"))
PARTITIONS = 6


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
def test_every_row_comes_back_once_in_order_and_from_a_replica(
    cluster: Cluster, master: str, tmp_path: Path
) -> None:
    node = cluster.nodes[0].endpoint
    name = f"orders-{secrets.token_hex(4)}"
    command = [
        *(sys.executable, "-m", "examples.spark_pipeline"),
        *("--uri", f"rabbitmq-stream://{node.address}:{node.ports['stream']}"),
        *("--orders", str(ORDERS), "--partitions", str(PARTITIONS)),
        *("--master", master, "--super-stream", name, "--amqp-url", node.amqp_url),
    ]
    # Executors of a local cluster are processes that do not inherit the search path.
    paths = {**os.environ, "PYTHONPATH": str(PROJECT), "COLUMNS": "120"}
    output = tmp_path / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(
            command, cwd=PROJECT, env=paths, stdout=file, stderr=subprocess.STDOUT
        ) as running,
    ):
        leaders, seen = watch(cluster, name, running)
    shown = output.read_text()
    assert running.returncode == 0, shown
    assert f"{ORDERS:,} orders: lost 0 · twice 0 · out of order within a customer 0" in shown
    print(f"\n{master}: consumers seen by the management API: {dict(seen)}; leaders: {leaders}")
    at_leaders = {stream: seen[stream, leader] for stream, leader in leaders.items()}
    assert len(leaders) == PARTITIONS
    assert not any(at_leaders.values())
    # Those that were shorter than the API's own rhythm may be missing; the table names every one.
    assert any(seen.values())
    rows = [line for line in shown.splitlines() if f"{name}-" in line and "│" in line]
    read = [[cell.strip() for cell in line.split("│")[1:4]] for line in rows]
    assert {stream for stream, _, _ in read} == set(leaders)
    assert all(leader != node for _, leader, node in read)


def watch(
    cluster: Cluster, name: str, running: subprocess.Popen[bytes]
) -> tuple[dict[str, str], Counter[tuple[str, str]]]:
    """The node that leads each partition, and how often a consumer was seen at which node."""
    management = cluster.nodes[1].management
    leaders: dict[str, str] = {}
    seen: Counter[tuple[str, str]] = Counter()
    while running.poll() is None:
        for queue in management.get("queues", "/"):
            if queue["name"].startswith(f"{name}-") and queue.get("leader"):
                leaders[queue["name"]] = queue["leader"]
        for consumer in management.get("stream", "consumers"):
            stream, connection = consumer["queue"]["name"], consumer["connection_details"]
            if stream.startswith(f"{name}-") and connection:
                seen[stream, connection["node"]] += 1
        time.sleep(0.2)
    return leaders, seen
