"""A real HAProxy in front of a cluster: one address, connections dealt out in turn.

Whether it listens already is asked from its own address, and HAProxy turns away what comes from
there: a question that it dealt to a node would take that node's turn. It deals a connection when
one of its threads gets to it, so on a busy machine even after one that was made later (seen: 5, 3
and 4 of 12 connections, and in the log a question without a byte between the first and the second).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import machine
from tests.cluster import processes
from tests.cluster.nodes import LISTENERS, Endpoint
from tests.cluster.waiting import wait_until


@dataclass(frozen=True)
class Balancer:
    """Listens at one address for AMQP, streams and management, in front of some nodes."""

    folder: Path
    endpoint: Endpoint

    @classmethod
    def start(
        cls, folder: Path, address: str, ports: Sequence[int], nodes: Sequence[Endpoint]
    ) -> Balancer:
        haproxy = machine.ensure_command("haproxy", "haproxy", "tests run behind a load balancer")
        listeners = dict(zip(LISTENERS, ports, strict=True))
        balancer = cls(folder, Endpoint("haproxy", address, listeners, vhost=nodes[0].vhost))
        folder.mkdir(parents=True)
        (folder / "haproxy.cfg").write_text(_configuration(balancer.endpoint, nodes))
        argv = [haproxy, "-db", "-f", str(folder / "haproxy.cfg")]
        processes.spawn(argv, dict(os.environ), folder, folder / "output.log")
        wait_until(balancer._listens, explain=balancer.log)
        return balancer

    def log(self) -> str:
        """Each connection that has ended, with the node it was dealt to, and nodes lost or back."""
        return (self.folder / "output.log").read_text()

    def stop(self) -> None:
        processes.kill_all(self.folder)

    def _listens(self) -> bool:
        here = self.endpoint.address
        try:
            for port in self.endpoint.ports.values():
                socket.create_connection((here, port), 2, source_address=(here, 0)).close()
        except OSError:
            return False
        return True


def _configuration(front: Endpoint, nodes: Sequence[Endpoint]) -> str:
    sections = [
        "global\n log stdout format raw local0 info",
        "defaults\n mode tcp\n log global\n option tcplog\n"
        " balance roundrobin\n option redispatch\n retries 3\n"
        " timeout connect 2s\n timeout client 1h\n timeout server 1h",
    ]
    not_dealt = f" tcp-request connection reject if {{ src {front.address} }}"
    for name, port in front.ports.items():
        servers = [
            f" server node{number} {node.address}:{node.ports[name]} check inter 500 fall 2 rise 1"
            for number, node in enumerate(nodes)
        ]
        listen = [f"listen {name}", f" bind {front.address}:{port}", not_dealt, *servers]
        sections.append("\n".join(listen))
    return "\n\n".join(sections) + "\n"
