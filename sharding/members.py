"""Which nodes the cluster has, where they listen, and which of them run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharding.management import Management, NoAnswer
from sharding.shard_map import Address, Node

_EVERYWHERE = {"", "::", "0.0.0.0", "0:0:0:0:0:0:0:0"}


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the cluster. One that is down is a member still; one that left is not."""

    node: Node
    running: bool

    @property
    def name(self) -> str:
        return self.node.name


class ClusterView:
    """The management API of whichever node answers."""

    def __init__(self, apis: Sequence[Management]) -> None:
        self._apis = list(apis)

    def __bool__(self) -> bool:
        return bool(self._apis)

    def ask(self, method: str, *path: str, body: object = None, timeout: float = 5) -> Any:
        """One question to the first API that answers; a refusal with a status is an answer."""
        problem: NoAnswer | None = None
        for api in list(self._apis):
            try:
                answer = api.call(method, *path, body=body, timeout=timeout)
            except NoAnswer as error:
                if error.status is not None and error.status < 500:
                    raise
                problem = error
                continue
            self._prefer(api)
            return answer
        raise problem or NoAnswer("no management URL is given")

    def members(self, tls: bool = False) -> list[Member]:
        overview = self.ask("GET", "overview")
        nodes = self.ask("GET", "nodes")
        return members_from(nodes, overview.get("listeners", []), tls)

    def version(self) -> tuple[int, ...]:
        text = self.ask("GET", "overview")["rabbitmq_version"]
        return tuple(int(part) for part in text.split(".")[:2])

    def queue_node(self, vhost: str, queue: str) -> str | None:
        """Where a queue lives; None if there is no such queue."""
        try:
            found = self.ask("GET", "queues", vhost, queue)
        except NoAnswer as error:
            if error.status == 404:
                return None
            raise
        return str(found["node"]) if found.get("node") else None

    def _prefer(self, api: Management) -> None:
        # Made anew and not changed in place: several threads ask at once.
        self._apis = [api, *(each for each in self._apis if each is not api)]


def members_from(
    nodes: Iterable[Mapping[str, Any]], listeners: Iterable[Mapping[str, Any]], tls: bool = False
) -> list[Member]:
    """Members from what the management API says of nodes and listeners.

    A listener on all interfaces is reached under the host in the node's name.
    """
    wanted = "amqp/ssl" if tls else "amqp"
    found: dict[str, list[Address]] = {}
    for listener in listeners:
        if listener["protocol"] == wanted:
            node, address = listener["node"], str(listener["ip_address"])
            host = node.partition("@")[2] if address in _EVERYWHERE else address
            entry = Address(host, int(listener["port"]))
            if entry not in found.setdefault(node, []):
                found[node].append(entry)
    return [
        Member(Node(node["name"], tuple(found.get(node["name"], ()))), bool(node.get("running")))
        for node in sorted(nodes, key=lambda node: str(node["name"]))
    ]
