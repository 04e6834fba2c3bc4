"""What it costs to ask for shards that are away, until they are back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from sharding import Topology
from sharding.amqp.session import Channel, Session
from tests.cluster import Cluster, wait_until
from tests.support import patient
from tests.support.sharded import make_sharded, raw_channel, topology_of

pytestmark = pytest.mark.cluster


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many connections were opened, and how often each queue was asked for."""
    counts: Counter[str] = Counter()
    open_session, declare = Session.open, Channel.declare

    async def opened(*arguments: Any, **options: Any) -> Session:
        counts["connections"] += 1
        return await open_session(*arguments, **options)

    async def declared(channel: Channel, queue: str, **options: Any) -> Any:
        counts[queue] += 1
        return await declare(channel, queue, **options)

    monkeypatch.setattr(Session, "open", opened)
    monkeypatch.setattr(Channel, "declare", declared)
    return counts


def test_shards_of_one_node_that_are_away_are_asked_for_over_one_connection(
    cluster: Cluster, counted: Counter[str]
) -> None:
    """A connection for each question, once a second for each shard, was what every process took."""
    options = replace(patient.TOPOLOGY, probe_interval=0.05)
    with topology_of(cluster, options=options) as topology:
        shard_map = make_sharded(topology, 4)
        gone = [each.name for each in shard_map.shards_on(cluster.nodes[1].name)]
        counted.clear()
        with raw_channel(cluster.nodes[1]) as channel:
            for queue in gone:
                channel.queue_delete(queue)
        topology.suspect(gone[0])
        wait_until(lambda: all(counted[queue] >= 4 for queue in gone))
        assert counted["connections"] == 1
        assert are_away(topology, gone)
        topology.ensure(shard_map.logical)
        wait_until(lambda: not are_away(topology, gone))
        wait_until(lambda: not connections_left(topology))


def are_away(topology: Topology, shards: list[str]) -> bool:
    return any(topology.unavailable(each) for each in shards)


def connections_left(topology: Topology) -> int:
    return len(topology._plane.away._lines)
