"""Whether offsets that no chunk holds were messages that retention deleted.

Each replica deletes on its own, so this is asked of the node that the chunks came from: another
one may still have what is lost here.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from sharding.errors import InvalidInput, WarrenError
from sharding.stream.connections.access import Access
from sharding.stream.consumer.inbox import Taken
from sharding.stream.consumer.probe import first_and_last
from sharding.stream.errors import DataLost, StreamNotFound
from sharding.stream.options import OnDataLoss
from sharding.stream.protocol.commands import StreamStats
from sharding.stream.protocol.constants import Key

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient
    from sharding.stream.consumer.subscription import Subscription

logger = logging.getLogger("warren.stream.consumer")

CHECK_TIMEOUT = 30.0
_TRY_AGAIN = 0.2


def without_gap(
    taken: Taken, subscription: Subscription, access: Access, on_data_loss: OnDataLoss
) -> tuple[Taken, DataLost | None]:
    """What was taken, its gap now known to be harmless or to be skipped; else the loss.

    A gap is never passed over unchecked: while the check can't be made, this waits.
    """
    if taken.gap is None:
        return taken, None
    checked = replace(taken, gap=None)
    deadline = access.clock() + CHECK_TIMEOUT
    while True:
        try:
            client = subscription.connection(deadline)
            lost = is_lost(client, taken.lane.stream, taken.gap, deadline - access.clock())
            break
        except (StreamNotFound, InvalidInput):
            raise
        except WarrenError:
            if access.clock() + _TRY_AGAIN > deadline:
                raise
            subscription.pause(_TRY_AGAIN)
    if not lost:
        return checked, None
    loss = DataLost(taken.lane.stream, *taken.gap)
    if on_data_loss == "skip":
        logger.warning("%s", loss)
        return checked, None
    return checked, loss


def tell(loss: DataLost, on_data_loss: OnDataLoss) -> None:
    """Raise it, or where it is allowed, write it into the log."""
    if on_data_loss == "raise":
        raise loss
    logger.warning("%s", loss)


def is_lost(client: StreamClient, stream: str, gap: tuple[int, int], timeout: float) -> bool:
    """Whether retention deleted what was in a gap between offsets.

    Most gaps were never messages: stored offsets and publishers' names take an offset now and
    then. But if the stream now begins after the gap's start, its messages are gone, if there were
    any. 3.10 does not say where a stream begins, only where its first message is; there, a gap of
    one offset before that is taken for one that never was a message.
    """
    start, end = gap
    if client.supports(Key.STREAM_STATS):
        stats = client.call(StreamStats(stream), timeout=timeout).stats
        return stats.get("first_chunk_id", -1) > start
    if end - start == 1:
        return False
    ends = first_and_last(client, stream, timeout)
    return ends is not None and ends.first > start
