"""What is known of where things live: a stream's nodes, a super stream's partitions, or nothing.

Only values: the view of the cluster that finds them, and what changed between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from sharding.stream.protocol.constants import Broker


class Kind(Enum):
    """What a name is asked for as."""

    STREAM = "stream"
    SUPER_STREAM = "super stream"


class Target(NamedTuple):
    """A name that a route is asked for."""

    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class StreamRoute:
    """The nodes that hold a stream."""

    stream: str
    leader: Broker | None
    """None while an election is under way, or while its nodes are down."""
    replicas: tuple[Broker, ...] = ()
    """Without the leader. A new stream's are listed some moments after its leader."""


@dataclass(frozen=True, slots=True)
class Partitions:
    """The streams of a super stream, in the order that keys are routed by."""

    super_stream: str
    bound: tuple[str, ...]
    """The stream of each binding, as the broker lists them: a stream as often as it is bound. All
    stream clients let a key's hash choose from this list (Java: `HashRoutingStrategy`)."""

    @property
    def streams(self) -> tuple[str, ...]:
        """The partitions: each stream once."""
        return tuple(dict.fromkeys(self.bound))


@dataclass(frozen=True, slots=True)
class Missing:
    """The cluster has no such name, or does not show it to this user."""

    name: str
    code: int
    """The broker's word for it."""


Finding = StreamRoute | Partitions | Missing


def leader_of(finding: Finding | None) -> Broker | None:
    return finding.leader if isinstance(finding, StreamRoute) else None


class RouteSource(Protocol):
    """The cluster, as the route cache asks it."""

    on_update: Callable[[str], None] | None
    """Called with the name of an armed stream when it changed. Must return at once."""
    on_disconnect: Callable[[], None] | None
    """Called when nothing is armed any more."""

    def find_streams(self, names: Sequence[str], timeout: float) -> Mapping[str, Finding]:
        """What the cluster says of all these streams, asked in one query."""

    def find_partitions(self, super_stream: str, timeout: float) -> Finding: ...

    def arm(self, stream: str, timeout: float) -> bool:
        """Ask to be told, once, when the stream changes; False if it has changed already."""

    def not_found(self, missing: Missing) -> Exception:
        """The error to raise for a name that is missing."""

    def no_leader(self, stream: str, waited: float) -> Exception:
        """The error to raise when a stream got no leader in time."""


MOST_TOLD = 5
"""A node that led a thousand streams and ended must not write a thousand lines."""

Change = tuple[Finding, Finding]


def told(changes: Sequence[Change]) -> list[str]:
    """A sentence for each change; where there are many, for a few, and how many more.

    Changes of leaders come first: publishing waits for them.
    """
    first = sorted(changes, key=_keeps_its_leader)[:MOST_TOLD]
    sentences = [route_difference(before, after) for before, after in first]
    more = len(changes) - len(sentences)
    return [*sentences, f"{more} more routes changed at the same time"] if more else sentences


def _keeps_its_leader(change: Change) -> bool:
    before, after = change
    if isinstance(before, StreamRoute) and isinstance(after, StreamRoute):
        return before.leader == after.leader
    return False


def route_difference(before: Finding, after: Finding) -> str:
    if isinstance(after, Missing):
        return f"{after.name!r} is gone"
    if isinstance(after, Partitions):
        return f"{after.super_stream!r} {_partitions(before, after)}"
    return f"{after.stream!r} {_route(before, after)}"


def _partitions(before: Finding, after: Partitions) -> str:
    if not isinstance(before, Partitions):
        return f"exists now, of {len(after.streams)} partitions"
    joined = [name for name in after.streams if name not in before.streams]
    left = [name for name in before.streams if name not in after.streams]
    parts = [f"has lost {', '.join(map(repr, left))}"] if left else []
    parts += [f"has {', '.join(map(repr, joined))} as well"] if joined else []
    return ", ".join(parts) or "has its partitions in another order"


def _route(before: Finding, after: StreamRoute) -> str:
    leader = "has no leader now" if after.leader is None else f"is led by {after.leader}"
    if not isinstance(before, StreamRoute):
        return f"exists now, and {leader}"
    parts: list[str] = []
    if before.leader != after.leader:
        parts.append(f"{leader} (before: {before.leader or 'none'})")
    others = {before.leader, after.leader}
    joined = sorted(str(each) for each in after.replicas if each not in before.replicas)
    left = sorted(str(each) for each in {*before.replicas} - {*after.replicas} - others)
    if joined and before.leader == after.leader:
        parts.append(f"has a replica on {', '.join(joined)} as well")
    if left:
        parts.append(f"has no replica on {', '.join(left)} any more")
    return ", ".join(parts) or "has its replicas in another order"
