"""What a logical queue or a stream looks like now: asks the cluster, each question in its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sharding.amqp.session import Declared
from sharding.cluster.management import ClusterView, NoAnswer
from sharding.cluster.topology import Topology
from sharding.errors import WarrenError
from sharding.inspection.views import (
    GroupView,
    ShardState,
    ShardView,
    View,
    ViewKind,
    lag,
    samples_of_view,
)
from sharding.maps.naming import unrouted
from sharding.maps.shard_map import Shard, ShardMap
from sharding.metrics.names import Sample
from sharding.stream import StreamEnvironment
from sharding.stream.consumer.probe import PROBE_NAME, Ends
from sharding.stream.errors import StreamNotFound

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
    seen = topology.look_at([*names, unrouted(shard_map.logical)])
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
    kept = seen.get(unrouted(shard_map.logical))
    return View(
        shard_map.logical,
        ViewKind.QUEUE,
        shards,
        shard_map.epoch,
        shard_map.exchange,
        kept.messages if kept else None,
    )


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


@dataclass(frozen=True, slots=True)
class Listed:
    """A consumer that the management API lists."""

    stream: str
    group: str


def stream_view(
    environment: StreamEnvironment,
    name: str,
    groups: Sequence[str] = (),
    api: ClusterView = _NO_API,
    vhost: str = "/",
    timeout: float = 3.0,
) -> View | None:
    """None if there is no such stream. `groups` are names under which offsets are stored.

    With the management API the groups that it lists are shown as well, and consumers counted. How
    long the questions over the stream port may take is an option of the environment.
    """
    found = _streams_of(environment, name)
    if found is None:
        return None
    kind, streams = found
    listed = _listed(api, vhost, timeout) if api else None
    named = [each.group for each in listed or () if each.stream in streams and each.group]
    chosen = tuple(dict.fromkeys([*groups, *sorted(named)]))
    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        shards = threads.map(lambda stream: _shard(environment, stream, chosen, listed), streams)
        return View(name, kind, tuple(shards))


def _streams_of(
    environment: StreamEnvironment, name: str
) -> tuple[ViewKind, tuple[str, ...]] | None:
    try:
        return ViewKind.SUPER_STREAM, environment.partitions(name)
    except StreamNotFound:
        pass
    try:
        environment.route(name)
    except StreamNotFound:
        return None
    return ViewKind.STREAM, (name,)


def _shard(
    environment: StreamEnvironment,
    stream: str,
    groups: Sequence[str],
    listed: Sequence[Listed] | None,
) -> ShardView:
    leader: str | None = None
    replicas: tuple[str, ...] = ()
    try:
        route = environment.route(stream)
        leader = None if route.leader is None else str(route.leader)
        replicas = tuple(map(str, route.replicas))
        ends = environment.offsets(stream)
        stored = {group: environment.stored_offset(group, stream) for group in groups}
    except StreamNotFound as error:
        return ShardView(stream, ShardState.MISSING, note=str(error))
    except WarrenError as error:
        return ShardView(stream, ShardState.AWAY, leader, replicas, note=str(error))
    return shard_view(stream, leader, replicas, ends, stored, listed)


def shard_view(
    stream: str,
    leader: str | None,
    replicas: tuple[str, ...],
    ends: Ends | None,
    stored: Mapping[str, int | None],
    listed: Sequence[Listed] | None,
) -> ShardView:
    """Pure: one stream from what was answered about it."""
    here = None if listed is None else [each.group for each in listed if each.stream == stream]
    first, last = (ends.first, ends.last) if ends else (None, None)
    return ShardView(
        stream,
        ShardState.UP,
        leader,
        replicas,
        consumers=None if here is None else len(here),
        first=first,
        last=last,
        groups=tuple(
            GroupView(
                group,
                offset,
                lag(first, last, offset) if ends else 0,
                None if here is None else here.count(group),
            )
            for group, offset in stored.items()
        ),
    )


def _listed(api: ClusterView, vhost: str, timeout: float) -> list[Listed] | None:
    """None where the API has no list: it needs the plugin rabbitmq_stream_management."""
    try:
        return listed_from(api.ask("GET", "stream", "consumers", vhost, timeout=timeout))
    except NoAnswer:
        return None


def listed_from(consumers: Iterable[Mapping[str, Any]]) -> list[Listed]:
    """Those of applications: a look at the ends of a stream, ours too, is none."""
    listed = (
        Listed(str(each["queue"]["name"]), str((each.get("properties") or {}).get("name", "")))
        for each in consumers
    )
    return [each for each in listed if each.group != PROBE_NAME]


class Watched:
    """A source for `sharding.metrics` that looks again when what it saw is older than `max_age`.

    `look` is `queue_view` or `stream_view` of a name:

        Watched(lambda: stream_view(environment, "invoices", ["audit"]))
    """

    def __init__(
        self,
        look: Callable[[], View | None],
        max_age: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._max_age = max_age
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: tuple[float, View | None] | None = None

    def samples(self) -> Iterator[Sample]:
        with self._lock:  # two scrapes at once ask once
            now = self._clock()
            if self._seen is None or now - self._seen[0] > self._max_age:
                self._seen = now, self._look()
            view = self._seen[1]
        return iter(()) if view is None else samples_of_view(view)
