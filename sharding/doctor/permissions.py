"""Which of configure, write and read this user has, on a scratch name: what was tried, judged.

Brokers look at the permission before they look whether the thing is there. So each right can be
told apart by asking for something that does not exist: "not found" means that it is granted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sharding.doctor.cluster_view import ClusterSeen
from sharding.doctor.findings import SILENCE, Finding, ok, problem
from sharding.doctor.places import Place, Protocol


class Right(StrEnum):
    CONFIGURE = "configure"
    WRITE = "write"
    READ = "read"


_NEEDED_FOR = {
    Right.CONFIGURE: "declare and delete queues, streams and exchanges",
    Right.WRITE: "publish, and bind queues",
    Right.READ: "consume, and bind to exchanges",
}


@dataclass(frozen=True)
class Rights:
    """What was found by trying, at one place."""

    place: Place
    scratch: str
    """The name that was tried; gone again."""
    refused: Mapping[Right, str] = field(default_factory=dict)
    """The broker's words for each right that is missing."""
    no_stream_queue: str = ""
    """Why no queue of the type stream could be declared over AMQP, if that is not a permission."""
    failure: str = ""
    """Why it could not be tried."""


def judge(rights: Rights) -> list[Finding]:
    place = rights.place
    subject = f"user {place.user!r} at {place}"
    if rights.failure:
        return [problem("permissions", subject, "an answer", rights.failure, SILENCE)]
    findings = [
        problem(
            "permissions",
            subject,
            f"{right}, to {_NEEDED_FOR[right]}",
            f"refused on {rights.scratch!r}: {rights.refused[right]}",
            f"Run 'rabbitmqctl set_permissions -p {place.vhost} {place.user} CONFIGURE WRITE READ' "
            f"with patterns that match your names and warren.*; {right} does not match now.",
        )
        for right in Right
        if right in rights.refused
    ]
    if not findings:
        wanted = "configure, write and read"
        findings.append(ok("permissions", subject, wanted, f"all three on {rights.scratch!r}"))
    if place.protocol is Protocol.AMQP and Right.CONFIGURE not in rights.refused:
        findings.append(_map_log(place, rights.no_stream_queue))
    return findings


def _map_log(place: Place, why_not: str) -> Finding:
    wanted = "queues of the type stream: the map log is one"
    if not why_not:
        return ok("map log", str(place), wanted, "one could be declared")
    fix = (
        "Run 'rabbitmqctl enable_feature_flag stream_queue' (it needs every node up and 3.9 or "
        "later); without streams, give Topology its maps from a file."
    )
    return problem("map log", str(place), wanted, why_not, fix)


def judge_monitoring(place: Place, cluster: ClusterSeen) -> list[Finding]:
    """The management API shows nodes to users with the tag monitoring only."""
    wanted = "the tag monitoring, to see the nodes"
    subject = f"user {place.user!r} at {place}"
    if cluster.problem:
        tag = f"Run 'rabbitmqctl set_user_tags {place.user} monitoring' on a node."
        fix = tag if cluster.in_time else SILENCE
        return [problem("permissions", subject, wanted, cluster.problem, fix)]
    return [ok("permissions", subject, wanted, f"{len(cluster.nodes)} nodes are shown")]
