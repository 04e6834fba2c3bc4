"""Writes one partition of a producer: takes messages, batches them, and recovers.

The rules:

1. A message is *pending* until it goes into a batch, and the batch is in the outbox until the
   broker has settled it. Both together are bounded; who wants to add more waits.
2. One thread at a time writes, whichever comes: the one whose message filled the batch, or that of
   the node, when a batch has lingered or a publisher is back. Others that find it busy leave: it
   looks again before it stops. So frames go out in order, and no lock is held while a socket is
   waited for: confirms are read meanwhile.
3. When the publisher is lost (connection, leader, overdue confirms), the outbox decides what is
   given up and what is written again, and a recovery opens a new publisher, with growing pauses.
   New messages are taken meanwhile, as far as there is room.
4. Sequence numbers that the broker knows (QueryPublisherSequence) say where a new producer goes
   on. They do not settle anything: the leader counts what it has not replicated yet. So all that
   has no confirm is sent again, and the broker confirms a duplicate once the original is safe.
5. An exception that a signal handler raises may come at any moment on the main thread. It leaves
   each message taken as a whole or not at all, whoever was writing stops and the publisher is
   opened again, since nobody knows how much was written.
6. A recovery that fails for `recovery_timeout`, counted until the next confirm, fails the
   partition for good: what was sent is unknown, what was not is refused. So does a deleted stream.

All state is guarded by the producer's one lock. Methods that say "locked" want it held.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field

from sharding.callers import Caller, Callers
from sharding.errors import LocalError, OutcomeUnknown, Unreachable, WarrenError, kind_of, reason
from sharding.outcomes import Outcome, Result
from sharding.stream.connections.background import Recovery, Timer
from sharding.stream.errors import NoAnswerInTime, Overloaded, StreamUnavailable, refusal
from sharding.stream.options import ProducerOptions
from sharding.stream.producer.outbox import Batch, Failing, outstanding
from sharding.stream.producer.publishing import Attachment, Publishers, Publishing
from sharding.stream.producer.reconnecting import Reconnecting
from sharding.stream.producer.window import Load, Pending, Window
from sharding.stream.protocol.constants import Code

logger = logging.getLogger("warren.stream.producer")

MAX_RESULTS = 100_000
"""How many messages that are not stored are remembered between two reports: a lost connection
leaves all that were on their way unknown, on each partition up to `max_unconfirmed`."""

_PUBLISHER_GONE = (Code.NO_SUCH_PUBLISHER, Code.STREAM_NOT_AVAILABLE)


@dataclass
class Shared:
    """What the partitions of one producer share."""

    options: ProducerOptions
    publishers: Publishers
    recovery: Recovery
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified when messages get an outcome, or a partition fails."""
        self.callers = Callers(lambda: Caller(MAX_RESULTS))
        self.settled: Counter[Outcome] = Counter()
        """Since the beginning."""

    def stored(self, count: int, told: int) -> None:
        """Locked: messages are stored; callers were `told` of theirs among them."""
        self.settled[Outcome.STORED] += count
        self.callers.own.tally.stored += count - told

    def not_stored(
        self,
        messages: Iterable[Failing],
        outcome: Outcome,
        stream: str | None,
        cause: Exception,
        *,
        were_pending: bool = True,
    ) -> None:
        """Locked: messages that share a fate; a message that nobody accepted was not pending."""
        said = reason(cause)
        for number, publishing_id, caller in messages:
            result = Result(number, outcome, said, None, stream, publishing_id, cause)
            self.settled[outcome] += 1
            if caller is not None and were_pending:
                caller.not_stored(result)
            else:
                (caller or self.callers.own).tally.add((result,))


class PartitionWriter:
    """Listens to its publisher, and works on whatever thread comes by."""

    def __init__(self, stream: str, shared: Shared) -> None:
        self.stream = stream
        self._shared = shared
        self._options = shared.options
        self._lock = shared.lock
        self.window = Window(stream, self._options)
        self._outbox = self.window.outbox
        self._publishing: Publishing | None = None
        self._failure: Exception | None = None
        self._is_writing = False
        self._is_due = False
        self._linger: Timer | None = None
        self._confirm_check: Timer | None = None
        self.reconnecting = Reconnecting(
            stream,
            shared.publishers,
            shared.recovery,
            self,
            self._go_on,
            self._fail,
            lambda: self._failure is None,
            shared.clock,
            shared.rng,
            self._options.recovery_timeout,
        )

    @property
    def _pending(self) -> Pending:
        return self.window.pending

    def open(self, deadline: float) -> None:
        """Connect for the first time; raises what goes wrong."""
        publishing = self._shared.publishers.open(self.stream, self, deadline)
        with self._lock:
            self._pending.go_on_after(publishing.last_id)
        self._go_on(publishing)

    # Taking messages

    def wait_for_room(self, deadline: float) -> bool:
        """Locked: until there is room for a message, or `Overloaded`; whether that took a wait, in
        which others had the lock."""
        waited = False
        while True:
            if self._failure is not None:
                raise copy(self._failure) from self._failure
            if self.window.room():
                return waited
            left = deadline - self._shared.clock()
            if left <= 0:
                raise Overloaded(
                    f"{self.stream!r} has {self.window.unsettled} unconfirmed messages of "
                    f"{self._outbox.size + self._pending.size} bytes; "
                    "send less, or raise max_unconfirmed and max_unconfirmed_bytes"
                )
            if not self._is_due:
                self.write_soon()  # what is pending may be all there is, and linger long
            self._shared.changed.wait(left)
            waited = True

    def add(self, load: Load) -> bool:
        """Locked: take messages for which there is room. True if `write()` is to be called."""
        pending = self._pending
        if not pending.messages:
            pending.since = self._shared.clock()
        pending.extend(load)
        self.window.refresh()
        if pending.is_full or self._options.linger == 0:
            self._is_due = True
            return True
        if self._linger is None:
            self._linger = self._shared.recovery.soon(self._options.linger, self._linger_ended)
        return False

    def add_many(self, load: Load, deadline: float) -> tuple[int, WarrenError | None]:
        """Take and write messages as room is made: how many, and if not all, why."""
        start = 0
        while start < len(load):
            with self._lock:
                try:
                    self.wait_for_room(deadline)
                    if load.ids is not None:
                        self._pending.check_ids(load.ids[start:])
                except WarrenError as error:
                    return start, error
                part = self.window.first_of(load, start)
                is_full = self.add(part)
            if is_full:
                self.write()
            start += len(part)
        return start, None

    # Writing

    def write_soon(self) -> None:
        """Locked: write what is pending, on another thread."""
        if self._pending.messages:
            self._is_due = True
            self._write_apart()

    def _write_apart(self) -> None:
        """On the node's thread: it may have to wait. With no publisher, the next one writes."""
        publishing = self._publishing
        if publishing is not None:
            self._shared.recovery.beside(publishing.node, self.write)

    def write(self) -> None:
        """Write what is due, unless another thread does."""
        is_ours = False
        try:
            with self._lock:
                if self._is_writing:
                    return
                self._is_writing = is_ours = True
            while True:
                with self._lock:
                    publishing = self._publishing
                    batch = None if publishing is None else self._next_batch()
                    if publishing is None or batch is None:
                        self._is_writing = is_ours = False
                        return
                try:
                    publishing.write(batch, self._options.send_timeout)
                except Unreachable as error:
                    self.lost(publishing.attachment, error)
                except WarrenError as error:
                    self._fail(error)
                self._outbox.written(batch)
        except BaseException as interrupt:
            if is_ours:
                self._interrupted(interrupt)
            raise

    def _interrupted(self, interrupt: BaseException) -> None:
        with self._lock:
            self._is_writing = False
            publishing = self._publishing
        if publishing is not None:
            reason = OutcomeUnknown(f"interrupted: {kind_of(interrupt)}")
            self.lost(publishing.attachment, reason, is_declared=True)

    def _next_batch(self) -> Batch | None:
        if self._is_due and not self._outbox.has_waiting:
            self._is_due = False
            self.window.pack()
        batch = self._outbox.take(self._shared.clock())
        if batch is not None and self._confirm_check is None:
            self._check_confirms_in(self._options.confirm_timeout)
        return batch

    def _linger_ended(self) -> None:
        with self._lock:
            self._linger = None
            if not self._pending.messages or self._failure is not None:
                return
            left = self._pending.since + self._options.linger - self._shared.clock()
            if left > 0:  # a batch was written meanwhile, and this is the next one
                self._linger = self._shared.recovery.soon(left, self._linger_ended)
                return
            self._is_due = True
            self._write_apart()

    # Outcomes, on the connection's reading thread

    def confirmed(self, source: Attachment, publishing_ids: Sequence[int]) -> None:
        with self._lock:
            if self._publishing is None or source is not self._publishing.attachment:
                return
            owned = self._outbox.owned
            stored = self._outbox.confirm(publishing_ids)
            if stored:
                self._shared.stored(stored, owned - self._outbox.owned)
                self.reconnecting.end()
            self._notify()

    def refused(self, source: Attachment, refusals: Sequence[tuple[int, int]]) -> None:
        gone = next((code for _, code in refusals if code in _PUBLISHER_GONE), None)
        if gone is not None and self._options.name is not None:
            reason = StreamUnavailable("Publish", gone, self.stream)
            self.lost(source, reason, is_declared=True)
            return
        with self._lock:
            if self._publishing is None or source is not self._publishing.attachment:
                return
            for publishing_id, code in refusals:
                messages = self._outbox.refuse(publishing_id)
                self._settle(messages, Outcome.REFUSED, refusal("Publish", code, self.stream))
            self._notify()
        if gone is not None:
            reason = StreamUnavailable("Publish", gone, self.stream)
            self.lost(source, reason, is_declared=True)

    def lost(self, source: Attachment, reason: Exception, is_declared: bool = False) -> None:
        """The publisher is gone. One that is given up may still be declared at the broker."""
        with self._lock:
            publishing = self._publishing
            if publishing is None or source is not publishing.attachment:
                return
            self._publishing = None
            self.reconnecting.begin()
            self._give_up(self._outbox.lost(), reason)
            self._notify()
        logger.info("the publisher on %r is lost: %s", self.stream, reason)
        self.reconnecting.start(reason, publishing if is_declared else None)

    # On the threads of the environment

    def _check_confirms_in(self, delay: float) -> None:
        self._confirm_check = self._shared.recovery.soon(delay, self._check_confirms)

    def _check_confirms(self) -> None:
        timeout = self._options.confirm_timeout
        with self._lock:
            self._confirm_check = None
            oldest = self._outbox.oldest_sent_at
            publishing = self._publishing
            if oldest is None or publishing is None:
                return
            left = oldest + timeout - self._shared.clock()
            if left > 0:
                self._check_confirms_in(left)
                return
        reason = NoAnswerInTime(f"{self.stream!r}: no confirm within {timeout:g} s")
        self.lost(publishing.attachment, reason, is_declared=True)

    def _go_on(self, publishing: Publishing) -> bool:
        """There is a publisher (again). False: it is not wanted any more."""
        with self._lock:
            if self._failure is not None:
                return False
            self._publishing = publishing
            self.window.open(publishing.frame_max)
            self._is_due = bool(self._pending.messages)
            if not self._outbox.messages:
                self.reconnecting.rest()
        if publishing.attachment.is_lost:
            self.lost(publishing.attachment, Unreachable("lost while it was opened"))
        self._write_apart()
        return True

    # The end

    def close(self, timeout: float) -> None:
        """Take nothing more. What has no outcome is given up, or refused if it was never sent."""
        publishing = self._end(LocalError("the producer is closed"))
        if publishing is not None:
            publishing.end(timeout)

    def _fail(self, reason: Exception) -> None:
        logger.error("%r can't be published to any more: %s", self.stream, reason)
        publishing = self._end(reason)
        if publishing is not None:
            self._shared.recovery.schedule(0, publishing.end)

    def _end(self, reason: Exception) -> Publishing | None:
        """The publisher that is left behind, if there is one."""
        with self._lock:
            publishing, self._publishing = self._publishing, None
            if self._failure is None:
                self._failure = reason
                batches = self.window.close()
                self._give_up([batch for batch in batches if batch.sent_at is not None], reason)
                never_sent = [batch for batch in batches if batch.sent_at is None]
                self._settle(outstanding(never_sent), Outcome.REFUSED, reason)
                for timer in (self._linger, self._confirm_check):
                    if timer is not None:
                        timer.cancel()
                self._shared.changed.notify_all()
        return publishing

    def _notify(self) -> None:
        self.window.refresh()
        self._shared.changed.notify_all()

    def _give_up(self, batches: Iterable[Batch], reason: Exception) -> None:
        # What was sent must not be called retryable, whatever ended the connection is.
        unknown = OutcomeUnknown(f"sent to {self.stream!r}, but not confirmed: {reason}")
        unknown.__cause__ = reason
        self._settle(outstanding(batches), Outcome.UNKNOWN, unknown)

    def _settle(self, messages: Iterable[Failing], outcome: Outcome, cause: Exception) -> None:
        self._shared.not_stored(messages, outcome, self.stream, cause)
