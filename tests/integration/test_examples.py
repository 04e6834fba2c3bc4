"""Every example runs, as a user would run it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT

pytestmark = pytest.mark.cluster


def run(cluster: Cluster, name: str, stream_url: str | None = None) -> str:
    node = cluster.nodes[0]
    environment = {
        **os.environ,
        "WARREN_URL": node.endpoint.amqp_url,
        "WARREN_MANAGEMENT_URL": node.management.url,
        "WARREN_STREAM_URL": stream_url or node.endpoint.stream_url,
    }
    command = [sys.executable, f"examples/{name}.py", "200"]
    done = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("client", ["pika", "aio"])
def test_what_the_producer_publishes_the_consumer_gets(cluster: Cluster, client: str) -> None:
    assert "user-42 goes to Route(logical='images'" in run(cluster, f"{client}_producer")
    assert "consumed 200 messages" in run(cluster, f"{client}_consumer")


def test_what_the_producer_publishes_a_worker_handles(cluster: Cluster) -> None:
    run(cluster, "pika_producer")
    assert "handled 200 messages, the last one: user-" in run(cluster, "worker")


def test_what_is_published_to_a_super_stream_is_read_from_it(cluster: Cluster) -> None:
    produced = run(cluster, "stream_producer")
    assert "stored 200 messages; customer-7 is in invoices-" in produced
    assert "read 200 messages, the last one: customer-" in run(cluster, "stream_consumer")


def test_what_is_published_to_a_super_stream_a_worker_of_a_group_handles(cluster: Cluster) -> None:
    if cluster.version.startswith("3.10."):
        pytest.skip("consumer groups over streams need RabbitMQ 3.11")
    run(cluster, "stream_producer")
    assert "handled 200 messages, the last one: customer-" in run(cluster, "stream_worker")


def test_example_behind_a_balancer_reads_from_a_replica(cluster: Cluster) -> None:
    balancer = cluster.balancer()
    try:
        shown = run(cluster, "stream_balancer", balancer.endpoint.stream_url)
    finally:
        balancer.stop()
    assert "first: event 0" in shown
    lines = dict(line.split(": ", 1) for line in shown.splitlines())
    leader, _, replicas = lines["leader"].partition(" · replicas: ")
    assert lines["read from"] in replicas.split()
    assert lines["read from"] != leader
