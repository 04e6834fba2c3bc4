"""Clusters start beside each other, end without a trace, and say why they could not start."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pika
import pytest

from tests.cluster import Cluster, Endpoint, NotOurs, folders, processes, wait_until
from tests.machine import PROJECT

pytestmark = pytest.mark.cluster


def fresh_name() -> str:
    return f"test-{secrets.token_hex(4)}"


def traces(name: str) -> list[str]:
    """Whatever is left on this machine of a cluster: processes, mounts, folders."""
    folder = folders.cluster_folder(name)
    # Not the cache itself, which may be one, nor a root that another run is just making.
    roots = re.compile(re.escape(f"{folders.cache()}/roots/") + r"\d")
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return [
        *(f"process {pid}" for pid in processes.marked(folder)),
        *(line for line in mounts if roots.search(line)),
        *([f"folder {folder}"] if folder.exists() else []),
    ]


@pytest.mark.usefixtures("boots_clusters")
def test_cluster_with_settings_of_its_own_runs_beside_another_and_ends_without_a_trace(
    cluster: Cluster, broker_version: str
) -> None:
    name = fresh_name()
    if broker_version != "4.3":  # there it is in the broker itself
        assert "x-modulus-hash" not in exchange_types(cluster.nodes[0].endpoint)
    with Cluster.start(
        name,
        nodes=1,
        plugins=["rabbitmq_sharding"],
        config="listeners.tcp.2 = $address:$second",
        extra_ports=["second"],
    ) as other:
        endpoint = other.nodes[0].endpoint
        assert endpoint.address not in {node.endpoint.address for node in cluster}
        assert "x-modulus-hash" in exchange_types(endpoint)
        second = pika.ConnectionParameters(endpoint.address, endpoint.ports["second"])
        pika.BlockingConnection(second).close()
        with pytest.raises(FileExistsError, match="running already"):
            Cluster.start(name, nodes=1)
        wait_until(lambda: other.running_nodes() == other.nodes)
        assert traces(name)
    assert traces(name) == []
    wait_until(lambda: len(cluster.running_nodes()) == 3)


def exchange_types(endpoint: Endpoint) -> set[str]:
    return {entry["name"] for entry in endpoint.management.get("overview")["exchange_types"]}


@pytest.mark.usefixtures("boots_clusters")
def test_next_start_cleans_up_after_a_killed_run_and_one_that_fails_leaves_nothing() -> None:
    name, second = fresh_name(), fresh_name()
    script = f"""
import time
from tests.cluster import Cluster
Cluster.start({name!r}, nodes=1)
print("up", flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=PROJECT, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        with folders.locked("clusters"):  # no other boot cleans up meanwhile
            run.send_signal(signal.SIGKILL)
            run.wait()
            assert traces(name)
            assert name in folders.abandoned()
    with pytest.raises(RuntimeError, match="no_such_setting"):
        Cluster.start(second, nodes=1, config="no_such_setting = 1")
    assert traces(name) == traces(second) == []


@pytest.mark.usefixtures("boots_clusters")
def test_make_up_status_and_down(broker_version: str) -> None:
    name, second = fresh_name(), fresh_name()

    def make(target: str, cluster_name: str, *options: str) -> str:
        chosen = [f"NAME={cluster_name}", f"VERSION={broker_version}", *options]
        command = ["make", "--silent", target, *chosen]
        environment = {**os.environ, "COLUMNS": "120"}
        return subprocess.run(
            command, cwd=PROJECT, check=True, capture_output=True, text=True, env=environment
        ).stdout

    try:
        make("up", name)
        make("up", second, "NODES=1")
        status = make("status", name)
        for node in [*Cluster.attach(name), *Cluster.attach(second)]:
            row = next(line for line in status.splitlines() if node.name in line)
            assert node.endpoint.address in row
            assert f" {broker_version}." in row
            assert " MB " in row
        wait_until(lambda: len(Cluster.attach(name).running_nodes()) == 3)
    finally:
        make("down", name)
        wait_until(lambda: len(Cluster.attach(second).running_nodes()) == 1)
        make("down", second)
    assert traces(name) == traces(second) == []


def test_haproxy_deals_connections_out_to_every_node(cluster: Cluster) -> None:
    balancer = cluster.balancer()
    try:
        reached = Counter(
            balancer.endpoint.management.get("overview")["node"] for _ in range(3 * 4)
        )
        assert reached == Counter({node.name: 4 for node in cluster}), balancer.log()
        pika.BlockingConnection(pika.URLParameters(balancer.endpoint.amqp_url)).close()
    finally:
        balancer.stop()


def test_brokers_named_in_the_environment_are_used_and_never_harmed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARREN_AMQP_URLS", ",".join(n.endpoint.amqp_url for n in cluster))
    monkeypatch.setenv("WARREN_MANAGEMENT_URLS", ",".join(n.management.url for n in cluster))
    monkeypatch.setenv("WARREN_STREAM_URLS", ",".join(n.endpoint.stream_url for n in cluster))
    with Cluster.start() as foreign:
        assert [node.name for node in foreign] == [node.name for node in cluster]
        for harm in (foreign.nodes[0].kill, foreign.nodes[0].freeze, foreign.add_node):
            with pytest.raises(NotOurs):
                harm()
    wait_until(lambda: len(cluster.running_nodes()) == 3)


@pytest.mark.docker
@pytest.mark.usefixtures("boots_clusters")
def test_cluster_in_docker_joins_and_ends_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARREN_BROKER_SOURCE", "docker")
    name = fresh_name()
    with Cluster.start(name, nodes=2) as contained:
        contained.nodes[1].kill()
        contained.nodes[1].restart()
        assert len(contained.running_nodes()) == 2
    assert traces(name) == []
