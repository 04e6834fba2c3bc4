"""The examination: what is looked at, in which order, and what follows from what."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from sharding.doctor.findings import Finding, judge_versions, ok, problem, warning
from sharding.doctor.nodes import (
    MOST_AT_ONCE,
    ClusterSeen,
    Dealt,
    deal,
    dial_all,
    judge_addresses,
    judge_balancer,
    judge_running,
    judge_streams_enabled,
    look_at,
)
from sharding.doctor.permissions import (
    judge_monitoring,
    judge_rights,
    judge_role,
    try_amqp,
    try_needs,
    try_streams,
)
from sharding.doctor.reach import Place, Protocol, Reached, judge_place, probe, who_answers
from sharding.doctor.roles import TAGGED, Need, Role, needs
from sharding.errors import InvalidInput, WarrenError
from sharding.maps.naming import SHARDS_KEY, check_logical_name, check_name
from sharding.stream.connections.transport import resolved
from sharding.stream.protocol.constants import Broker

logger = logging.getLogger("warren.doctor")


@dataclass(frozen=True)
class Probed:
    """What is known before the checks of the cluster begin."""

    reached: Sequence[Reached]
    cluster: ClusterSeen
    scratch: str
    timeout: float
    role: Role | None = None
    needs: Sequence[Need] = ()
    """What the role needs; everything is looked at where none is given."""

    def working(self, protocol: Protocol) -> list[Reached]:
        return [each for each in self.reached if each.works and each.place.protocol is protocol]

    @property
    def sees_nodes(self) -> bool:
        """Whether who is examined should."""
        return self.role is None or self.role in TAGGED

    def wants(self, protocol: Protocol) -> bool:
        return any(each.place.protocol is protocol for each in self.reached)


def examine(
    places: Sequence[Place],
    *,
    timeout: float = 5.0,
    scratch: str = "warren.doctor",
    role: Role | None = None,
    queues: Sequence[str] = (),
    streams: Sequence[str] = (),
) -> list[Finding]:
    """Every check, in order. `timeout` bounds each question; nothing is left in the broker.

    With a role, rights are looked for on the names that it needs for these queues and streams, and
    on no others.
    """
    if role is None and (queues or streams):
        raise InvalidInput("role", "must say for which role rights on these names are", None)
    wanted = needs(role, queues, streams) if role is not None else ()
    name = f"{check_logical_name(scratch)}.{secrets.token_hex(4)}"
    check_name("scratch", f"{name}.stream")
    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        reached = list(threads.map(lambda place: probe(place, timeout), places))
    apis = [each.place for each in reached if each.works and _is(each, Protocol.MANAGEMENT)]
    cluster = look_at(apis[0].management, timeout) if apis else ClusterSeen()
    probed = Probed(reached, cluster, name, timeout, role, wanted)
    return [finding for check in CHECKS for finding in _careful(check, probed)]


def check_addresses(probed: Probed) -> list[Finding]:
    return [judge_place(each) for each in probed.reached]


def check_versions(probed: Probed) -> list[Finding]:
    said = {str(each.place): each.version for each in probed.reached if each.works}
    by_node = {node.name: node.version for node in probed.cluster.running if node.version}
    return judge_versions(by_node or said)


def check_cluster(probed: Probed) -> list[Finding]:
    apis = probed.working(Protocol.MANAGEMENT)
    if not apis:
        if probed.wants(Protocol.MANAGEMENT) or not probed.sees_nodes:
            return []  # why it does not work is said of its address
        fix = "Give --management http://host:15672, of any node."
        return [warning("nodes", "the cluster", "a look at every node", "no management URL", fix)]
    tag = judge_monitoring(apis[0].place, probed.cluster)
    if not probed.cluster.nodes:
        return tag
    return [
        *tag,
        *judge_running(probed.cluster),
        *judge_streams_enabled(probed.cluster, probed.wants(Protocol.STREAMS)),
    ]


def check_amqp_addresses(probed: Probed) -> list[Finding]:
    if not probed.wants(Protocol.AMQP):
        return []
    whose = {
        address: node.name
        for node in probed.cluster.running
        for address in node.addresses(Protocol.AMQP)
    }
    tried = dial_all(whose, probed.timeout)
    return judge_addresses(Protocol.AMQP, tried, whose)


def check_balancers(probed: Probed) -> list[Finding]:
    count = len(probed.cluster.running)
    findings: list[Finding] = []
    for reached in [*probed.working(Protocol.AMQP), *probed.working(Protocol.STREAMS)]:
        place = reached.place
        own = is_own_address(reached, probed.cluster, probed.timeout)
        if own:
            seen = Counter([reached.node])
        else:
            seen = deal(count, partial(who_answers, place, probed.timeout))
        findings += judge_balancer(Dealt(place, seen, own), count)
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


def check_amqp_permissions(probed: Probed) -> list[Finding]:
    for reached in probed.working(Protocol.AMQP)[:1]:
        if probed.role is not None:
            tried = try_needs(reached.place, probed.needs, probed.scratch, probed.timeout)
            return judge_role(probed.role, tried)
        rights = try_amqp(reached.place, probed.scratch, probed.timeout)
        return judge_rights(rights)
    if probed.role is None:
        return []
    fix = "Give --url amqp://user:password@host, that of the user who shall have the role."
    return [problem("permissions", str(probed.role), "an AMQP URL that works", "none", fix)]


def check_streams(probed: Probed) -> list[Finding]:
    """Rights on streams, and whether the nodes that hold one can be dialled as they say.

    Who has just the rights of a role may make none to try it with.
    """
    if probed.role is not None:
        return []
    for reached in probed.working(Protocol.STREAMS)[:1]:
        count = len(probed.cluster.running)
        rights, advertised = try_streams(reached.place, probed.scratch, count, probed.timeout)
        answered = [Broker(*_split(each.node)) for each in probed.working(Protocol.STREAMS)]
        whose = {address: f"{address}, as advertised" for address in [*advertised, *answered]}
        tried = dial_all(whose, probed.timeout)
        return [
            *judge_rights(rights),
            *judge_addresses(Protocol.STREAMS, tried, whose),
        ]
    return []


def check_exchanges(probed: Probed) -> list[Finding]:
    """What reaches the exchanges of logical queues and no shard."""
    apis, places = probed.working(Protocol.MANAGEMENT), probed.working(Protocol.AMQP)
    if not apis or not places:
        return []
    api, vhost = apis[0].place.management, places[0].place.vhost
    exchanges, queues, bindings = (
        api.get(kind, vhost, timeout=probed.timeout) for kind in ("exchanges", "queues", "bindings")
    )
    return judge_exchanges(exchanges, queues, bindings)


def judge_exchanges(
    exchanges: Iterable[Mapping[str, Any]],
    queues: Iterable[Mapping[str, Any]],
    bindings: Sequence[Mapping[str, Any]],
) -> list[Finding]:
    """Pure: from what the management API says of a virtual host."""
    queues = list(queues)
    nets = {
        each["name"]: (each.get("arguments") or {}).get("alternate-exchange") for each in exchanges
    }
    ours = {
        name: str(net)
        for name, net in nets.items()
        if net == f"{str(name).removeprefix('warren: ')}.unrouted"
    }
    found = [
        problem(
            "unrouted messages",
            name,
            f"the alternate exchange {name}.unrouted, from its declaration on",
            f"{nets[name] or 'none'}: what is published to it without Warren is confirmed and lost",
            "Delete it, and run 'warren shards ensure' for this name.",
        )
        for name in sorted(_without_a_net(nets, ours, bindings))
    ]
    if not ours:
        return found
    kept = {queue["name"]: int(queue.get("messages") or 0) for queue in queues}
    for name, net in sorted(ours.items()):
        if count := kept.get(net, 0):
            fix = (
                "Let all its producers go through Warren. 'warren shards ensure' brings what is "
                "kept to its shards."
            )
            found.append(
                warning(
                    "unrouted messages",
                    name,
                    "every producer knows the shards",
                    f"{count} messages of producers that do not are kept in {net}",
                    fix,
                )
            )
    for binding in bindings:
        name = binding["source"]
        if name in ours and binding["routing_key"] != SHARDS_KEY:
            fix = "Bind it to another exchange, and have producers publish there as well."
            found.append(
                warning(
                    "bindings",
                    name,
                    "nothing but its shards behind the exchange of a logical queue",
                    f"{binding['destination']} is bound to it by {binding['routing_key']!r}: a "
                    "copy there hides it when no shard took a message",
                    fix,
                )
            )
    found += _dead_letters_into(ours.keys() | {f"{name}.shards" for name in ours}, queues)
    return found or [
        ok(
            "unrouted messages",
            "the virtual host",
            "every producer knows the shards",
            f"nothing is kept behind {len(ours)} exchanges of logical queues",
        )
    ]


def _dead_letters_into(ours: Set[str], queues: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """A dead letter keeps the keys that led it to its shard, though the header is gone."""
    for queue in queues:
        target = _setting(queue, "dead-letter-exchange")
        if target in ours and not _setting(queue, "dead-letter-routing-key"):
            yield problem(
                "dead letters",
                str(queue["name"]),
                f"no way back into {target!r} but through Warren",
                "its dead letters go there with the keys of the shard that they came from: to the "
                "old shard of a key that has moved, and where that shard is gone they are lost",
                "Let a consumer of that queue publish them again through Warren.",
            )


def _setting(queue: Mapping[str, Any], name: str) -> Any:
    """Of a queue, by its arguments or by the policies that apply to it."""
    arguments, policy = queue.get("arguments") or {}, queue.get("effective_policy_definition") or {}
    return arguments.get(f"x-{name}") or policy.get(name)


def _without_a_net(
    nets: Mapping[str, str | None],
    ours: Mapping[str, str],
    bindings: Sequence[Mapping[str, Any]],
) -> set[str]:
    """Exchanges that were ours, as their shards show, and that somebody has made again.

    Not those whose name was taken before: their shards are behind `warren: images`.
    """
    sources = {binding["source"] for binding in bindings}
    return {
        name
        for name in nets
        if f"{name}.shards" in sources and not ours.keys() & {name, f"warren: {name}"}
    }


CHECKS: tuple[Callable[[Probed], list[Finding]], ...] = (
    check_addresses,
    check_versions,
    check_cluster,
    check_amqp_addresses,
    check_balancers,
    check_amqp_permissions,
    check_exchanges,
    check_streams,
)


def _careful(check: Callable[[Probed], list[Finding]], probed: Probed) -> list[Finding]:
    """A check that fails hides none of the others."""
    try:
        return check(probed)
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
