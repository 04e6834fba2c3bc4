"""A consumer of a stream or of all partitions of a super stream, as Arrow batches or messages.

Connections fill the inbox from their own threads; the application's thread takes chunks out of it
and makes batches or messages of them. Nothing here runs unless the application asks for more, so
it is never more than `credits` chunks per partition behind what this process holds.

One thread at a time may iterate. `close()` may be called from any other, and ends the iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from sharding.errors import InvalidInput, WarrenError
from sharding.metrics.sources import Subject
from sharding.stream.connections.access import Access
from sharding.stream.consumer.data_loss import without_gap
from sharding.stream.consumer.inbox import Inbox, Lane, Taken
from sharding.stream.consumer.offset_store import Progress, store_offset, store_offset_surely
from sharding.stream.consumer.subscription import Subscription
from sharding.stream.messages.chunk import messages, parse_header
from sharding.stream.messages.message import Message, decode_message
from sharding.stream.options import ConsumerOptions
from sharding.stream.protocol.constants import Broker

if TYPE_CHECKING:
    import pyarrow as pa

    from sharding.stream.arrow.batches import BatchReader

logger = logging.getLogger("warren.stream.consumer")

CLOSE_TIMEOUT = 10.0


class Consumer:
    """Reads streams from replicas, and goes on where it was after a node or a stream was away."""

    def __init__(
        self,
        streams: Sequence[str],
        access: Access,
        options: ConsumerOptions,
        *,
        super_stream: str | None = None,
    ) -> None:
        strict = options.require_replica or access.placement.require_replica
        placement = replace(access.placement, require_replica=strict)
        self._access = replace(access, placement=placement)
        self._options = options
        # Credit can reach a subscription that it was not meant for, whose id was free for a moment.
        self._inbox = Inbox(2 * options.credits, clock=access.clock)
        self._progress = Progress(
            options.store_every_messages, options.store_every_seconds, access.clock()
        )
        self._readers: dict[str, BatchReader] = {}
        self._tenures: dict[str, int] = {}
        self._rest: Taken | None = None
        labels = {"stream": super_stream or streams[0], "group": options.name or ""}
        self.counted_as = Subject("consumer", labels)
        self._counts = {"messages": 0, "chunks": 0, "bytes": 0}
        self._subscriptions = {
            stream: Subscription(
                Lane(stream, shut=options.single_active),
                self._inbox,
                self._access,
                options,
                super_stream,
            )
            for stream in streams
        }
        try:
            for subscription in self._subscriptions.values():
                subscription.open(access.clock() + options.subscribe_timeout)
        except BaseException:
            self._end(access.clock() + CLOSE_TIMEOUT)
            raise

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.batches()

    def batches(self, timeout: float | None = None) -> Iterator[pa.RecordBatch]:
        """Record batches of one stream each, whose name is in the schema's metadata as `stream`.

        Ends when nothing came for `timeout` seconds, or when the consumer is closed. A stream that
        was deleted raises `StreamNotFound`, one that stayed away too long what it was last.
        """
        while (taken := self._next(timeout)) is not None:
            lane = taken.lane
            first = max(taken.first, lane.handed_out or 0)
            batch = self._reader(lane.stream).batch(taken.chunks, first)
            self._rest = None
            if taken.void:
                continue
            self._hand_out(lane, taken.end, 0 if batch is None else batch.num_rows)
            if batch is not None:
                yield batch

    def messages(self, timeout: float | None = None) -> Iterator[Message]:
        """One message after the other; ends as `batches` does."""
        stores = self._options.stores_by_itself
        while (taken := self._next(timeout)) is not None:
            lane = taken.lane
            for message in self._decoded(taken, max(taken.first, lane.handed_out or 0)):
                if taken.void:
                    break
                assert message.offset is not None
                self._hand_out(lane, message.offset + 1, 1)
                yield message
                if stores:
                    self._store_if_due()
            else:
                self._hand_out(lane, taken.end, 0)
            self._rest = None

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self._subscriptions)

    @property
    def positions(self) -> Mapping[str, int]:
        """By stream, the offset of the next message to be handed out, where that is known."""
        lanes = (subscription.lane for subscription in self._subscriptions.values())
        return {lane.stream: lane.handed_out for lane in lanes if lane.handed_out is not None}

    @property
    def nodes(self) -> Mapping[str, Broker | None]:
        """By stream, the node it is read from now."""
        return {stream: each.node for stream, each in self._subscriptions.items()}

    @property
    def active(self) -> tuple[str, ...]:
        """The streams that this consumer gets messages of; all, unless it is a single active."""
        return tuple(name for name, each in self._subscriptions.items() if not each.lane.shut)

    @property
    def recoveries(self) -> tuple[int, float]:
        """How often a partition was subscribed to again, and the longest that took in seconds."""
        each = self._subscriptions.values()
        return sum(one.recoveries for one in each), max(one.longest_outage for one in each)

    @property
    def counters(self) -> Mapping[str, float]:
        """Messages handed out, chunks and bytes taken for them, and what `recoveries` says."""
        times, longest = self.recoveries
        return self._counts | {"recoveries": times, "longest_recovery": longest}

    def store_offset(
        self, stream: str | None = None, offset: int | None = None, timeout: float = 10
    ) -> None:
        """Store the offset of the last message dealt with, and return when the broker has it.

        Without `offset`, that of the last message handed out; without `stream`, in all streams.
        """
        if self._options.name is None:
            raise InvalidInput("name", "offsets are stored under one; the consumer has none", None)
        if stream is not None and stream not in self._subscriptions:
            raise InvalidInput("stream", f"must be one of {', '.join(self.streams)}", stream)
        if offset is not None:
            if stream is None and len(self.streams) > 1:
                raise InvalidInput("stream", "must be named to store a given offset", stream)
            offsets = {stream or self.streams[0]: offset}
        else:
            known = self._storable()
            offsets = known if stream is None else {s: o for s, o in known.items() if s == stream}
        self._store_surely(offsets, self._access.clock() + timeout)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Store offsets if the consumer does that by itself, and unsubscribe, within `timeout`."""
        if self._inbox.closed:
            return
        now = self._access.clock()
        try:
            if self._options.stores_by_itself:
                self._store_surely(self._storable(), now + timeout / 2)
        except WarrenError as error:
            logger.warning("offsets were not stored at close: %s", error)
        finally:
            self._end(now + timeout)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._progress.take_back_last()
        self.close()

    def __repr__(self) -> str:
        name = f" {self._options.name!r}" if self._options.name else ""
        return f"<Consumer{name} of {', '.join(self.streams)}>"

    def _next(self, timeout: float | None) -> Taken | None:
        """What the application goes on with: the rest of what it had, or what comes next."""
        clock = self._access.clock
        silent_at = None if timeout is None else clock() + timeout
        while True:
            self._store_if_due()
            if self._inbox.closed:
                return None
            if self._rest is None or self._rest.void:
                due = [at for at in (silent_at, self._progress.due_at) if at is not None]
                self._rest = self._inbox.take(min(due, default=None))
                if self._rest is not None:
                    self._counts["chunks"] += len(self._rest.chunks)
                    self._counts["bytes"] += sum(map(len, self._rest.chunks))
                    self._subscriptions[self._rest.lane.stream].give_back(self._rest)
                elif silent_at is not None and clock() >= silent_at:
                    return None
                else:
                    continue
            subscription = self._subscriptions[self._rest.lane.stream]
            self._rest, loss = without_gap(
                self._rest, subscription, self._access, self._options.on_data_loss
            )
            if loss is not None:
                raise loss
            return self._rest

    def _decoded(self, taken: Taken, first: int) -> Iterator[Message]:
        raw_wanted, stream = self._options.columns.raw, taken.lane.stream
        for chunk in taken.chunks:
            header = parse_header(chunk)
            if header.end_offset <= first:
                continue
            timestamp = header.timestamp
            for offset, raw in messages(chunk, self._access.limits):
                if offset < first:
                    continue
                if raw_wanted:
                    yield Message(bytes(raw), offset=offset, timestamp=timestamp, stream=stream)
                else:
                    yield decode_message(raw, offset=offset, timestamp=timestamp, stream=stream)

    def _reader(self, stream: str) -> BatchReader:
        if stream not in self._readers:
            # Here, so that messages can be read without pyarrow.
            from sharding.stream.arrow.batches import BatchReader

            self._readers[stream] = BatchReader(
                stream, self._options.columns, self._access.limits, check_crc=False
            )
        return self._readers[stream]

    def _hand_out(self, lane: Lane, next_offset: int, count: int) -> None:
        lane.handed_out = next_offset
        self._tenures[lane.stream] = lane.tenure
        self._counts["messages"] += count
        self._progress.handed_out(lane.stream, next_offset, count)

    def _storable(self) -> dict[str, int]:
        """What is not stored yet, of streams that are still this consumer's."""
        return {
            stream: offset
            for stream, offset in self._progress.unstored().items()
            if self._tenures[stream] == self._subscriptions[stream].lane.tenure
        }

    def _store_if_due(self) -> None:
        now = self._access.clock()
        if not self._options.stores_by_itself or not self._progress.due(now):
            return
        for stream, offset in self._storable().items():
            # What fails now is due again with the next messages.
            with suppress(WarrenError):
                client = self._subscriptions[stream].connection(now)
                store_offset(client, str(self._options.name), stream, offset)
                self._progress.stored(stream, offset)
        self._progress.restart(now)

    def _store_surely(self, offsets: Mapping[str, int], deadline: float) -> None:
        for stream, offset in offsets.items():
            client = self._subscriptions[stream].connection(deadline)
            name = str(self._options.name)
            store_offset_surely(client, name, stream, offset, deadline, self._access.clock)
            self._progress.stored(stream, offset)

    def _end(self, deadline: float) -> None:
        self._inbox.close()
        for subscription in self._subscriptions.values():
            subscription.close(deadline)
