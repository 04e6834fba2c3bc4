"""A range of one stream, read exactly: every row that is stored in it, then the end.

Offsets are no promise that there is a message, so the range may end where none will ever come.
Mostly a message at or after the end of the range comes, and that is all. It is asked about only
when nothing comes for a moment: if the node that is read from has such a message, it will come. If
not, it may be behind the others, or the range may go past the stream; the leader knows which, and
its last message becomes the end.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from sharding.errors import InvalidInput, Unreachable, WarrenError, is_retryable
from sharding.stream.consuming.consumer_options import ConsumerOptions, OnDataLoss
from sharding.stream.consuming.data_loss import without_gap
from sharding.stream.consuming.filtered_range import read_filtered
from sharding.stream.consuming.inbox import Inbox, Lane
from sharding.stream.consuming.probe import first_and_last, leader_ends
from sharding.stream.consuming.subscription import Subscription
from sharding.stream.errors import NoAnswerInTime
from sharding.stream.formats.columns import Columns
from sharding.stream.network.access import Access
from sharding.stream.protocol import Broker

if TYPE_CHECKING:
    import pyarrow as pa

_SILENCE = 0.05
"""How long nothing comes, in seconds, before the end of the range is asked about. Where chunks are
stored, they follow each other within a few milliseconds."""
_TRY_AGAIN = 0.2
_CLOSE_TIMEOUT = 5.0


class RangeReading:
    """Iterates over the record batches of a range."""

    def __init__(self, found: Generator[tuple[pa.RecordBatch, Broker | None]]) -> None:
        self._found = found
        self.node: Broker | None = None
        """Where the last batch came from; None before the first."""

    def __iter__(self) -> RangeReading:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch, self.node = next(self._found)
        return batch

    def close(self) -> None:
        """Leave the broker; needed only if the range is not read to its end."""
        self._found.close()


def read_range(
    access: Access,
    stream: str,
    first: int,
    end: int,
    *,
    columns: Columns = Columns(),
    filter_values: tuple[str, ...] = (),
    match_unfiltered: bool = False,
    check_crc: bool = True,
    on_data_loss: OnDataLoss = "raise",
    require_replica: bool = False,
    credits: int = ConsumerOptions.credits,  # noqa: A002
    timeout: float = 60,
) -> RangeReading:
    """Record batches with exactly the messages at offsets from `first` up to `end`, without it.

    What is not stored yet when the reading begins is not waited for. Messages that retention
    deleted raise `DataLost`, unless that may be skipped. If nothing comes for `timeout` seconds
    though it is stored, `Unreachable` is raised; reading may begin again at any offset.

    With `filter_values` the broker leaves out chunks, as it does for consumers.
    """
    if not 0 <= first <= end:
        raise InvalidInput("range", "must have 0 ≤ first ≤ end", (first, end))
    options = ConsumerOptions(
        offset=first,
        filter_values=filter_values,
        match_unfiltered=match_unfiltered,
        columns=columns,
        credits=credits,
        check_crc=check_crc,
        on_data_loss=on_data_loss,
        subscribe_timeout=timeout,
        recovery_timeout=timeout,
    )
    strict = require_replica or access.placement.require_replica
    access = replace(access, placement=replace(access.placement, require_replica=strict))
    read = read_filtered if filter_values else _read_all
    return RangeReading(read(access, stream, first, end, options))


def _read_all(
    access: Access, stream: str, first: int, end: int, options: ConsumerOptions
) -> Generator[tuple[pa.RecordBatch, Broker | None]]:
    from sharding.stream.formats.arrow import BatchReader  # here, for those without pyarrow

    if first == end:
        return
    timeout = options.recovery_timeout
    inbox = Inbox(2 * options.credits, clock=access.clock)
    lane = Lane(stream, first)
    subscription = Subscription(lane, inbox, access, options)
    reader = BatchReader(stream, options.columns, access.limits, check_crc=False)
    source, node = None, None
    try:
        subscription.open(access.clock() + timeout)
        is_end_known, give_up = False, access.clock() + timeout
        while lane.position is not None and lane.position < end:
            now = access.clock()
            taken = inbox.take(give_up if is_end_known else min(give_up, now + _SILENCE))
            if taken is None:
                if access.clock() >= give_up:
                    raise Unreachable(
                        f"no message of {stream!r} came for {timeout:g} s, "
                        f"at offset {lane.position}"
                    )
                known = _end_of_rows(access, subscription, end, give_up - access.clock())
                if known is not None:
                    end, is_end_known = known, True
                continue
            if taken.source is not source:
                source, node = taken.source, subscription.node or node
            subscription.give_back(taken)
            taken, loss = without_gap(taken, subscription, access, options.on_data_loss)
            if loss is not None:
                raise loss
            batch = reader.batch(taken.chunks, taken.first, end)
            if batch is not None:
                yield batch, node
            give_up = access.clock() + timeout  # after the application had its time
    finally:
        inbox.close()
        subscription.close(access.clock() + _CLOSE_TIMEOUT)


def _end_of_rows(
    access: Access, subscription: Subscription, end: int, timeout: float
) -> int | None:
    """`end`, or the offset after the stream's last message if that is earlier.

    None if nobody can say so now. Then there may be no connection: the subscription finds a new
    one, or fails the inbox.
    """
    stream = subscription.stream
    deadline = access.clock() + timeout
    try:
        client = subscription.connection(access.clock())
        ends = first_and_last(client, stream, timeout, access.clock)
        if ends is None or ends.last < end - 1:
            ends = leader_ends(access, stream, deadline - access.clock())
    except WarrenError as error:
        if not (is_retryable(error) or isinstance(error, NoAnswerInTime)):
            raise
        subscription.pause(_TRY_AGAIN)
        return None
    return min(end, ends.last + 1) if ends is not None else 0
