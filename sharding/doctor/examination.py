"""The examination: what is looked at, in which order, and what follows from what."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from sharding.doctor import balancers, nodes, permissions, reaching, trying, versions
from sharding.doctor.cluster_view import ClusterSeen, look_at
from sharding.doctor.findings import Finding, problem, warning
from sharding.doctor.places import Place, Protocol
from sharding.doctor.probing import probe, who_answers
from sharding.doctor.reaching import Reached
from sharding.errors import WarrenError
from sharding.naming import check_logical_name, check_name
from sharding.stream.network.dialing import resolved
from sharding.stream.protocol import Broker

logger = logging.getLogger("warren.doctor")


@dataclass(frozen=True)
class Patient:
    """What is known before the checks of the cluster begin."""

    reached: Sequence[Reached]
    cluster: ClusterSeen
    scratch: str
    timeout: float

    def working(self, protocol: Protocol) -> list[Reached]:
        return [each for each in self.reached if each.works and each.place.protocol is protocol]

    def wants(self, protocol: Protocol) -> bool:
        return any(each.place.protocol is protocol for each in self.reached)


def examine(
    places: Sequence[Place], *, timeout: float = 5.0, scratch: str = "warren.doctor"
) -> list[Finding]:
    """Every check, in order. `timeout` bounds each question; nothing is left in the broker."""
    name = f"{check_logical_name(scratch)}.{secrets.token_hex(4)}"
    check_name("scratch", f"{name}.stream")
    with ThreadPoolExecutor(nodes.MOST_AT_ONCE) as threads:
        reached = list(threads.map(lambda place: probe(place, timeout), places))
    apis = [each.place for each in reached if each.works and _is(each, Protocol.MANAGEMENT)]
    cluster = look_at(apis[0].management, timeout) if apis else ClusterSeen()
    patient = Patient(reached, cluster, name, timeout)
    return [finding for check in CHECKS for finding in _careful(check, patient)]


def check_addresses(patient: Patient) -> list[Finding]:
    return [reaching.judge(each) for each in patient.reached]


def check_versions(patient: Patient) -> list[Finding]:
    said = {str(each.place): each.version for each in patient.reached if each.works}
    by_node = {node.name: node.version for node in patient.cluster.running if node.version}
    return versions.judge(by_node or said)


def check_cluster(patient: Patient) -> list[Finding]:
    apis = patient.working(Protocol.MANAGEMENT)
    if not apis:
        if patient.wants(Protocol.MANAGEMENT):
            return []  # why it does not work is said of its address
        fix = "Give --management http://host:15672, of any node."
        return [warning("nodes", "the cluster", "a look at every node", "no management URL", fix)]
    tag = permissions.judge_monitoring(apis[0].place, patient.cluster)
    if not patient.cluster.nodes:
        return tag
    return [
        *tag,
        *nodes.judge_running(patient.cluster),
        *nodes.judge_streams_enabled(patient.cluster, patient.wants(Protocol.STREAMS)),
    ]


def check_amqp_addresses(patient: Patient) -> list[Finding]:
    if not patient.wants(Protocol.AMQP):
        return []
    whose = {
        address: node.name
        for node in patient.cluster.running
        for address in node.addresses(Protocol.AMQP)
    }
    tried = nodes.dial_all(whose, patient.timeout)
    return nodes.judge_addresses(Protocol.AMQP, tried, whose)


def check_balancers(patient: Patient) -> list[Finding]:
    count = len(patient.cluster.running)
    findings: list[Finding] = []
    for reached in [*patient.working(Protocol.AMQP), *patient.working(Protocol.STREAMS)]:
        place = reached.place
        own = is_own_address(reached, patient.cluster, patient.timeout)
        if own:
            seen = Counter([reached.node])
        else:
            seen = balancers.deal(count, partial(who_answers, place, patient.timeout))
        findings += balancers.judge(balancers.Dealt(place, seen, own), count)
    return findings


def is_own_address(reached: Reached, cluster: ClusterSeen, timeout: float) -> bool | None:
    """Whether a place is the address of a node itself; None if nothing says so or otherwise."""
    place = reached.place
    own = [address for node in cluster.nodes for address in node.addresses(place.protocol)]
    if place.protocol is Protocol.STREAMS and reached.node:
        host, _, port = reached.node.rpartition(":")
        own.append(Broker(host, int(port)))
    if not own:
        return None
    here = _numeric(place.address, timeout)
    return any(here & _numeric(address, timeout) for address in own)


def check_amqp_permissions(patient: Patient) -> list[Finding]:
    for reached in patient.working(Protocol.AMQP)[:1]:
        rights = trying.try_amqp(reached.place, patient.scratch, patient.timeout)
        return permissions.judge(rights)
    return []


def check_streams(patient: Patient) -> list[Finding]:
    """Rights on streams, and whether the nodes that hold one can be dialled as they say."""
    for reached in patient.working(Protocol.STREAMS)[:1]:
        count = len(patient.cluster.running)
        rights, advertised = trying.try_streams(
            reached.place, patient.scratch, count, patient.timeout
        )
        answered = [Broker(*_split(each.node)) for each in patient.working(Protocol.STREAMS)]
        whose = {address: f"{address}, as advertised" for address in [*advertised, *answered]}
        tried = nodes.dial_all(whose, patient.timeout)
        return [
            *permissions.judge(rights),
            *nodes.judge_addresses(Protocol.STREAMS, tried, whose),
        ]
    return []


CHECKS: tuple[Callable[[Patient], list[Finding]], ...] = (
    check_addresses,
    check_versions,
    check_cluster,
    check_amqp_addresses,
    check_balancers,
    check_amqp_permissions,
    check_streams,
)


def _careful(check: Callable[[Patient], list[Finding]], patient: Patient) -> list[Finding]:
    """A check that fails hides none of the others."""
    try:
        return check(patient)
    except Exception as error:
        logger.debug("a check failed", exc_info=True)
        name = check.__name__.removeprefix("check_").replace("_", " ")
        # Its text is not shown: nobody knows what is in it.
        found = f"the check failed: {type(error).__name__}"
        fix = "Try again; if it stays, report it with the log at the level DEBUG."
        return [problem(name, "the doctor", "an answer", found, fix)]


def _is(reached: Reached, protocol: Protocol) -> bool:
    return reached.place.protocol is protocol


def _split(node: str) -> tuple[str, int]:
    host, _, port = node.rpartition(":")
    return host, int(port)


def _numeric(address: Broker, timeout: float) -> set[tuple[str, int]]:
    """Every address of a name, so that two names of one host compare as equal."""
    try:
        found = resolved(address, time.monotonic() + timeout)
    except WarrenError:
        return {(address.host, address.port)}
    return {(str(where[0]), int(where[1])) for _, where in found}
