"""Every node of the cluster: is it up, are its streams on, can it be reached from here.

Warren dials nodes by the addresses that they give: listeners for AMQP, advertised names for
streams. One that can't be dialled from here keeps its shards and leaders from us.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from sharding.doctor.cluster_view import ClusterSeen
from sharding.doctor.findings import Finding, ok, problem, warning
from sharding.doctor.places import Protocol
from sharding.errors import WarrenError
from sharding.stream.network.dialing import dial
from sharding.stream.protocol import Broker

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
