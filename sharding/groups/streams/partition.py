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

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from sharding.errors import OutcomeUnknown, WarrenError, is_retryable
from sharding.groups.handling.threads import HandlerThreads
from sharding.groups.log import logger
from sharding.groups.streams.options import StreamGroupOptions
from sharding.groups.streams.progress import Counts, DeadLetterStore, Turn
from sharding.stream.connections.access import Access
from sharding.stream.connections.connection import StreamClient
from sharding.stream.consumer.data_loss import is_stray, without_gap
from sharding.stream.consumer.inbox import Inbox, Lane, Taken
from sharding.stream.consumer.offset_store import store_offset, store_offset_surely, stored_offset
from sharding.stream.consumer.starting import (
    BEGUN,
    LEAVES_OUT,
    begun_name,
    is_moving,
    turn_offset,
    witness_before,
)
from sharding.stream.consumer.subscription import Subscription
from sharding.stream.errors import ProtocolError, StreamNotFound, StreamReplaced
from sharding.stream.messages.chunk import ChunkHeader, messages, parse_header
from sharding.stream.messages.message import Message, decode_message
from sharding.stream.options import ConsumerOptions, offset_spec
from sharding.stream.protocol.constants import NEXT, Limits, OffsetSpec
from sharding.stream.protocol.handshake import ExchangeCommandVersions
from sharding.stream.protocol.versions import OURS

_TRY_AGAIN = 0.2
_TIMEOUT = 5.0
_NOTE_AGAIN = 30.0

STREAM_IS_GONE = (StreamNotFound, StreamReplaced)
"""One that comes back under the name is another one."""


@dataclass(frozen=True)
class Shared:
    """What the partitions of one worker have in common."""

    access: Access
    options: StreamGroupOptions
    reading: ConsumerOptions
    runner: HandlerThreads
    dead_letters: DeadLetterStore
    counts: Counts
    members: str
    """The stream over which the workers find each other; it outlives partitions."""
    on_change: Callable[[], None]
    """Called when a turn begins or ends, and when a partition's thread ends."""


@dataclass(frozen=True)
class Known:
    """What a worker knows of a partition from an earlier reader of its own."""

    handled: int | None = None
    """Up to which offset this worker has handled all: it does not do so again."""
    witness: ChunkHeader | None = None
    """By which the stream is recognised: in another one of its name `handled` means nothing."""
    anew: bool = False
    """The stream came after one of its name that was read, so all of it is still to be read."""
    told: bool = False
    """That it is another one was counted as a loss."""


class PartitionReader:
    def __init__(self, stream: str, shared: Shared, known: Known = Known()) -> None:
        self.stream = stream
        self.handled = known.handled
        self.failure: Exception | None = None
        """Why the thread ended, if nobody asked for it."""
        self._shared = shared
        self._clock = shared.access.clock
        self._lane = Lane(stream, shut=True)
        self._lane.witness = known.witness
        self._anew, self._told = known.anew, known.told
        self._reading = replace(shared.reading, offset="first") if known.anew else shared.reading
        self._inbox = Inbox(2 * shared.options.credits, batch_chunks=1, clock=self._clock)
        self._news = threading.Condition()
        self._changes = Changes(self._lane, self._inbox, self._wake)
        self._subscription = Subscription(
            self._lane, self._inbox, shared.access, self._reading, turns=self._changes
        )
        self._offsets = GroupOffsets(
            self._subscription, self._reading, shared.counts, shared.access, shared.members
        )
        self._stop_at: float | None = None
        self._turn: Turn | None = None
        self._rest: Iterator[Message] | None = None
        self._released = threading.Event()
        self._released.set()
        self._renew_at = 0.0
        self._held_back_by: int | None = None
        self._thread = threading.Thread(target=self._run, name=f"warren-{stream}", daemon=True)

    @property
    def known(self) -> Known:
        """For the reader that comes after this one."""
        if isinstance(self.failure, STREAM_IS_GONE):
            return Known(anew=True)
        if self._anew and self.handled is None:  # nothing of it is surely stored yet
            return Known(None, self._lane.witness, anew=True, told=self._told)
        return Known(self.handled, self._lane.witness)

    @property
    def active(self) -> bool:
        """Whether it is this worker's turn."""
        return self._turn is not None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Get in line for the partition, and read it when the turn comes."""
        self._thread.start()

    def stop(self, deadline: float) -> None:
        """Hand the partition over, by the deadline; returns at once, `join` waits."""
        self._stop_at = deadline
        self._wake()

    def join(self, deadline: float) -> bool:
        """Whether it ended in time."""
        self._thread.join(max(0.0, deadline - self._clock()))
        return not self._thread.is_alive()

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()
        self._inbox.wake()

    # The partition's thread.

    def _run(self) -> None:
        try:
            self._subscription.open(self._clock() + self._reading.subscribe_timeout)
            while self._stop_at is None:
                change = self._changes.next()
                if change is not None:
                    self._follow(change)
                self._renew_lease()
                self._store_if_due()
                if self._rest is None:
                    self._take()
                else:
                    self._hand_in()
        except Exception as error:
            self.failure = error
        finally:
            deadline = self._clock() if self._stop_at is None else self._stop_at
            self._end_turn(deadline, keep=self.failure is None)
            self._changes.close()
            self._inbox.close()
            self._subscription.close(max(deadline, self._clock() + 1))
            self._shared.on_change()

    def _follow(self, change: Change) -> None:
        if isinstance(change, Begins):
            self._begin_turn(change)
        else:
            asked = isinstance(change, Ends)
            self._end_turn(self._clock() + self._shared.options.handover_timeout, keep=asked)
            if isinstance(change, Ends):
                change.answer.set_result(NEXT)  # the broker does not look at it
        self._shared.on_change()

    def _begin_turn(self, change: Begins) -> None:
        # What outlasted the last turn must not be at work beside its own repetition.
        self._released.wait(self._shared.options.handover_timeout)
        while True:
            # What failed for good while the turn came, `_take` tells.
            is_over = self._stop_at is not None or self._inbox.failed
            if is_over or change.tenure != self._lane.tenure:
                change.answer.set_result(NEXT)
                return
            try:
                client, access = change.client, self._shared.access
                position = self._offsets.position(client, self.handled)
                self._lane.witness = witness_before(
                    client, self.stream, position, self._lane.witness, access, _TIMEOUT
                )
                break
            except WarrenError as error:
                if not passes(error):
                    change.answer.set_result(NEXT)  # or the broker ends the connection for it
                    raise
                logger.debug("%s: the turn is not begun yet: %s", self.stream, error)
            with self._news:  # the leader may be away for a moment
                self._news.wait_for(self._interrupted, _TRY_AGAIN)
        if (self._anew or self._offsets.are_gone) and not self._told:
            self._told = True
            self._shared.counts.add("losses")
            logger.warning(
                "%s: what this group had stored is gone; the stream was deleted and made again, or "
                "its retention has deleted all that was read: it is read from its beginning",
                self.stream,
            )
        shared = self._shared
        mark = position - 1 if position else None
        self._turn = Turn(
            mark,
            shared.runner,
            shared.dead_letters,
            shared.options,
            self._on_progress,
            self._clock,
            # What this worker handled in a turn that was lost, the broker may not have.
            is_stored=mark is None or mark != self.handled,
        )
        self._renew_at = 0.0
        shared.runner.accept(self.stream)
        owed = self._inbox.open(self._lane, change.tenure, position)
        begin = offset_spec(self._reading.offset)
        change.answer.set_result(begin if position is None else OffsetSpec.at(position))
        change.give_credit(owed)
        shared.counts.add("taken")
        logger.info("%s: taken, from offset %s", self.stream, position)

    def _end_turn(self, deadline: float, *, keep: bool) -> None:
        """`keep` says that the partition is this worker's until it says otherwise."""
        turn, self._rest = self._turn, None
        if turn is None:
            return
        shared = self._shared
        if keep:
            # Keys finish in any order: a message left out before one that was handled would make
            # the next worker handle that one again.
            shared.runner.trim(self.stream)
            while turn.in_hand and self._clock() < deadline:
                self._renew_lease()
                with self._news:
                    until = min(deadline, self._renew_at)
                    self._news.wait_for(lambda: not turn.in_hand, until - self._clock())
        else:
            self._turn = None
        self._released = threading.Event()
        shared.runner.release(self.stream, self._released.set)
        if not self._released.wait(max(0.0, deadline - self._clock())):
            shared.counts.add("late_handovers")
            logger.warning("%s: given up while a handler is at work on it", self.stream)
        shared.runner.set_lease(self.stream, None)
        self.handled = turn.end()
        # Also what was sent to be stored before: nobody has seen it arrive.
        if keep and self.handled is not None and self.handled != turn.sure:
            self._offsets.store_surely(self.handled, deadline)
        self._turn = None
        shared.counts.add("released" if keep else "lost")
        logger.info("%s: given up, handled up to offset %s", self.stream, self.handled)

    def _take(self) -> None:
        taken = self._inbox.take(self._wake_at())
        if taken is None:
            return
        self._subscription.give_back(taken)
        if is_stray(taken, self._subscription, self._shared.access):
            self._inbox.put_back(taken)
            return
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
        self._say_if_held_back(turn)
        with self._news:
            until = self._wake_at()
            self._news.wait_for(
                lambda: turn.has_room or self._interrupted() or self._wake_at() < until,
                max(0.0, until - self._clock()),
            )
        for _ in range(turn.room):
            if self._interrupted():
                return
            message = next(rest, None)
            if message is None:
                self._rest = None
                return
            turn.submit(message, self.stream)

    def _say_if_held_back(self, turn: Turn) -> None:
        """Once for each message that holds up the partition."""
        offset = turn.held_back_by()
        if offset is not None and offset != self._held_back_by:
            self._held_back_by = offset
            self._shared.counts.add("held_back")
            logger.warning(
                "%s: offset %d is not settled, and %d messages from it on are begun; no more are "
                "until it is (max_ahead)",
                *(self.stream, offset, self._shared.options.max_ahead),
            )

    def _interrupted(self) -> bool:
        return bool(self._changes) or self._stop_at is not None

    def _on_progress(self, is_first: bool) -> None:
        """A message is settled: maybe there is room now, and an offset to store.

        `is_first` says that there was nothing to store before: the thread may sleep for longer
        than until this one is due.
        """
        turn = self._turn
        if turn is None:
            return
        due = turn.due_at()
        is_due = is_first or (due is not None and due <= self._clock())
        if turn.has_room or is_due:
            with self._news:
                self._news.notify_all()
        if is_due:
            self._inbox.wake()

    def _wake_at(self) -> float:
        due = self._turn.due_at() if self._turn is not None else None
        return self._renew_at if due is None else min(due, self._renew_at)

    def _store_if_due(self) -> None:
        due = self._turn.due_at() if self._turn is not None else None
        if self._turn is not None and due is not None and due <= self._clock():
            offset = self._turn.to_store()
            if offset is not None:
                self._offsets.store(offset)

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
            self._shared.runner.set_lease(self.stream, now + lease)


def passes(error: Exception) -> bool:
    """Whether what failed may do better later; asking twice does no harm here."""
    return is_retryable(error) or isinstance(error, OutcomeUnknown)


# Whose turn it is at a partition: word left by connections for the partition's thread.
#
# A connection's reading thread must not wait, so it only notes what the broker said and goes on;
# the thread answers when it has done what follows.


class Begins(NamedTuple):
    """This worker's turn begins, when it has answered where."""

    client: StreamClient
    tenure: int
    give_credit: Callable[[int], None]
    answer: Future[OffsetSpec]


class Ends(NamedTuple):
    """The turn is to end; nobody else is let in before the answer."""

    answer: Future[OffsetSpec]


class Lost(NamedTuple):
    """The connection was lost, and the turn with it."""


Change = Begins | Ends | Lost


class Changes:
    """What the subscription calls (`Turns`) and the partition's thread takes."""

    def __init__(self, lane: Lane, inbox: Inbox, wake: Callable[[], None]) -> None:
        self._lane = lane
        self._inbox = inbox
        self._wake = wake
        self._lock = threading.Lock()
        self._noted: deque[Change] = deque()
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._noted)

    def next(self) -> Change | None:
        with self._lock:
            return self._noted.popleft() if self._noted else None

    def close(self) -> None:
        """Nobody will take what comes: it is answered at once.

        A question without an answer would make the broker close the connection after a minute.
        """
        with self._lock:
            self._closed = True
            left, self._noted = self._noted, deque()
        for change in left:
            if not isinstance(change, Lost):
                change.answer.set_result(NEXT)

    # On the connection's reading thread.

    def changed(
        self, active: bool, client: StreamClient, give_credit: Callable[[int], None]
    ) -> OffsetSpec | Future[OffsetSpec]:
        self._inbox.shut(self._lane)
        answer: Future[OffsetSpec] = Future()
        change = Begins(client, self._lane.tenure, give_credit, answer) if active else Ends(answer)
        return answer if self._note(change) else NEXT

    def ended(self) -> None:
        self._inbox.shut(self._lane)
        self._note(Lost())

    def _note(self, change: Change) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._noted.append(change)
        self._wake()
        return True


class GroupOffsets:
    def __init__(
        self,
        subscription: Subscription,
        reading: ConsumerOptions,
        counts: Counts,
        access: Access,
        members: str,
    ) -> None:
        self.are_gone = False
        """The group had begun, and nothing of what it had stored is there."""
        self._note_at: float | None = None
        """When to note that the group has begun; None: in this turn that is done, or not needed."""
        self._members = members
        self._subscription = subscription
        self._stream = subscription.stream
        self._reading = reading
        self._group = str(reading.name)
        self._counts = counts
        self._access = access
        self._clock = access.clock

    def position(self, client: StreamClient, handled: int | None) -> int | None:
        """Where to read on, when this worker has `handled` so much; None: the broker can tell."""
        own = None if handled is None else handled + 1

        def has_begun() -> bool:
            self.are_gone = self._has_begun(client)
            return self.are_gone

        place = turn_offset(
            client, self._stream, self._reading, own, self._access, _TIMEOUT, has_begun
        )
        kind = offset_spec(self._reading.offset).kind
        self._note_at = self._clock() if kind in LEAVES_OUT else None
        if is_moving(self._reading):  # the place is stored; an offset that was given is not yet
            self._note_begun(client)
        return place

    def _has_begun(self, client: StreamClient) -> bool:
        name = begun_name(self._group, self._stream)
        try:
            return stored_offset(client, name, self._members, _TIMEOUT) is not None
        except StreamNotFound:  # somebody deleted it, with all that was noted there
            return False

    def _note_begun(self, client: StreamClient) -> None:
        """A place is stored by now, so the group has begun. What is stored later tries again."""
        if self._note_at is None or self._clock() < self._note_at:
            return
        self._note_at = self._clock() + _NOTE_AGAIN
        try:
            if not self._has_begun(client):
                name, deadline = begun_name(self._group, self._stream), self._clock() + _TIMEOUT
                store_offset_surely(client, name, self._members, BEGUN, deadline, self._clock)
            self._note_at = None
        except WarrenError as error:
            logger.info("%s: that the group has begun is not noted yet: %s", self._stream, error)

    def store(self, offset: int) -> None:
        """Send it to be stored; one that gets lost is followed by the next."""
        with suppress(WarrenError):
            client = self._subscription.connection(self._clock())
            store_offset(client, self._group, self._stream, offset)
            self._counts.add("stores")
            self._note_begun(client)

    def store_surely(self, offset: int, deadline: float) -> None:
        """Return when the broker has it, or with a warning at the deadline.

        Handlers may have used up the time until then; an offset has a while of its own. A new
        connection is not waited for longer than that: the partition may be another's by then.
        """
        soon = self._clock() + _TIMEOUT
        try:
            client = self._subscription.connection(soon)
            until = max(deadline, soon)
            store_offset_surely(client, self._group, self._stream, offset, until, self._clock)
            self._counts.add("stores")
            self._note_begun(client)
        except WarrenError as error:
            logger.warning("%s: offset %d was not stored: %s", self._stream, offset, error)


def messages_of(taken: Taken, limits: Limits) -> Iterator[Message]:
    """What was taken, from its first wanted offset on.

    A message that is not AMQP 1.0 has its bytes for a body: it must not stop the whole partition.
    """
    stream = taken.lane.stream
    for chunk in taken.chunks:
        timestamp = parse_header(chunk).timestamp
        for offset, raw in messages(chunk, limits, taken.first, stream):
            try:
                yield decode_message(raw, offset=offset, timestamp=timestamp, stream=stream)
            except ProtocolError:
                yield Message(bytes(raw), offset=offset, timestamp=timestamp, stream=stream)
