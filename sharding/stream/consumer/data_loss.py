"""Whether offsets that no chunk holds were messages: deleted by retention, or still on their way.

Each replica deletes on its own, so this is asked of the node that the chunks came from: another
one may still have what is lost here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from sharding.errors import InvalidInput, Unreachable, WarrenError
from sharding.stream.connections.access import Access
from sharding.stream.consumer.inbox import Gap, Taken
from sharding.stream.consumer.probe import first_and_last
from sharding.stream.errors import DataLost, StreamNotFound
from sharding.stream.messages.chunk import parse_header
from sharding.stream.options import OnDataLoss
from sharding.stream.protocol.commands import StreamStats
from sharding.stream.protocol.constants import Key

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient
    from sharding.stream.consumer.subscription import Subscription

logger = logging.getLogger("warren.stream.consumer")

CHECK_TIMEOUT = 30.0
_TRY_AGAIN = 0.2

T = TypeVar("T")


def is_stray(taken: Taken, subscription: Subscription, access: Access) -> bool:
    """Whether chunks that are still stored belong before what was taken: they are on their way,
    and what was taken is to be put back (`Inbox`)."""
    if not taken.may_be_stray:
        return False
    first = parse_header(taken.chunks[0]).first_offset

    def is_early(client: StreamClient, timeout: float) -> bool:
        following = subscription.first_chunk(client, taken.place, timeout)
        if following is None and taken.place is not None:  # though there is the one taken
            raise Unreachable(f"{client.node} does not deliver {subscription.stream!r} now")
        return following is not None and following.first_offset < first

    return bool(_ask(is_early, taken, subscription, access))


def without_gap(
    taken: Taken, subscription: Subscription, access: Access, on_data_loss: OnDataLoss
) -> tuple[Taken, DataLost | None]:
    """What was taken, its gaps now known to be harmless or to be skipped; else the first loss, and
    what was taken with the gaps that are left to be told.

    A gap is never passed over unchecked: while the check can't be made, this waits.
    """
    if not taken.gaps:
        return taken, None
    stream = taken.lane.stream

    def lost_now(client: StreamClient, left: float) -> tuple[Gap, ...]:
        lost = lost_gaps(client, stream, taken.gaps, left)
        if subscription.has_delivered(taken, client):
            return lost
        return tuple(
            gap for gap in taken.gaps if gap in lost or _holds(client, subscription, gap, left)
        )

    lost = _ask(lost_now, taken, subscription, access) or ()
    losses = [DataLost(stream, *gap) for gap in lost]
    if losses and on_data_loss == "raise":
        return replace(taken, gaps=lost[1:]), losses[0]
    for loss in losses:
        logger.warning("%s", loss)
    return replace(taken, gaps=()), None


def _holds(client: StreamClient, subscription: Subscription, gap: Gap, timeout: float) -> bool:
    """Whether a node has messages in a gap that was found at another one, which is gone: it had
    deleted what this one may still have."""
    found = subscription.first_chunk(client, gap[0], timeout)
    if found is None:
        stream = subscription.stream
        raise Unreachable(f"{client.node} does not deliver offset {gap[0]} of {stream!r} yet")
    return found.first_offset < gap[1]


def _ask(
    question: Callable[[StreamClient, float], T],
    taken: Taken,
    subscription: Subscription,
    access: Access,
) -> T | None:
    """What the node says, which is asked until it answers; `question` gets what time is left.

    None once what was taken is nobody's to see: a single active consumer without its turn, and
    maybe without a connection for long, must not wait for an answer to a question of the past.
    """
    deadline = access.clock() + CHECK_TIMEOUT
    while not taken.void:
        try:
            client = subscription.connection(deadline)
            return question(client, deadline - access.clock())
        except (StreamNotFound, InvalidInput):
            raise
        except WarrenError:
            if taken.void:
                break
            if access.clock() + _TRY_AGAIN > deadline:
                raise
            subscription.pause(_TRY_AGAIN)
    return None


def tell(loss: DataLost, on_data_loss: OnDataLoss) -> None:
    """Raise it, or where it is allowed, write it into the log."""
    if on_data_loss == "raise":
        raise loss
    logger.warning("%s", loss)


def is_lost(client: StreamClient, stream: str, gap: Gap, timeout: float) -> bool:
    """Whether retention deleted what was in a gap between offsets."""
    return bool(lost_gaps(client, stream, (gap,), timeout))


def lost_gaps(
    client: StreamClient, stream: str, gaps: tuple[Gap, ...], timeout: float
) -> tuple[Gap, ...]:
    """The gaps between offsets of which retention deleted what was in them.

    Most gaps were never messages: stored offsets and publishers' names take an offset now and
    then. But if the stream now begins after the gap's start, its messages are gone, if there were
    any. 3.10 does not say where a stream begins, only where its first message is; there, a gap of
    one offset before that is taken for one that never was a message.
    """
    if client.supports(Key.STREAM_STATS):
        stats = client.call(StreamStats(stream), timeout=timeout).stats
        begins = stats.get("first_chunk_id", -1)
        return tuple(gap for gap in gaps if begins > gap[0])
    doubtful = tuple((start, end) for start, end in gaps if end - start > 1)
    ends = first_and_last(client, stream, timeout) if doubtful else None
    return () if ends is None else tuple(gap for gap in doubtful if ends.first > gap[0])
