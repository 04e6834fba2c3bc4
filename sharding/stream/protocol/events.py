"""What a connection tells its owner about what has arrived."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from sharding.stream.protocol.answers import Answer
from sharding.stream.protocol.commands import Request
from sharding.stream.protocol.constants import Broker
from sharding.stream.protocol.versions import CommandVersions


class ToSend(NamedTuple):
    """A frame that has to be written to the peer now."""

    frame: bytes


class Opened(NamedTuple):
    """The handshake is done: requests may be sent."""

    node: Broker | None
    """What the node calls itself, which behind a load balancer is not what was dialled."""
    server_version: tuple[int, ...]
    commands: CommandVersions
    frame_max: int
    heartbeat: int
    """Seconds; 0 is none."""


class Answered(NamedTuple):
    correlation_id: int
    request: Request[Any]
    answer: Answer


class Confirmed(NamedTuple):
    publisher_id: int
    publishing_ids: tuple[int, ...]


class PublishRefused(NamedTuple):
    publisher_id: int
    refusals: tuple[tuple[int, int], ...]
    """Pairs of publishing id and code."""


class ChunkArrived(NamedTuple):
    subscription_id: int
    chunk: memoryview


class CreditRefused(NamedTuple):
    """Credit was given to a subscription that the broker does not know (any more)."""

    subscription_id: int
    code: int


class StreamChanged(NamedTuple):
    """The stream is not here any more: deleted, moved or restarting."""

    stream: str
    code: int


class ActivityAsked(NamedTuple):
    """A single active consumer is made active or not. It has to be answered."""

    correlation_id: int
    subscription_id: int
    active: bool


class ClosedByPeer(NamedTuple):
    """The last event; the answer to it goes out first."""

    code: int
    reason: str


Event: TypeAlias = (
    ToSend
    | Opened
    | Answered
    | Confirmed
    | PublishRefused
    | ChunkArrived
    | CreditRefused
    | StreamChanged
    | ActivityAsked
    | ClosedByPeer
)
