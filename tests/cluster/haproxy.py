"""A real HAProxy in front of a cluster: one address, connections dealt out in turn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import machine
from tests.cluster import processes
from tests.cluster.nodes import LISTENERS, Endpoint, answers_tcp
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
        wait_until(balancer._listens, 15, lambda: (folder / "output.log").read_text())
        return balancer

    def stop(self) -> None:
        processes.kill_all(self.folder)

    def _listens(self) -> bool:
        return all(
            answers_tcp(self.endpoint.address, port) for port in self.endpoint.ports.values()
        )


def _configuration(front: Endpoint, nodes: Sequence[Endpoint]) -> str:
    sections = [
        "defaults\n mode tcp\n balance roundrobin\n option redispatch\n retries 3\n"
        " timeout connect 2s\n timeout client 1h\n timeout server 1h"
    ]
    for name, port in front.ports.items():
        servers = [
            f" server node{number} {node.address}:{node.ports[name]} check inter 500 fall 2 rise 1"
            for number, node in enumerate(nodes)
        ]
        sections.append("\n".join([f"listen {name}", f" bind {front.address}:{port}", *servers]))
    return "\n\n".join(sections) + "\n"
