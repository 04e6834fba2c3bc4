"""Which node a consumer reads from: replicas before the leader, near ones before others.

Randomness is passed in.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from sharding.stream.protocol.constants import Broker
from sharding.stream.routes.values import StreamRoute


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this process runs, and how strict it is about replicas."""

    own_hosts: frozenset[str] = frozenset()
    """Names and addresses of the own host, as a node on it would advertise itself."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """The zone of each host, the own ones included; a host that is missing is in no zone."""
    require_replica: bool = False
    """Never read from the leader, not even from one that is the only node of its stream."""

    def distance(self, node: Broker) -> int:
        """0 on the own host, 1 in the own zone, 2 elsewhere. Hosts are compared by name."""
        own = {host.casefold() for host in self.own_hosts}
        if node.host.casefold() in own:
            return 0
        zones = {host.casefold(): zone for host, zone in self.zones.items()}
        own_zones = {zones[host] for host in own if host in zones}
        return 1 if zones.get(node.host.casefold()) in own_zones else 2


def consumer_candidates(
    route: StreamRoute, placement: Placement, rng: random.Random
) -> list[Broker]:
    """The nodes to try in turn: replicas, nearest first, equals in random order; then the leader.

    The leader is last even if it is on the own host: it has the producers to serve. With
    `require_replica` it is left out, and the list may be empty.

    >>> route = StreamRoute("s", leader=Broker("a", 1), replicas=(Broker("b", 1), Broker("c", 1)))
    >>> here = Placement(own_hosts=frozenset({"c"}))
    >>> [node.host for node in consumer_candidates(route, here, random.Random())]
    ['c', 'b', 'a']
    """
    replicas = [replica for replica in route.replicas if replica != route.leader]
    rng.shuffle(replicas)
    replicas.sort(key=placement.distance)
    if route.leader is None or placement.require_replica:
        return replicas
    return [*replicas, route.leader]
