"""The cluster as its management API shows it: a value, and the questions that make it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sharding.doctor.places import Protocol
from sharding.management import Management, NoAnswer
from sharding.stream.protocol import Broker

_LISTENERS = {
    "amqp": Protocol.AMQP,
    "amqp/ssl": Protocol.AMQP,
    "stream": Protocol.STREAMS,
    "stream/ssl": Protocol.STREAMS,
}
_EVERYWHERE = {"", "::", "0.0.0.0", "0:0:0:0:0:0:0:0"}


@dataclass(frozen=True, slots=True)
class NodeSeen:
    name: str
    running: bool
    version: str = ""
    listeners: tuple[tuple[Protocol, Broker], ...] = ()

    def addresses(self, protocol: Protocol) -> tuple[Broker, ...]:
        return tuple(address for each, address in self.listeners if each is protocol)


@dataclass(frozen=True, slots=True)
class ClusterSeen:
    """No nodes where no management API could be asked; `problem` says why."""

    nodes: tuple[NodeSeen, ...] = ()
    problem: str = ""
    in_time: bool = True

    @property
    def running(self) -> tuple[NodeSeen, ...]:
        return tuple(node for node in self.nodes if node.running)


def look_at(api: Management, timeout: float) -> ClusterSeen:
    try:
        listeners = api.get("overview", timeout=timeout).get("listeners", [])
        nodes = api.get("nodes", timeout=timeout)
    except NoAnswer as error:
        return ClusterSeen(problem=error.reason or str(error), in_time=error.in_time)
    return cluster_from(nodes, listeners)


def cluster_from(
    nodes: Iterable[Mapping[str, Any]], listeners: Iterable[Mapping[str, Any]]
) -> ClusterSeen:
    """A listener on all interfaces is reached under the host in the node's name."""
    found: dict[str, list[tuple[Protocol, Broker]]] = {}
    for listener in listeners:
        protocol = _LISTENERS.get(str(listener["protocol"]))
        if protocol is None:
            continue
        node, address = str(listener["node"]), str(listener["ip_address"])
        host = node.partition("@")[2] if address in _EVERYWHERE else address
        entry = protocol, Broker(host, int(listener["port"]))
        if entry not in found.setdefault(node, []):
            found[node].append(entry)
    return ClusterSeen(
        tuple(
            NodeSeen(
                str(node["name"]),
                bool(node.get("running")),
                _version(node),
                tuple(found.get(str(node["name"]), ())),
            )
            for node in sorted(nodes, key=lambda node: str(node["name"]))
        )
    )


def _version(node: Mapping[str, Any]) -> str:
    applications = node.get("applications") or ()
    return next((str(each["version"]) for each in applications if each["name"] == "rabbit"), "")
