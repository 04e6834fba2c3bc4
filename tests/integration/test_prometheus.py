"""A real Prometheus scrapes a publisher and a worker, and its numbers equal what was published."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from interceptors import ShardedPublisher
from sharding import Policy, metrics
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.support.sharded import fresh_queue, raw_channel, topology_of

PROMETHEUS = shutil.which("prometheus")
COUNT = 500

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not PROMETHEUS, reason="prometheus is not installed (apt: prometheus)"),
]


@contextmanager
def prometheus(folder: Path, *targets: int) -> Iterator[int]:
    """A server that scrapes these ports of localhost each second, and its own port."""
    port = free_port()
    hosts = [f"127.0.0.1:{target}" for target in targets]
    jobs = [{"job_name": "warren", "static_configs": [{"targets": hosts}]}]
    # JSON is YAML.
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    server = subprocess.Popen(
        [
            str(PROMETHEUS),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        server.terminate()
        server.wait(PATIENCE)


def asked(port: int, query: str) -> float | None:
    """The sum of a query's values; None while there are none."""
    parameters = urllib.parse.urlencode({"query": f"sum({query})"})
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/api/v1/query?{parameters}", timeout=PATIENCE
        ) as answer:
            found = json.loads(answer.read())["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return None
    return float(found[0]["value"][1]) if found else None


def _wait_for(port: int, query: str, value: float) -> None:
    wait_until(
        lambda: asked(port, query) == value, explain=lambda: f"{query} is {asked(port, query)}"
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def worker(cluster: Cluster, folder: Path, logical: str, port: int) -> Iterator[None]:
    (folder / "jobs.py").write_text("def done(delivery):\n    pass\n")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sharding.cli", "worker", "--queue", logical, "jobs:done"),
            *("--metrics-port", str(port)),
        ],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(PROJECT), "WARREN_URL": cluster.nodes[0].endpoint.amqp_url},
    )
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_numbers_in_prometheus_equal_what_was_published(cluster: Cluster, tmp_path: Path) -> None:
    logical, worker_port = fresh_queue(), free_port()
    with topology_of(cluster) as topology:
        topology.set_policy(Policy.exactly(logical, 1, name=logical))
        shards = topology.ensure(logical).shard_map.shards
        try:
            with (
                ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher,
                metrics.serve(0, publisher) as server,
                worker(cluster, tmp_path, logical, worker_port),
                prometheus(tmp_path, server.port, worker_port) as port,
            ):
                for number in range(COUNT):
                    publisher.publish(f"user-{number}", b"one")
                assert publisher.flush(PATIENCE).stored == COUNT
                seen = {
                    f'warren_publisher_stored_total{{logical="{logical}"}}': COUNT,
                    f'warren_publisher_accepted_total{{logical="{logical}"}}': COUNT,
                    f'warren_group_handled_total{{logical="{logical}"}}': COUNT,
                    f'warren_group_shards{{logical="{logical}"}}': len(shards),
                    f'warren_group_failed_total{{logical="{logical}"}}': 0,
                }
                for query, value in seen.items():
                    _wait_for(port, query, value)
        finally:
            topology.forget(logical)
            topology.clear_policy(logical)
            with raw_channel(cluster.nodes[0]) as channel:
                for shard in shards:
                    channel.queue_delete(shard.name)
