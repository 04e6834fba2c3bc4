"""Every node of the cluster: is it up, are its streams on, can it be reached from here.

Warren dials nodes by the addresses that they give: listeners for AMQP, advertised names for
streams. One that can't be dialled from here keeps its shards and leaders from us.

A given address is a balancer's if connections to it end at several nodes, or at a node that gives
another address as its own. Stream clients connect through one again and again until they have the
node they want, so a node that it never leads to can't be used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sharding.cluster.management import Management, NoAnswer, listeners_by_node
from sharding.doctor.findings import Finding, ok, problem, warning
from sharding.doctor.reach import Place, Protocol
from sharding.errors import WarrenError
from sharding.stream.connections.transport import dial
from sharding.stream.protocol.constants import Broker

_LISTENERS = {
    "amqp": Protocol.AMQP,
    "amqp/ssl": Protocol.AMQP,
    "stream": Protocol.STREAMS,
    "stream/ssl": Protocol.STREAMS,
}


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
    found = {
        node: tuple(
            (_LISTENERS[protocol], Broker(address.host, address.port))
            for protocol, address in each
            if protocol in _LISTENERS
        )
        for node, each in listeners_by_node(listeners).items()
    }
    return ClusterSeen(
        tuple(
            NodeSeen(
                str(node["name"]),
                bool(node.get("running")),
                _version(node),
                found.get(str(node["name"]), ()),
            )
            for node in sorted(nodes, key=lambda node: str(node["name"]))
        )
    )


def _version(node: Mapping[str, Any]) -> str:
    applications = node.get("applications") or ()
    return next((str(each["version"]) for each in applications if each["name"] == "rabbit"), "")


MOST_AT_ONCE = 16


def dial_all(addresses: Iterable[Broker], timeout: float) -> dict[Broker, str | None]:
    """Why each address can't be connected to; None for one that can."""

    def try_one(address: Broker) -> str | None:
        try:
            dial(address, time.monotonic() + timeout, None, None).close()
        except WarrenError as error:
            return str(error)
        return None

    chosen = list(dict.fromkeys(addresses))
    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        return dict(zip(chosen, threads.map(try_one, chosen), strict=True))


def judge_running(cluster: ClusterSeen) -> list[Finding]:
    wanted = "every node runs"
    down = [node.name for node in cluster.nodes if not node.running]
    if down:
        fix = (
            "Start it again; if it left for good: 'rabbitmqctl forget_cluster_node NODE', then "
            "'warren shards ensure'."
        )
        return [problem("nodes", name, wanted, "it is down", fix) for name in down]
    return [ok("nodes", "the cluster", wanted, f"{len(cluster.nodes)} nodes run")]


def judge_streams_enabled(cluster: ClusterSeen, asked_for: bool) -> list[Finding]:
    """Whether each running node has a stream port; a problem only for who wants to use it."""
    without = [node.name for node in cluster.running if not node.addresses(Protocol.STREAMS)]
    wanted = "a stream port on every node"
    if not without:
        return [ok("streams", "the cluster", wanted, "every node has one")]
    verdict = problem if asked_for else warning
    fix = (
        "Run 'rabbitmq-plugins enable rabbitmq_stream rabbitmq_stream_management' on each of "
        "these nodes. Queue shards work without."
    )
    return [verdict("streams", ", ".join(without), wanted, "streams are not enabled there", fix)]


def judge_addresses(
    protocol: Protocol, tried: Mapping[Broker, str | None], whose: Mapping[Broker, str]
) -> list[Finding]:
    """What came of dialling the addresses that the nodes give for a protocol."""
    wanted = "an address that can be dialled from here"
    return [
        ok("reach", f"{protocol} of {whose[address]}", wanted, str(address))
        if why is None
        else problem("reach", f"{protocol} of {whose[address]}", wanted, why, _fix(protocol))
        for address, why in tried.items()
    ]


def _fix(protocol: Protocol) -> str:
    if protocol is Protocol.STREAMS:
        return (
            "Set stream.advertised_host and stream.advertised_port on that node to what clients "
            "can dial; or give StreamEnvironment an address_resolver, or load_balancer=True if "
            "the URL is a balancer's."
        )
    return (
        "Make the node's name or address known and reachable from here; until then its shards "
        "are read and published to through other nodes only."
    )


TRIES_PER_NODE = 8  # dealt at random, one of ten nodes is missed once in 500 times
FEW_TRIES = 3


@dataclass(frozen=True)
class Dealt:
    """Where connections to one place ended."""

    place: Place
    seen: Counter[str] = field(default_factory=Counter)
    is_own_address: bool | None = None
    """Whether the place is the address of the node that answered; None if that is not known."""


def deal(nodes: int, connect: Callable[[], str]) -> Counter[str]:
    """Connect until every node was reached, or so often that one which was not never will be.

    `connect` returns the node that answered, or "" if none did.
    """
    seen: Counter[str] = Counter()
    tries = 0
    while tries < max(FEW_TRIES, nodes * TRIES_PER_NODE) and len(seen) < max(nodes, 2):
        tries += 1
        seen.update(filter(None, [connect()]))
        if tries >= FEW_TRIES and not seen:
            break
    return seen


def judge_balancer(dealt: Dealt, nodes: int) -> list[Finding]:
    """`nodes` is how many run; 0 where that is not known."""
    subject, seen = str(dealt.place), dealt.seen
    if not seen:
        return []
    is_balancer = len(seen) > 1 or dealt.is_own_address is False
    if not is_balancer:
        found = "it is the node's own address" if dealt.is_own_address else "one node answers"
        return [ok("balancer", subject, "a way to the node", found)]
    wanted = "a balancer that leads to every node"
    reached = ", ".join(f"{node} {times}×" for node, times in seen.most_common())
    fix = (
        "Add every node to the balancer's backends and deal connections out in turn "
        "(HAProxy: balance roundrobin); or give the URLs of the nodes themselves."
    )
    if nodes and len(seen) < nodes:
        found = f"it led to {len(seen)} of {nodes} nodes in {seen.total()} connections: {reached}"
        return [problem("balancer", subject, wanted, found, fix)]
    if not nodes and len(seen) == 1:
        found = f"it led to {reached}; how many nodes there are is not known"
        return [warning("balancer", subject, wanted, found, fix)]
    found = f"it led to {len(seen)} nodes: {reached}"
    return [ok("balancer", subject, wanted, found)]
