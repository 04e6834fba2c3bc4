"""What was seen of a logical queue, a stream or a super stream: pure values, None for not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sharding.metrics.names import Sample


class ShardState(StrEnum):
    UP = "up"
    AWAY = "away"
    """It exists and did not answer in time."""
    MISSING = "missing"


class ViewKind(StrEnum):
    QUEUE = "queue"
    STREAM = "stream"
    SUPER_STREAM = "super stream"


@dataclass(frozen=True, slots=True)
class GroupView:
    """How far one group is in one stream."""

    group: str
    stored: int | None = None
    """The offset of the last message dealt with."""
    lag: int | None = None
    """At most so many messages: some offsets are the broker's own."""
    consumers: int | None = None


@dataclass(frozen=True, slots=True)
class ShardView:
    name: str
    state: ShardState
    leader: str | None = None
    replicas: tuple[str, ...] = ()
    """Without the leader."""
    messages: int | None = None
    consumers: int | None = None
    slots: int | None = None
    first: int | None = None
    last: int | None = None
    groups: tuple[GroupView, ...] = ()
    note: str = ""
    """Why it is away."""


@dataclass(frozen=True, slots=True)
class View:
    name: str
    kind: ViewKind
    shards: tuple[ShardView, ...]
    epoch: int | None = None
    exchange: str | None = None
    unrouted: int | None = None
    """Messages that reached the exchange and no shard, and are kept; None if that is not known."""

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.group for shard in self.shards for each in shard.groups))

    @property
    def by_leader(self) -> Mapping[str, Sequence[ShardView]]:
        """The shards of each node, those without a known one under ""."""
        nodes = sorted(
            {shard.leader or "" for shard in self.shards}, key=lambda name: (not name, name)
        )
        return {
            node: [shard for shard in self.shards if (shard.leader or "") == node] for node in nodes
        }

    def to_json(self) -> dict[str, Any]:
        """For programs; the same keys for every shard of a kind."""
        shards = [
            _queue_json(s) if self.kind is ViewKind.QUEUE else _stream_json(s) for s in self.shards
        ]
        head = {"logical": self.name, "kind": str(self.kind), "epoch": self.epoch}
        return {**head, "exchange": self.exchange, "unrouted": self.unrouted, "shards": shards}


def _common(shard: ShardView) -> dict[str, Any]:
    return {
        "shard": shard.name,
        "node": shard.leader,
        "replicas": list(shard.replicas),
        "state": str(shard.state),
        "note": shard.note,
    }


def _queue_json(shard: ShardView) -> dict[str, Any]:
    figures = {"messages": shard.messages, "consumers": shard.consumers, "slots": shard.slots}
    return _common(shard) | figures


def _stream_json(shard: ShardView) -> dict[str, Any]:
    groups = [
        {"group": g.group, "stored": g.stored, "lag": g.lag, "consumers": g.consumers}
        for g in shard.groups
    ]
    figures = {"first": shard.first, "last": shard.last, "consumers": shard.consumers}
    return _common(shard) | figures | {"groups": groups}


def lag(first: int | None, last: int | None, stored: int | None) -> int | None:
    """How many offsets a group is behind; None while the ends are not known.

    What retention deleted before it was read is not behind any more, but lost.

    >>> lag(0, 99, 49), lag(0, 99, None), lag(80, 99, 49)
    (50, 100, 20)
    """
    if first is None or last is None:
        return None
    return max(0, last - max(first - 1, -1 if stored is None else stored))


def samples_of_view(view: View) -> Iterator[Sample]:
    if view.unrouted is not None:
        yield Sample("warren_unrouted_messages", (("logical", view.name),), view.unrouted)
    for shard in view.shards:
        yield from _of_shard(view, shard)


def _of_shard(view: View, shard: ShardView) -> Iterator[Sample]:
    labels = (("logical", view.name), ("node", shard.leader or ""), ("shard", shard.name))
    yield Sample("warren_shard_up", labels, float(shard.state is ShardState.UP))
    figures = {
        "messages": shard.messages,
        "consumers": shard.consumers,
        "first_offset": shard.first,
        "last_offset": shard.last,
    }
    for name, value in figures.items():
        if value is not None:
            yield Sample(f"warren_shard_{name}", labels, value)
    lags = {each.group: each.lag for each in shard.groups}
    if view.kind is ViewKind.QUEUE:
        lags = {"": shard.messages}  # a queue has one group by nature, and no name for it
    for group, lag in lags.items():
        if lag is not None:
            whose = (("group", group), ("logical", view.name), ("shard", shard.name))
            yield Sample("warren_shard_lag", whose, lag)
