"""Every example runs, as a user would run it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cluster import Cluster
from tests.machine import PROJECT

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("client", ["pika", "aio"])
def test_what_the_producer_publishes_the_consumer_gets(cluster: Cluster, client: str) -> None:
    def run(name: str) -> str:
        node = cluster.nodes[0]
        environment = {
            **os.environ,
            "WARREN_URL": node.endpoint.amqp_url,
            "WARREN_MANAGEMENT_URL": node.management.url,
        }
        command = [sys.executable, f"examples/{client}_{name}.py", "200"]
        done = subprocess.run(
            command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "user-42 goes to Route(logical='images'" in run("producer")
    assert "consumed 200 messages" in run("consumer")
