"""What is known of where things live: a stream's nodes, a super stream's partitions, or nothing.

Only values, and the view of the cluster that finds them. Nothing here imports `sharding.stream` at
run time: the stream package is built on top of these values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from sharding.stream.protocol import Broker


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
    streams: tuple[str, ...]


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
