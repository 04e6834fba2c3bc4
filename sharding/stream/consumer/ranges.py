"""A range of one stream, read exactly: every row that is stored in it, then the end.

Offsets are no promise that there is a message, so the range may end where none will ever come.
Mostly a message at or after the end of the range comes, and that is all. It is asked about only
when nothing comes for a moment: if the node that is read from has such a message, it will come. If
not, it may be behind the others, or the range may go past the stream; the leader knows which, and
its last message becomes the end.

Who has seen more of the stream before says so with `known_end`: no answer that is less ends the
range. A leader of 3.10 that was just elected calls its stream empty, and can't be asked whether it
knows (`probe`), so there an empty stream is asked again for a while.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from sharding.errors import InvalidInput, Unreachable, WarrenError, is_retryable
from sharding.stream.connections.access import Access
from sharding.stream.consumer.consumer import Consumer
from sharding.stream.consumer.data_loss import is_lost, tell, without_gap
from sharding.stream.consumer.inbox import Inbox, Lane
from sharding.stream.consumer.probe import Ends, first_and_last, leader_ends
from sharding.stream.consumer.subscription import Subscription, check_abilities
from sharding.stream.errors import DataLost, EndsTooEarly, NoAnswerInTime
from sharding.stream.messages.chunk import ChunkHeader, parse_header
from sharding.stream.options import Columns, ConsumerOptions, OnDataLoss, offset_spec
from sharding.stream.protocol.commands import Metadata, Subscribe, Unsubscribe
from sharding.stream.protocol.constants import NEXT, Broker, Key, OffsetSpec
from sharding.stream.routes.near_replicas import consumer_candidates

if TYPE_CHECKING:
    import pyarrow as pa

    from sharding.stream.connections.connection import StreamClient

_SILENCE = 0.05
"""How long nothing comes, in seconds, before the end of the range is asked about. Where chunks are
stored, they follow each other within a few milliseconds."""
_LONG_SILENCE = 1.0
DOUBT = 15.0
"""How long, in seconds, a stream that is called empty by a broker that may not know it is asked
again, where it is known that it was not. An election takes milliseconds to a few seconds."""
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
    known_end: int = 0,
) -> RangeReading:
    """Record batches with exactly the messages at offsets from `first` up to `end`, without it.

    What is not stored yet when the reading begins is not waited for. Messages that retention
    deleted raise `DataLost`, unless that may be skipped. If nothing comes for `timeout` seconds
    though it is stored, `Unreachable` is raised; reading may begin again at any offset.

    `known_end` is where the stream is known to have ended once. That it ends earlier now is not
    believed: it raises `EndsTooEarly`, which is an `Unreachable`.

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
    return RangeReading(read(access, stream, first, end, options, min(end, known_end)))


def _read_all(
    access: Access, stream: str, first: int, end: int, options: ConsumerOptions, known_end: int
) -> Generator[tuple[pa.RecordBatch, Broker | None]]:
    position: int | None = first
    while position is not None and position < end:
        position = yield from _read_on(access, stream, position, end, options, known_end)


def _read_on(
    access: Access, stream: str, first: int, end: int, options: ConsumerOptions, known_end: int
) -> Generator[tuple[pa.RecordBatch, Broker | None], None, int | None]:
    """To the end of the range, or of what there is before a loss that may be skipped: then it
    returns where to begin again."""
    from sharding.stream.arrow.batches import BatchReader

    timeout = options.recovery_timeout
    inbox = Inbox(2 * options.credits, batch_bytes=access.limits.batch_max, clock=access.clock)
    lane = Lane(stream, first)
    subscription = Subscription(lane, inbox, access, options)
    reader = BatchReader(stream, options.columns, access.limits, check_crc=False)
    source, node = None, None
    doubt: EndsTooEarly | None = None
    doubt_ends = 0.0
    try:
        subscription.open(access.clock() + timeout)
        silence, give_up = _SILENCE, access.clock() + timeout
        while lane.position is not None and lane.position < end:
            now = access.clock()
            taken = inbox.take(min(give_up, now + silence))
            if taken is None:
                if access.clock() >= give_up:
                    raise doubt or Unreachable(
                        f"no message of {stream!r} came for {timeout:g} s, "
                        f"at offset {lane.position}"
                    )
                left = give_up - access.clock()
                known = _end_of_rows(
                    access, subscription, end, options.on_data_loss, left, known_end
                )
                if known is not None and known.doubt is not None:
                    doubt_ends = doubt_ends if doubt else access.clock() + DOUBT
                    doubt = known.doubt
                    if access.clock() >= doubt_ends:
                        raise doubt
                    subscription.pause(_TRY_AGAIN)
                elif known is not None:
                    doubt, end, silence = None, known.end, _LONG_SILENCE
                    if known.goes_on_at is not None:
                        return known.goes_on_at
                continue
            if taken.source is not source:
                source, node = taken.source, subscription.node or node
            subscription.give_back(taken)
            within = tuple(gap for gap in taken.gaps if gap[0] < end)
            taken = replace(taken, gaps=within)
            taken, loss = without_gap(taken, subscription, access, options.on_data_loss)
            if loss is not None:
                raise loss
            for batch in reader.batches(taken.chunks, taken.first, end):
                yield batch, node
            doubt, give_up = None, access.clock() + timeout  # after the application had its time
    finally:
        inbox.close()
        subscription.close(access.clock() + _CLOSE_TIMEOUT)
    return None


class _Known(NamedTuple):
    end: int
    """Of the range, or of the stream if that is earlier."""
    goes_on_at: int | None = None
    """Where the stream begins now, if what was to be read next is deleted."""
    doubt: EndsTooEarly | None = None
    """Why that end is not to be believed yet."""


def _end_of_rows(
    access: Access,
    subscription: Subscription,
    end: int,
    on_data_loss: OnDataLoss,
    timeout: float,
    known_end: int,
) -> _Known | None:
    """None if nobody can say so now. Then there may be no connection: the subscription finds a new
    one, or fails the inbox.

    A broker whose reader comes to a segment that was deleted delivers nothing more until something
    is published (seen on 4.0.5), so a loss is looked for here too. What was sent before that comes
    before the answers.
    """
    stream, lane = subscription.stream, subscription.lane
    deadline = access.clock() + timeout
    try:
        client = subscription.connection(access.clock())
        ends = first_and_last(client, stream, timeout, access.clock)
        position = lane.position or 0
        if ends is not None and position < ends.first and not lane.waiting:
            gap = position, min(end, ends.first)
            if is_lost(client, stream, gap, deadline - access.clock()):
                tell(DataLost(stream, *gap), on_data_loss)
                return _Known(end, ends.first)
        if ends is None or ends.last < end - 1:
            ends = leader_ends(access, stream, deadline - access.clock())
        if ends is None:
            left = deadline - access.clock()
            if _tells_it_was_emptied(client, stream, (position, end), on_data_loss, left):
                return _Known(0)
    except WarrenError as error:
        if not (is_retryable(error) or isinstance(error, NoAnswerInTime)):
            raise
        subscription.pause(_TRY_AGAIN)
        return None
    if ends is None and known_end and not client.supports(Key.STREAM_STATS):
        return _Known(0, doubt=EndsTooEarly(stream, known_end, 0))
    return _Known(min(end, _believed_end(stream, ends, known_end)))


def _believed_end(stream: str, ends: Ends | None, known_end: int) -> int:
    """Where a stream ends, which must not be less than what is known."""
    found = 0 if ends is None else ends.last + 1
    if found < known_end:
        raise EndsTooEarly(stream, known_end, found)
    return found


# A range of a stream from which the broker leaves out chunks, by the filter values in them.
#
# Of chunks that are left out nothing is heard, so nobody says that the end of the range was passed.
# Therefore the range is read in rounds: subscribe where the last round ended, ask for the stream's
# metadata, and take what came before that answer. A broker sends the chunks it has, as far as its
# credit goes, before it answers the next request. A round without a chunk is thus the end of what
# the node holds; that it holds the whole range is made sure of before.
#
# Retention may delete at any moment, and a broker passes over what is gone as silently as over what
# the filter leaves out. So each round is judged by what the node still has after it: a stream that
# begins no later than the round did had all of it. If it begins later, what is missing between the
# round's chunks was left out or deleted, nobody can tell which, and counts as lost.


def read_filtered(
    access: Access, stream: str, first: int, end: int, options: ConsumerOptions, known_end: int
) -> Generator[tuple[pa.RecordBatch, Broker | None]]:
    """The rows of the chunks that pass the filter, each batch with the node that it came from.

    A connection that is lost fails the reading; it may begin again at any offset.
    """
    from sharding.stream.arrow.batches import BatchReader

    if first == end:
        return
    timeout = options.recovery_timeout
    reader = BatchReader(stream, options.columns, access.limits, options.check_crc)
    with _subscriber(access, stream, timeout) as (client, number, chunks):
        check_abilities(client, options)
        ends = _whole_range(access, client, stream, end, timeout, known_end)
        if ends is None:
            asked = client, stream, (first, end), options.on_data_loss, timeout
            if not _tells_it_was_emptied(*asked):
                _believed_end(stream, ends, known_end)
            return
        position, properties = first, options.subscription_properties(None)
        while position < end:
            spec = OffsetSpec.at(position)
            subscribe = Subscribe(number, stream, spec, options.credits, properties)
            client.call(subscribe, timeout=timeout)
            client.call(Metadata((stream,)), timeout=timeout)
            client.call(Unsubscribe(number), timeout=timeout)
            came = chunks.take()
            gap = first_gap(position, min(end, ends.last + 1), map(parse_header, came))
            if gap is not None and is_lost(client, stream, gap, timeout):
                tell(DataLost(stream, *gap), options.on_data_loss)
            if not came:
                return
            for batch in reader.batches(came, position, end):
                yield batch, client.node
            position = max(parse_header(chunk).end_offset for chunk in came)


def _tells_it_was_emptied(
    client: StreamClient,
    stream: str,
    wanted: tuple[int, int],
    on_data_loss: OnDataLoss,
    timeout: float,
) -> bool:
    """A stream without messages may have had some, which retention deleted, each and every one:
    whether that is so, and was told."""
    if not (client.supports(Key.STREAM_STATS) and is_lost(client, stream, wanted, timeout)):
        return False
    tell(DataLost(stream, *wanted), on_data_loss)
    return True


def first_gap(position: int, end: int, came: Iterable[ChunkHeader]) -> tuple[int, int] | None:
    """The first offsets from `position` up to `end` that none of these chunks holds.

    What comes after the last chunk is the next round's, if there is a chunk.

    >>> first_gap(3, 9, [])
    (3, 9)
    >>> first_gap(9, 9, [])
    """
    until = end
    for header in came:
        until = header.first_offset
        if until > position:
            break
        position = until = max(position, header.end_offset)
    until = min(until, end)
    return (position, until) if position < until else None


@contextmanager
def _subscriber(
    access: Access, stream: str, timeout: float
) -> Iterator[tuple[StreamClient, int, _Chunks]]:
    """A connection to a replica with a place for a subscription."""
    chunks = _Chunks()
    route = access.routes.route(stream, timeout)
    candidates = consumer_candidates(route, access.placement, access.rng)
    deadline = access.clock() + timeout
    client, number = access.pool.subscriber(candidates, stream, chunks, deadline)
    try:
        yield client, number, chunks
    finally:
        if chunks.lost is None:
            with suppress(WarrenError):
                client.detach_subscriber(number)
        access.pool.release(client)


def _whole_range(
    access: Access, client: StreamClient, stream: str, end: int, timeout: float, known_end: int
) -> Ends | None:
    """Wait until the node holds the range, as far as there are messages; None if there are none."""
    leader = leader_ends(access, stream, timeout)
    if leader is None:
        return None
    last = min(end, _believed_end(stream, leader, known_end)) - 1
    deadline = access.clock() + timeout
    while True:
        ends = first_and_last(client, stream, timeout, access.clock)
        if ends is not None and ends.last >= last:
            return ends
        if access.clock() > deadline:
            raise Unreachable(f"{client.node} has no message {last} of {stream!r} yet")
        time.sleep(_TRY_AGAIN)


class _Chunks:
    """What a subscription delivers."""

    def __init__(self) -> None:
        self._came: list[memoryview] = []
        self.lost: Exception | None = None

    def take(self) -> list[memoryview]:
        """All that came; called when no more can come."""
        if self.lost is not None:
            raise self.lost
        came, self._came = self._came, []
        return came

    def on_chunk(self, chunk: memoryview) -> None:
        self._came.append(chunk)

    def on_activity(self, active: bool) -> OffsetSpec:  # noqa: ARG002
        return NEXT

    def on_lost(self, reason: Exception) -> None:
        self.lost = reason


def offset_at(access: Access, stream: str, time: datetime, timeout: float) -> int | None:
    """The first offset that was stored at that time or later; None if nothing was."""
    wanted = offset_spec(time)
    ends = leader_ends(access, stream, timeout)
    if ends is None:
        return None
    last_chunk = read_range(access, stream, ends.last_chunk, ends.last + 1, timeout=timeout)
    if _time_of(next(last_chunk)) < wanted.value:
        return None
    # So it can't wait for ever: there is a chunk that late.
    with Consumer((stream,), access, ConsumerOptions(offset=wanted, credits=2)) as consumer:
        batch = next(consumer.batches(timeout), None)
    if batch is None:
        raise Unreachable(f"no message of {stream!r} came in time, though it is stored")
    return int(batch.column("offset")[0].as_py())


def _time_of(batch: pa.RecordBatch) -> int:
    """In milliseconds since 1970."""
    return int(batch.column("timestamp")[0].value)
