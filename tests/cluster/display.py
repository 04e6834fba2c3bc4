"""A cluster as a table."""

from __future__ import annotations

import time

from rich.table import Table

from sharding.cluster.management import NoAnswer
from tests.cluster.cluster import Cluster, Node

_FIRST_FIGURES = 15.0


def cluster_table(cluster: Cluster) -> Table:
    """Each node with what it reports of itself; ports are at the node's own address."""
    table = Table(title=f"{cluster.name} (from {cluster.source})", title_justify="left")
    for heading in ("node", "address", "RabbitMQ"):
        table.add_column(heading)
    for heading in ("AMQP", "streams", "HTTP", "memory"):
        table.add_column(heading, justify="right")
    for node, (version, memory) in zip(cluster.nodes, _figures(cluster), strict=True):
        ports = [str(node.endpoint.ports[name]) for name in ("amqp", "stream", "management")]
        table.add_row(node.name, node.endpoint.address, version, *ports, memory)
    return table


def exports(cluster: Cluster) -> str:
    """What makes `warren` and the examples use this cluster."""
    endpoint, management = cluster.nodes[0].endpoint, cluster.nodes[0].management
    return (
        f"export WARREN_URL={endpoint.amqp_url} WARREN_MANAGEMENT_URL={management.url} "
        f"WARREN_STREAM_URL={endpoint.stream_url}"
    )


def _figures(cluster: Cluster) -> list[tuple[str, str]]:
    """What the nodes report; a node that just started has no figures for some seconds."""
    deadline = time.monotonic() + _FIRST_FIGURES
    while True:
        figures = [_reported(node) for node in cluster.nodes]
        if all(memory for _, memory in figures) or time.monotonic() > deadline:
            return figures
        time.sleep(0.2)


def _reported(node: Node) -> tuple[str, str]:
    """Version and memory, as the node itself reports them; the memory is empty if not known yet."""
    try:
        version = node.management.get("overview", timeout=3)["rabbitmq_version"]
        memory = node.management.get("nodes", node.name, timeout=3).get("mem_used")
    except NoAnswer:
        return ("silent", "") if node.driver.running() else ("down", "?")
    return str(version), f"{memory / 1e6:.0f} MB" if memory else ""
