"""What a stream or a super stream looks like now: asks the cluster, each question in its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sharding.errors import WarrenError
from sharding.management import NoAnswer
from sharding.members import ClusterView
from sharding.sight.views import GroupView, ShardState, ShardView, View, ViewKind, lag
from sharding.stream import StreamEnvironment
from sharding.stream.consuming.probe import Ends
from sharding.stream.errors import StreamNotFound

MOST_AT_ONCE = 16
_NO_API = ClusterView(())


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
    return [
        Listed(str(each["queue"]["name"]), str((each.get("properties") or {}).get("name", "")))
        for each in consumers
    ]
