"""One partition of a consumer group: read while it is this worker's turn, handed over when not.

Everything happens on the partition's own thread, in order; connections and handlers only leave
word and wake it. The rules:

* The broker says whose turn it is. *Yours*: look up the offset that the group has stored, answer
  with it, read on from there. *Not yours*: begin nothing more, let the handlers at work finish,
  store the offset, and only then answer; until then the broker starts nobody else. So nothing is
  handled twice, and no key out of order.
* A lost connection ends the turn at once, unasked. Handlers at work finish, but no offset is
  stored: another worker may have stored a later one by now. What this worker has handled it does
  not handle again, whatever is stored.
* While the broker has not answered for a lease's length no message is begun: a process that was
  frozen does not know yet that its turn is over.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from sharding.errors import OutcomeUnknown, WarrenError, is_retryable
from sharding.groups.stream_counts import Counts
from sharding.groups.stream_messages import messages_of
from sharding.groups.stream_options import StreamGroupOptions
from sharding.groups.stream_turn import Burials, Turn
from sharding.groups.workshop import Workshop
from sharding.stream.consuming.consumer_options import ConsumerOptions, offset_spec
from sharding.stream.consuming.data_loss import without_gap
from sharding.stream.consuming.inbox import Inbox, Lane
from sharding.stream.consuming.offset_store import (
    store_offset,
    store_offset_surely,
    stored_offset,
)
from sharding.stream.consuming.starting import start_offset
from sharding.stream.consuming.subscription import Subscription
from sharding.stream.formats.message import Message
from sharding.stream.frames.handshake import ExchangeCommandVersions
from sharding.stream.frames.versions import OURS
from sharding.stream.network.access import Access
from sharding.stream.network.client import StreamClient
from sharding.stream.protocol import NEXT, OffsetSpec

logger = logging.getLogger("warren.groups")

_STORE_TIMEOUT = 5.0
_ANSWER_TIMEOUT = 5.0
_TRY_AGAIN = 0.2


@dataclass(frozen=True)
class Shared:
    """What the partitions of one worker have in common."""

    access: Access
    options: StreamGroupOptions
    reading: ConsumerOptions
    workshop: Workshop
    burials: Burials
    counts: Counts
    on_change: Callable[[], None]
    """Called when a turn begins or ends, and when a partition's thread ends."""


class _Change(NamedTuple):
    """Whose turn it is now; without an answer to give, the connection was lost."""

    active: bool
    tenure: int
    client: StreamClient | None = None
    give_credit: Callable[[int], None] | None = None
    answer: Future[OffsetSpec] | None = None


class PartitionReader:
    def __init__(self, stream: str, shared: Shared, handled: int | None = None) -> None:
        self.stream = stream
        self.handled = handled
        """Up to which offset this worker has handled all; a new reader takes over from an old."""
        self.failure: Exception | None = None
        """Why the thread ended, if nobody asked for it."""
        self._shared = shared
        self._clock = shared.access.clock
        self._lane = Lane(stream, shut=True)
        self._inbox = Inbox(2 * shared.options.credits, batch_chunks=1, clock=self._clock)
        self._subscription = Subscription(
            self._lane,
            self._inbox,
            shared.access,
            shared.reading,
            turns=self,
        )
        self._news = threading.Condition()
        self._changes: deque[_Change] = deque()
        self._stop_at: float | None = None
        self._turn: Turn | None = None
        self._rest: Iterator[Message] | None = None
        self._released = threading.Event()
        self._released.set()
        self._renew_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"warren-{stream}", daemon=True)

    @property
    def active(self) -> bool:
        return self._turn is not None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Get in line for the partition, and read it when the turn comes."""
        self._thread.start()

    def stop(self, deadline: float) -> None:
        """Hand the partition over, by the deadline; returns at once, `join` waits."""
        with self._news:
            self._stop_at = deadline
            self._news.notify_all()
        self._inbox.wake()

    def join(self, deadline: float) -> bool:
        self._thread.join(max(0.0, deadline - self._clock()))
        return not self._thread.is_alive()

    # What the subscription tells, on a connection's reading thread.

    def begin(self, client: StreamClient, timeout: float) -> None:
        """Nothing to prepare: an answer may be looked up when the broker asks."""

    def changed(
        self, active: bool, client: StreamClient, give_credit: Callable[[int], None]
    ) -> Future[OffsetSpec]:
        answer: Future[OffsetSpec] = Future()
        self._inbox.shut(self._lane)
        self._note(_Change(active, self._lane.tenure, client, give_credit, answer))
        return answer

    def ended(self) -> None:
        self._inbox.shut(self._lane)
        self._note(_Change(False, self._lane.tenure))

    def _note(self, change: _Change) -> None:
        with self._news:
            self._changes.append(change)
            self._news.notify_all()
        self._inbox.wake()

    # The partition's thread.

    def _run(self) -> None:
        try:
            self._subscription.open(self._clock() + self._shared.reading.subscribe_timeout)
            while self._stop_at is None:
                if self._changes:
                    self._follow(self._changes.popleft())
                self._renew_lease()
                self._store_if_due()
                if self._rest is None:
                    self._take()
                else:
                    self._hand_in()
        except Exception as error:
            self.failure = error
        finally:
            now = self._clock()
            deadline = now if self._stop_at is None else self._stop_at
            with suppress(WarrenError):
                self._end_turn(deadline, keep=self.failure is None)
            self._inbox.close()
            self._subscription.close(max(deadline, now + 1))
            self._shared.on_change()

    def _follow(self, change: _Change) -> None:
        if change.active:
            self._begin_turn(change)
        else:
            asked = change.answer is not None
            deadline = self._clock() + self._shared.options.handover_timeout
            self._end_turn(deadline, keep=asked)
            if change.answer is not None:
                change.answer.set_result(NEXT)  # the broker does not look at it
        self._shared.on_change()

    def _begin_turn(self, change: _Change) -> None:
        assert change.client is not None
        assert change.give_credit is not None
        assert change.answer is not None
        # What outlasted the last handover must not be at work beside its own repetition.
        self._released.wait(self._shared.options.handover_timeout)
        while True:
            if change.tenure != self._lane.tenure or change.client.closed or self._stop_at:
                return
            try:
                position = self._position(change.client)
                break
            except WarrenError as error:
                if not passes(error):
                    raise
            with self._news:  # the leader may be away for a moment
                self._news.wait_for(lambda: self._changes or self._stop_at, _TRY_AGAIN)
        shared = self._shared
        mark = position - 1 if position else None
        self._turn = Turn(
            mark, shared.workshop, shared.burials, shared.options, self._wake, self._clock
        )
        shared.workshop.accept(self.stream)
        self._renew_at = 0.0
        owed = self._inbox.open(self._lane, change.tenure, position)
        begin = offset_spec(shared.options.offset)
        change.answer.set_result(begin if position is None else OffsetSpec.at(position))
        change.give_credit(owed)
        shared.counts.add("taken")
        logger.info("%s: taken, from offset %s", self.stream, position)

    def _position(self, client: StreamClient) -> int | None:
        """Where to read on; None if only the broker can tell."""
        reading = self._shared.reading
        stored = stored_offset(client, str(reading.name), self.stream, _ANSWER_TIMEOUT)
        known = [offset + 1 for offset in (stored, self.handled) if offset is not None]
        if known:
            return max(known)
        position = start_offset(client, self.stream, reading, _ANSWER_TIMEOUT)
        if position:
            # "next" is another place for whoever asks later, so it is settled here for all.
            self._store_surely(client, position - 1, self._clock() + _STORE_TIMEOUT)
        return position

    def _end_turn(self, deadline: float, *, keep: bool) -> None:
        turn, self._turn, self._rest = self._turn, None, None
        if turn is None:
            return
        shared = self._shared
        self._released = threading.Event()
        shared.workshop.release(self.stream, self._released.set)
        if not self._released.wait(max(0.0, deadline - self._clock())):
            shared.counts.add("late_handovers")
            logger.warning("%s: given up while a handler is at work on it", self.stream)
        shared.workshop.set_lease(self.stream, None)
        offset = turn.to_store()
        self.handled = turn.end()
        shared.counts.add("released" if keep else "lost")
        logger.info("%s: given up, handled up to offset %s", self.stream, self.handled)
        if keep and offset is not None:
            try:
                store_by = max(deadline, self._clock() + _STORE_TIMEOUT)
                client = self._subscription.connection(store_by)
                self._store_surely(client, offset, store_by)
            except WarrenError as error:
                logger.warning("%s: offset %d was not stored: %s", self.stream, offset, error)

    def _take(self) -> None:
        taken = self._inbox.take(self._wake_at())
        if taken is None:
            return
        self._subscription.give_back(taken)
        taken, loss = without_gap(taken, self._subscription, self._shared.access, "raise")
        if loss is not None:
            if self._shared.options.on_data_loss == "raise":
                raise loss
            self._shared.counts.add("losses")
            logger.warning("%s", loss)
        if not taken.void:
            self._rest = messages_of(taken, self._shared.access.limits)

    def _hand_in(self) -> None:
        """Submit messages while there is room for them; with none, wait until there is."""
        turn, rest = self._turn, self._rest
        assert turn is not None
        assert rest is not None
        with self._news:
            left = max(0.0, self._wake_at() - self._clock())
            self._news.wait_for(lambda: turn.room > 0 or self._changes or self._stop_at, left)
        for _ in range(turn.room):
            if self._changes or self._stop_at is not None:
                return
            message = next(rest, None)
            if message is None:
                self._rest = None
                return
            turn.submit(message, self.stream)

    def _wake(self) -> None:
        """A message is settled: there is room, and maybe an offset to store."""
        with self._news:
            self._news.notify_all()
        turn = self._turn
        due = turn.due_at() if turn is not None else None
        if due is not None and due <= self._clock():
            self._inbox.wake()

    def _wake_at(self) -> float:
        due = self._turn.due_at() if self._turn is not None else None
        return self._renew_at if due is None else min(due, self._renew_at)

    def _store_if_due(self) -> None:
        turn = self._turn
        due = turn.due_at() if turn is not None else None
        if turn is None or due is None or due > self._clock():
            return
        offset = turn.to_store()
        # What fails now is due again with the next messages, and when the turn ends.
        with suppress(WarrenError):
            client = self._subscription.connection(self._clock())
            if offset is not None:
                store_offset(client, str(self._shared.reading.name), self.stream, offset)
                self._shared.counts.add("stores")

    def _store_surely(self, client: StreamClient, offset: int, deadline: float) -> None:
        name = str(self._shared.reading.name)
        store_offset_surely(client, name, self.stream, offset, deadline, self._clock)
        self._shared.counts.add("stores")

    def _renew_lease(self) -> None:
        """Hear from the broker that the connection is alive, a few times in a lease."""
        now, lease = self._clock(), self._shared.options.heartbeat
        if now < self._renew_at:
            return
        self._renew_at = now + lease / 3
        if self._turn is None:
            return
        with suppress(WarrenError):
            # Answered by the connection's own process, whatever becomes of leaders and metadata.
            client = self._subscription.connection(now)
            client.call(ExchangeCommandVersions(OURS), timeout=lease / 3)
            self._shared.workshop.set_lease(self.stream, now + lease)


def passes(error: Exception) -> bool:
    """Whether what failed may do better later; asking twice does no harm here."""
    return is_retryable(error) or isinstance(error, OutcomeUnknown)
