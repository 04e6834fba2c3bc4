"""A consumer of a stream or of all partitions of a super stream, as Arrow batches or messages.

Connections fill the inbox from their own threads; the application's thread takes chunks out of it
and makes batches or messages of them. Nothing here runs unless the application asks for more, so
it is never more than `credits` chunks per partition behind what this process holds.

One thread at a time may iterate. `close()` may be called from any other, and from a signal handler,
and ends the iteration. A handler that interrupted the work of a consumer, this one or one that may
share its connection, can't wait for the locks that its own thread holds: another thread closes.

What a signal handler raises may come between any two steps. Python lets none in between plain
assignments and the hand-over behind them, so what was handed out, and the positions, are always
right, and who goes on misses nothing. The one exception is the moment in which chunks are taken and
their credit is given back: then the next call raises `ConsumerInterrupted`.

Offsets that are stored by themselves: what is in the application's hands counts as dealt with when
it comes back for more, and never else. Of a single active consumer only who has the turn stores.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from sharding.errors import InvalidInput, WarrenError
from sharding.metrics.names import Subject
from sharding.stream.connections.access import Access
from sharding.stream.consumer.data_loss import is_stray, without_gap
from sharding.stream.consumer.inbox import Inbox, Lane, Taken
from sharding.stream.consumer.offset_store import (
    InHand,
    Progress,
    Reached,
    store_offset,
    store_offset_surely,
)
from sharding.stream.consumer.starting import BEGUN, note_stored, stored_name, was_stored
from sharding.stream.consumer.subscription import Subscription
from sharding.stream.errors import ConsumerInterrupted, NotActive
from sharding.stream.messages.chunk import messages, parse_header
from sharding.stream.messages.message import Message, decode_message
from sharding.stream.options import ConsumerOptions
from sharding.stream.protocol.constants import Broker

if TYPE_CHECKING:
    import pyarrow as pa

    from sharding.stream.arrow.batches import BatchReader
    from sharding.stream.connections.connection import StreamClient

logger = logging.getLogger("warren.stream.consumer")

CLOSE_TIMEOUT = 10.0
_NOTE_TIMEOUT = 1.0
_NOTE_AGAIN = 10.0

_at_work: set[int] = set()
"""The threads that are at work in some consumer, and may hold locks of its, for the application."""


@contextmanager
def _working() -> Iterator[None]:
    me = threading.get_ident()
    was_at_work = me in _at_work
    try:  # already here: the exception of a signal handler must not leave the thread behind
        _at_work.add(me)
        yield
    finally:
        if not was_at_work:
            _at_work.discard(me)


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
        self._inbox = Inbox(
            2 * options.credits, batch_bytes=access.limits.batch_max, clock=access.clock
        )
        self._progress = Progress(
            options.store_every_messages, options.store_every_seconds, access.clock()
        )
        self._readers: dict[str, BatchReader] = {}
        self._noted: set[str] = set()
        """The streams of which it is noted that an offset was stored (`starting`)."""
        self._note_at = access.clock()
        self._storing = threading.RLock()
        """Held from the look at whose turn it is until the offset is sent."""
        self._is_taking = False
        """Still set, the taking was interrupted."""
        self._closing = False
        self._ended = threading.Event()
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
                on_step_down=self._step_down,
            )
            for stream in streams
        }
        with _working():
            self._begin()

    def _begin(self) -> None:
        clock = self._access.clock
        try:
            for subscription in self._subscriptions.values():
                subscription.open(clock() + self._options.subscribe_timeout)
        except BaseException:
            self._end(clock() + CLOSE_TIMEOUT)
            raise

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.batches()

    def batches(self, timeout: float | None = None) -> Iterator[pa.RecordBatch]:
        """Record batches of one stream each, whose name is in the schema's metadata as `stream`.

        A batch is made of at most `Limits.batch_max`, or of one message: a chunk that holds more
        comes in several. A sub-entry batch that unpacks to more than `Limits.uncompressed_max`
        raises `ProtocolError`, each time that it is come to: it is never passed over.

        Ends when nothing came for `timeout` seconds, or when the consumer is closed. A stream that
        was deleted raises `StreamNotFound`, one that stayed away too long what it was last.
        """
        while (taken := self._next(timeout)) is not None:
            lane = taken.lane
            first = max(taken.first, lane.handed_out or 0)
            for batch in self._reader(lane.stream).batches(taken.chunks, first):
                if taken.void or self._inbox.closed:
                    break
                following = batch.column("offset")[-1].as_py() + 1
                reached = Reached(following - 1, taken.tenure)
                in_hand = InHand(lane.stream, reached, batch.num_rows)
                self._counts["messages"] += batch.num_rows
                lane.handed_out, self._progress.in_hand = following, in_hand
                yield batch
                self._came_back()
            else:
                self._pass(taken)
            self._rest = None

    def messages(self, timeout: float | None = None) -> Iterator[Message]:
        """One message after the other; ends as `batches` does."""
        while (taken := self._next(timeout)) is not None:
            lane = taken.lane
            for message in self._decoded(taken, max(taken.first, lane.handed_out or 0)):
                if taken.void or self._inbox.closed:
                    break
                assert message.offset is not None
                following = message.offset + 1
                in_hand = InHand(lane.stream, Reached(message.offset, taken.tenure), 1)
                self._counts["messages"] += 1
                lane.handed_out, self._progress.in_hand = following, in_hand
                yield message
                self._came_back()
            else:
                self._pass(taken)
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
        A partition that is another single active consumer's by now raises `NotActive`, once what
        there is of others is stored: what was handed out of it comes to that one again.
        """
        if self._options.name is None:
            raise InvalidInput("name", "offsets are stored under one; the consumer has none", None)
        if stream is not None and stream not in self._subscriptions:
            raise InvalidInput("stream", f"must be one of {', '.join(self.streams)}", stream)
        deadline = self._access.clock() + timeout
        if offset is not None:
            if stream is None and len(self.streams) > 1:
                raise InvalidInput("stream", "must be named to store a given offset", stream)
            lane = self._subscriptions[stream or self.streams[0]].lane
            reached = Reached(offset, lane.tenure)
            wanted = {lane.stream: reached}
            if self._options.single_active and self._progress.is_behind(lane.stream, reached):
                # Others may have begun after the later one: it does not go back.
                wanted = self._progress.unsure(lane.stream)
        else:
            known = self._progress.unstored(in_hand=True)
            wanted = known if stream is None else {s: o for s, o in known.items() if s == stream}
        with _working():
            lost = self._store_surely(wanted, deadline)
        if lost:
            for each in lost:
                self._progress.forget(each)
            raise NotActive(f"another consumer has the turn now at {', '.join(lost)}")

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Store offsets if the consumer does that by itself, and unsubscribe, within `timeout`.

        In a signal handler that interrupted the work of a consumer, another thread does that.
        """
        if threading.get_ident() in _at_work:
            # What it waits for, or the locks it needs, may be this thread's own.
            threading.Thread(
                target=self._close, args=(timeout,), name="warren-close", daemon=True
            ).start()
        else:
            with _working():
                self._close(timeout)

    def _close(self, timeout: float) -> None:
        now = self._access.clock()
        with self._storing:
            if self._closing:
                is_first = False
            else:
                self._closing = is_first = True
        if not is_first:
            self._ended.wait(timeout)
            return
        try:
            if self._options.stores_by_itself:
                self._store_surely(self._progress.unstored(), now + timeout / 2)
        except WarrenError as error:
            logger.warning("offsets were not stored at close: %s", error)
        finally:
            self._end(now + timeout)
            self._ended.set()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = f" {self._options.name!r}" if self._options.name else ""
        return f"<Consumer{name} of {', '.join(self.streams)}>"

    def _came_back(self) -> None:
        """For more of what was taken, that is; who wants something new comes to `_next`."""
        self._progress.came_back()
        if self._options.stores_by_itself:
            self._store_if_due()

    def _next(self, timeout: float | None) -> Taken | None:
        """What the application goes on with: the rest of what it had, or what comes next."""
        self._progress.came_back()
        with _working():
            return self._find_next(timeout)

    def _find_next(self, timeout: float | None) -> Taken | None:
        clock = self._access.clock
        silent_at = None if timeout is None else clock() + timeout
        while True:
            self._store_if_due()
            if self._inbox.closed:
                return None
            if self._rest is None or self._rest.void:
                due = [at for at in (silent_at, self._progress.due_at) if at is not None]
                until = min(due, default=None)
                self._inbox.wait(until)
                self._take(until)
                if self._rest is None:
                    if silent_at is not None and clock() >= silent_at:
                        return None
                    continue
            subscription = self._subscriptions[self._rest.lane.stream]
            if is_stray(self._rest, subscription, self._access):
                self._inbox.put_back(self._rest)
                self._rest = None
                continue
            self._rest = replace(self._rest, may_be_stray=False)
            self._rest, loss = without_gap(
                self._rest, subscription, self._access, self._options.on_data_loss
            )
            if loss is not None:
                raise loss
            return self._rest

    def _take(self, until: float | None) -> None:
        if self._is_taking:
            raise ConsumerInterrupted(repr(self))
        self._is_taking = True
        try:
            taken = self._inbox.take(until)
            if taken is not None:
                self._counts["chunks"] += len(taken.chunks)
                self._counts["bytes"] += sum(map(len, taken.chunks))
                self._subscriptions[taken.lane.stream].give_back(taken)
        except WarrenError:
            self._is_taking = False
            raise
        self._rest = taken
        self._is_taking = False

    def _decoded(self, taken: Taken, first: int) -> Iterator[Message]:
        raw_wanted, stream = self._options.columns.raw, taken.lane.stream
        for chunk in taken.chunks:
            header = parse_header(chunk)
            if header.end_offset <= first:
                continue
            timestamp = header.timestamp
            for offset, raw in messages(chunk, self._access.limits, first, stream):
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

    def _pass(self, taken: Taken) -> None:
        """What is left of it are no messages."""
        if not taken.void:
            taken.lane.handed_out = taken.end
            # The lane may be in a later tenure by now, in which this is not to be stored.
            reached = Reached(taken.end - 1, taken.tenure)
            self._progress.in_hand = InHand(taken.lane.stream, reached, 0)

    def _store_if_due(self) -> None:
        now = self._access.clock()
        if not self._options.stores_by_itself or not self._progress.due(now):
            return
        with _working():
            for stream, reached in self._progress.unsent().items():
                # What fails now is due again with the next messages.
                with suppress(WarrenError), self._storing:
                    client = self._subscriptions[stream].connection(now)
                    if self._is_turn(stream, reached):
                        store_offset(client, str(self._options.name), stream, reached.offset)
                        self._progress.sent(stream, reached)
                        self._note_soon(client, stream)
            self._progress.restart(now)

    def _store_surely(self, offsets: Mapping[str, Reached], deadline: float) -> list[str]:
        """The streams of which nothing was stored, because the turn is another's.

        One that is away leaves the others their share of the time; then it raises.
        """
        lost: list[str] = []
        failure: WarrenError | None = None
        away_last = sorted(offsets, key=lambda stream: self._subscriptions[stream].node is None)
        for number, stream in enumerate(away_last):
            now = self._access.clock()
            until = now + (deadline - now) / (len(away_last) - number)
            try:
                if not self._store_in_turn(stream, offsets[stream], until):
                    lost.append(stream)
            except WarrenError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return lost

    def _store_in_turn(self, stream: str, reached: Reached, deadline: float) -> bool:
        """False: the turn is another's."""
        with self._storing:
            # A connection that was made after the turn ended is found after that was noted.
            client = self._subscriptions[stream].connection(deadline)
            if not self._is_turn(stream, reached):
                return False
            self._store_over(client, stream, reached, deadline)
        return True

    def _is_turn(self, stream: str, reached: Reached) -> bool:
        lane = self._subscriptions[stream].lane
        return reached.tenure == lane.tenure and not lane.shut

    def _step_down(self, lane: Lane, tenure: int, client: StreamClient, timeout: float) -> None:
        """The broker waits for us to say that the turn has ended; until then it is ours.

        Also of who is storing an offset now, which the lock waits for.
        """
        with self._storing:
            if not self._options.stores_by_itself:
                return
            reached = self._progress.unstored().get(lane.stream)
            if reached is not None and reached.tenure == tenure:
                self._store_over(client, lane.stream, reached, self._access.clock() + timeout)

    def _store_over(
        self, client: StreamClient, stream: str, reached: Reached, deadline: float
    ) -> None:
        name, clock = str(self._options.name), self._access.clock
        store_offset_surely(client, name, stream, reached.offset, deadline, clock)
        self._progress.stored(stream, reached)
        self._note_stored(client, stream, deadline)

    def _note_stored(self, client: StreamClient, stream: str, deadline: float) -> None:
        """Note it once for each stream. If that fails, the next offset tries again."""
        if stream in self._noted:
            return
        name = str(self._options.name)
        try:
            note_stored(client, name, stream, deadline, self._access.clock)
        except WarrenError as error:
            logger.info("%s: that %r has an offset is not noted yet: %s", stream, name, error)
        else:
            self._noted.add(stream)

    def _note_soon(self, client: StreamClient, stream: str) -> None:
        """The same without patience: the next offset finds out whether it is noted."""
        now, name = self._access.clock(), str(self._options.name)
        if stream in self._noted or now < self._note_at:
            return
        self._note_at = now + _NOTE_AGAIN  # unless there is an answer
        if was_stored(client, name, stream, _NOTE_TIMEOUT):
            self._noted.add(stream)
        else:
            store_offset(client, stored_name(name), stream, BEGUN)
        self._note_at = now

    def _end(self, deadline: float) -> None:
        self._inbox.close()
        for subscription in self._subscriptions.values():
            subscription.close(deadline)
