"""A topology as another process would see it, or as it was a while ago."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from sharding.cluster.topology import Claims, Topology
from sharding.maps.shard_map import Shard, ShardMap


class View:
    """The topology, but for what a subclass says."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.futures: Any = _Futures(topology.futures)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topology, name)


class _Futures:
    """The topology's futures, some of them put in by hand."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class AsInAnotherProcess(View):
    """One of a herd: it looked when no shard had a consumer, and does not know of the others."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.claims = Claims()
        self._looked = False
        self.futures.consumer_counts = self._consumer_counts

    def _consumer_counts(self, shards: list[str]) -> Future[dict[str, int | None]]:
        if self._looked:
            return self._topology.futures.consumer_counts(shards)
        self._looked = True
        return done(dict.fromkeys(shards, 0))


class WithAnOldMap(View):
    """It knows a map whose shards are gone, until it reads the log again."""

    def __init__(self, topology: Topology, logical: str) -> None:
        super().__init__(topology)
        current = topology.shard_map(logical)
        assert current is not None
        gone = tuple(Shard(f"{each.name}00", each.node) for each in current.shards)
        self._maps = {logical: ShardMap(logical, 1, gone, current.nodes, current.policy)}
        self.futures.refresh = self._refresh

    def shard_map(self, logical: str) -> ShardMap | None:
        return self._maps.get(logical) or self._topology.shard_map(logical)

    def refresh(self) -> None:
        self._maps.clear()

    def _refresh(self) -> Future[None]:
        self.refresh()
        return done(None)


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
