"""The first and the last offset of a stream.

StreamStats can't answer this: it counts chunks that are never delivered, and 3.10 does not have
it. So two subscriptions with one credit each ask for the first and the last chunk. Whether there
is any is known without a time-out: a broker sends the chunks it has before it answers the next
request on the connection, so a stream is empty if the answer to Metadata comes first. If only the
first chunk came, the last one is not committed yet, and will come.

The broker lists these subscriptions while they last. They have a name, so that whoever counts who
reads from where can leave them out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sharding.errors import WarrenError
from sharding.stream.connections.access import Access
from sharding.stream.errors import NoAnswerInTime, ProtocolError
from sharding.stream.messages.chunk import ChunkHeader, parse_header
from sharding.stream.protocol.commands import Metadata, StreamStats, Subscribe, Unsubscribe
from sharding.stream.protocol.constants import FIRST, LAST, NEXT, Key, OffsetSpec

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient

PROBE_NAME = "warren.probe"
_TRY_AGAIN = 0.05


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a stream that is not empty begins and ends."""

    first: int
    last: int
    last_chunk: int
    """The first offset of the last chunk."""
    first_time: int = field(default=0, compare=False)
    last_time: int = field(default=0, compare=False)
    """When the broker stored the first and the last chunk, in milliseconds since 1970. No part of
    where a stream begins and ends; they tell it from another one of the same name."""


def first_and_last(
    client: StreamClient,
    stream: str,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
) -> Ends | None:
    """The first and last offsets of messages that `client`'s node has; None if it has none.

    The node must hold a member of the stream. Other members may be ahead of it; none is ahead of
    the leader.

    A node that has just become the leader, or come back, does not know yet what of its log is
    committed, and delivers none of it: that is waited for. 3.10 can't be asked about it.
    """
    deadline = clock() + timeout
    found = _first_and_last_now(client, stream, deadline, clock)
    while found is None:
        # Asked before the next look: the node may learn it at any moment.
        is_known = _knows_what_is_committed(client, stream, max(0.0, deadline - clock()))
        found = _first_and_last_now(client, stream, deadline, clock)
        if is_known:
            break
        if clock() + _TRY_AGAIN > deadline:
            raise NoAnswerInTime(
                f"{client.node} did not learn in time what of {stream!r} is stored"
            )
        time.sleep(_TRY_AGAIN)
    return found


def _knows_what_is_committed(client: StreamClient, stream: str, timeout: float) -> bool:
    if not client.supports(Key.STREAM_STATS):
        return True
    stats = client.call(StreamStats(stream), timeout=timeout).stats
    return stats.get("committed_chunk_id", -1) >= stats.get("last_chunk_id", -1)


def _first_and_last_now(
    client: StreamClient, stream: str, deadline: float, clock: Callable[[], float]
) -> Ends | None:
    arrival = threading.Condition()
    ends = [_FirstChunk(arrival), _FirstChunk(arrival)]
    attached: list[int] = []
    try:
        for end, spec in zip(ends, (FIRST, LAST), strict=True):
            attached.append(client.attach_subscriber(end, stream))
            named = {"name": PROBE_NAME}
            subscribe = Subscribe(attached[-1], stream, spec, credit=1, properties=named)
            client.call(subscribe, timeout=max(0.0, deadline - clock()))
        client.call(Metadata((stream,)), timeout=max(0.0, deadline - clock()))
        with arrival:
            if not any(end.settled for end in ends):
                return None
            if not arrival.wait_for(
                lambda: all(end.settled for end in ends), max(0.0, deadline - clock())
            ):
                raise NoAnswerInTime(f"the last chunk of {stream!r} was not committed in time")
        first, last = (end.header() for end in ends)
    finally:
        for number, end in zip(attached, ends, strict=False):
            if end.lost is None:
                with suppress(WarrenError):
                    client.call(Unsubscribe(number), timeout=max(0.1, deadline - clock()))
                client.detach_subscriber(number)
    return Ends(
        first.first_offset,
        last.end_offset - 1,
        last.first_offset,
        first.timestamp_ms,
        last.timestamp_ms,
    )


def chunk_at(
    client: StreamClient,
    stream: str,
    place: int | OffsetSpec,
    timeout: float,
    filters: Mapping[str, str] | None = None,
) -> ChunkHeader | None:
    """The header of the first chunk that a subscription at `place` gets; None if there is none.

    For an offset that is the first chunk of messages that ends after it. `client`'s node must hold
    a member of the stream, which may be behind others. With `filters`, which are properties of
    Subscribe, of the chunks that these let through.
    """
    end = _FirstChunk(threading.Condition())
    number = client.attach_subscriber(end, stream)
    spec = OffsetSpec.at(place) if isinstance(place, int) else place
    named = {"name": PROBE_NAME, **(filters or {})}
    leave = Unsubscribe(number)
    try:
        client.call(Subscribe(number, stream, spec, credit=1, properties=named), timeout=timeout)
        # Also the request before whose answer the chunk comes, if there is one: Metadata is not
        # answered for a minute while another node hangs.
        client.call(leave, timeout=max(0.1, timeout))
    except WarrenError:
        if end.lost is None:
            with suppress(WarrenError):  # it may have been heard all the same
                client.call(leave, timeout=max(0.1, timeout))
        raise
    finally:
        if end.lost is None:
            client.detach_subscriber(number)
    found = end.header() if end.settled else None
    if found is not None and isinstance(place, int) and found.end_offset <= place:
        return None  # a node that is behind may begin with the last one it has
    return found


def leader_ends(access: Access, stream: str, timeout: float) -> Ends | None:
    """The first and last offsets of messages that are stored for good; None if there are none."""
    deadline = access.clock() + timeout
    with at_leader(access, stream, timeout) as client:
        left = max(0.0, deadline - access.clock())
        return first_and_last(client, stream, left, access.clock)


@contextmanager
def at_leader(access: Access, stream: str, timeout: float) -> Iterator[StreamClient]:
    """A connection to the leader, with a place on it that is kept and never subscribes."""
    deadline = access.clock() + timeout
    leader = access.routes.leader(stream, timeout)
    place = _FirstChunk(threading.Condition())
    client, number = access.pool.subscriber([leader], stream, place, deadline)
    try:
        yield client
    finally:
        if place.lost is None:
            client.detach_subscriber(number)
        access.pool.release(client)


class _FirstChunk:
    """Keeps the header of the first chunk that a subscription gets."""

    def __init__(self, arrival: threading.Condition) -> None:
        self._arrival = arrival
        self._found: ChunkHeader | ProtocolError | None = None
        self.lost: Exception | None = None

    @property
    def settled(self) -> bool:
        return self._found is not None or self.lost is not None

    def header(self) -> ChunkHeader:
        if isinstance(self._found, ChunkHeader):
            return self._found
        failure = self._found or self.lost
        assert failure is not None
        raise failure

    def on_chunk(self, chunk: memoryview) -> None:
        try:
            found: ChunkHeader | ProtocolError = parse_header(chunk)
        except ProtocolError as error:
            found = error
        with self._arrival:
            self._found = self._found or found
            self._arrival.notify_all()

    def on_activity(self, active: bool) -> OffsetSpec:  # noqa: ARG002
        return NEXT

    def on_lost(self, reason: Exception) -> None:
        with self._arrival:
            self.lost = reason
            self._arrival.notify_all()
