"""What a logical queue looks like now: asks the control plane, and the management API if given."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sharding.amqp import Declared
from sharding.management import NoAnswer
from sharding.members import ClusterView
from sharding.shard_map import Shard, ShardMap
from sharding.sight.views import ShardState, ShardView, View, ViewKind
from sharding.topology import Topology

MOST_AT_ONCE = 16
_NO_API = ClusterView(())


def queue_view(
    topology: Topology, logical: str, api: ClusterView = _NO_API, timeout: float = 3.0
) -> View | None:
    """None if the name is not sharded. No question waits longer than its deadline."""
    shard_map = topology.shard_map(logical)
    if shard_map is None:
        return None
    names = [shard.name for shard in shard_map.shards]
    seen = topology.look_at(names)
    members = _members(api, topology.vhost, names, timeout) if api else {}
    return view_of(shard_map, seen, members)


def view_of(
    shard_map: ShardMap,
    seen: dict[str, Declared | None],
    members: dict[str, tuple[str | None, tuple[str, ...]]],
) -> View:
    """Pure: the map, what the queues answered, and who leads and holds those with replicas."""
    owned = [shard_map.table.owners.count(index) for index in range(len(shard_map.shards))]

    def shard_view(shard: Shard, slots: int) -> ShardView:
        counts = seen.get(shard.name)
        leader, replicas = members.get(shard.name, (None, ()))
        state = ShardState.UP if counts else ShardState.MISSING
        if shard.name in seen and counts is None:
            state = ShardState.AWAY
        return ShardView(
            shard.name,
            state,
            leader or shard.node,
            replicas,
            messages=counts.messages if counts else None,
            consumers=counts.consumers if counts else None,
            slots=slots,
            note="its node did not answer in time" if state is ShardState.AWAY else "",
        )

    shards = tuple(map(shard_view, shard_map.shards, owned))
    return View(shard_map.logical, ViewKind.QUEUE, shards, shard_map.epoch, shard_map.exchange)


def _members(
    api: ClusterView, vhost: str, queues: Iterable[str], timeout: float
) -> dict[str, tuple[str | None, tuple[str, ...]]]:
    """Leader and replicas of each queue that has replicas, where the management API answers."""

    def ask(queue: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = api.ask("GET", "queues", vhost, queue, timeout=timeout)
        except NoAnswer:
            return None
        return found

    names = list(queues)
    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        answers = dict(zip(names, threads.map(ask, names), strict=True))
    return {
        queue: (found.get("leader"), _others(found))
        for queue, found in answers.items()
        if found and found.get("members")
    }


def _others(found: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(member) for member in found["members"] if member != found.get("leader"))
