"""`ShardedPublisher`: the publisher for volume. Confirmed, windowed, over one thread of its own.

    with ShardedPublisher(routing, "images") as publisher:
        publisher.publish("user-42", b"...")
        report = publisher.flush(timeout=30)

* Whoever shares a publisher takes a `batch()` of it: a report names the messages of one batch. What
  is published and flushed on the publisher itself is one more batch, of all who do so.
* One connection to each node that holds shards, opened when first needed; all of them on one I/O
  loop in one thread. `publish` puts a message into a shared list and wakes that thread once for a
  whole batch.
* The key decides the shard by the map in force at that moment. Within a shard messages are sent in
  order; what waits for a connection is sent after it is back, in order, until its deadline. So all
  that is reported stored is in order. What a connection had on its way when it was given up is
  reported unknown, and may be stored behind what the next one sends.
* Nothing is sent twice. What becomes of a message, also when the map changes, is ruled in
  `ledger`.
* A message is sent through the exchange of the logical queue's name, under its own key, with its
  shard in `BCC`, so that consumers see what was published. `through="default"` goes straight to the
  shard's queue: cheaper, and consumers see the default exchange and the shard's name.
* A connection on which a message was not confirmed in time is sent no more. When nothing on it has
  time left it is dropped and made again: a node that was frozen may never confirm what it got
  before (seen), and messages that are not sent can at least be refused instead of unknown. A
  connection that the broker blocks is left alone; what was sent on it is stored when the alarm
  ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal

import pika

from sharding.callers import Caller, Callers, SharedBatch
from sharding.cluster.topology import Routing
from sharding.errors import InvalidInput, LocalError, ShardUnavailable, TryLater
from sharding.maps.naming import MAX_NAME_BYTES
from sharding.maps.shard_map import ShardKind, ShardMap
from sharding.maps.slots import Key
from sharding.metrics.names import Subject
from sharding.outcomes import Outcome, Report, Result, Tally
from sharding.publishing.addressing import Encoded
from sharding.publishing.io_thread import IoThread, OutgoingMessage, wire
from sharding.publishing.ledger import Account, Ledger, Message, Wait

log = logging.getLogger("warren.publisher")

CLOSING_SHARE = 0.25
"""The part of close()'s time, a second at most, that is kept for the connections to end."""


class WindowFull(TryLater):
    """No room came free in time; nothing was sent, and the same call may be made again."""


class PublisherClosed(LocalError):
    """The publisher was closed, or its thread has ended."""


class _Caller(Caller):
    """With the account that the I/O thread keeps for him."""

    def __init__(self, max_results: int) -> None:
        super().__init__(max_results)
        self.account = Account(max_results)

    @property
    def key(self) -> Account:
        return self.account


class ShardedPublisher:
    """Publishes to the shards of one logical queue. Any thread may use it. Leaving a `with` block
    closes it, and raises if some message is not stored that no report has named.

    Its own `publish` and `flush` are for one caller, or for many of whom one flushes for all.
    Where several flush, each takes a `batch()`, and is told of his own messages.

    `window` and `window_bytes` bound what is queued and unconfirmed; `publish` waits for room.
    `confirm_timeout` is each message's time from the moment it is accepted until it is settled.
    `on_result` is called with every `Result` in the publisher's own thread: it has to be quick.
    `max_results` bounds how many messages that are not stored are remembered between two reports
    of a batch.
    `max_message_bytes` is RabbitMQ 4's own limit; a larger body would make the broker end the
    channel and leave the outcome of everything else on it unknown.
    """

    _clock: Callable[[], float] = staticmethod(time.monotonic)
    """In whose seconds `confirm_timeout` is counted; a test has its own."""

    def __init__(
        self,
        routing: Routing,
        logical: str,
        *,
        window: int = 2_000,
        window_bytes: int = 64 * 1024 * 1024,
        confirm_timeout: float = 10.0,
        through: Literal["exchange", "default"] = "exchange",
        on_result: Callable[[Result], None] | None = None,
        max_results: int = 10_000,
        max_message_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        if through not in ("exchange", "default"):
            raise InvalidInput("through", "must be 'exchange' or 'default'", through)
        for field, value in (("window", window), ("confirm_timeout", confirm_timeout)):
            if not value > 0:
                raise InvalidInput(field, "must be greater than 0", value)
        self.logical = logical
        self.counted_as = Subject("publisher", {"logical": logical})
        self._routing = routing
        self._by_exchange = through == "exchange"
        self._window = window
        self._window_bytes = window_bytes
        self._max_body = min(window_bytes, max_message_bytes)
        self._confirm_timeout = confirm_timeout
        self._checked: ShardMap | None = None
        shard_map = self._map_in_force()

        # All of this is shared between threads, under the lock.
        self._lock = threading.Condition()
        self._waiters = 0
        self._used = 0
        self._used_bytes = 0
        self._next_number = 0
        self._inbox: list[OutgoingMessage] = []
        self._woken = False
        self._max_results = max_results
        self._callers = Callers(lambda: _Caller(max_results))
        self._settled: Counter[Outcome] = Counter()
        self._closed = False
        self._closing = 0
        self._last = Tally(max_results)  # what those who close it now are told
        self._ended = False

        self._io_thread = IoThread(self, shard_map, Ledger(shard_map, on_result=_guard(on_result)))
        self._thread = threading.Thread(
            target=self._io_thread.run, name=f"warren-publisher-{logical}", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._used} of {self._window} unsettled"
        return f"<ShardedPublisher {self.logical!r}: {state}>"

    @property
    def counters(self) -> Mapping[str, float]:
        """How many messages were accepted and what became of them, since the beginning."""
        with self._lock:
            counts = {"accepted": self._next_number, "unsettled": self._used}
            return counts | {str(each): self._settled[each] for each in Outcome}

    def __enter__(self) -> ShardedPublisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        report = self.close()
        if kind is None:
            report.raise_for_failures()

    def publish(
        self,
        key: Key,
        body: bytes | bytearray | memoryview,
        properties: pika.BasicProperties | None = None,
        *,
        timeout: float = 30.0,
    ) -> int:
        """Accept a message and return its number; waits up to `timeout` while the window is full.

        Without properties the message is persistent. Raises, with nothing queued: `InvalidInput`,
        `ShardUnavailable` if the key's shard is away, `WindowFull`, `PublisherClosed`, and
        whatever `routing.shard_map` raises.
        """
        return self._publish(self._callers.own, key, body, properties, timeout)

    def batch(self) -> Batch:
        """For one of several who share this publisher: its reports name its own messages only."""
        with self._lock:
            return Batch(self, self._callers.new())

    def flush(self, timeout: float = 30.0) -> Report:
        """Wait until all that was published before is settled, and report since the last report.

        After `timeout` it reports what there is; `pending` counts what a later report will have.
        What other threads publish meanwhile is not waited for. What is published through a
        `batch()` is told by that, or here if nobody has the batch any more.
        """
        return self._flush(self._callers.own, timeout)

    def close(self, timeout: float = 30.0) -> Report:
        """Flush, give up what is unsettled when the time is over, and end the connections.

        What was not sent is then REFUSED, what was sent UNKNOWN. Returns what no report has told
        yet, that of batches too; each batch tells its own once more. If several close it at the
        same time, the shortest time counts, and all get the same report.
        """
        self._check_thread("close")
        began = time.monotonic()
        share = min(1.0, timeout * CLOSING_SHARE)
        with self._lock:
            self._closed = True
            self._closing += 1
            self._lock.notify_all()
        try:
            with self._lock:
                self._wait(lambda: not self._used, began + timeout - share)
            self._io_thread.stop(max(0.0, began + timeout - time.monotonic()) * 0.8)
            self._thread.join(max(0.0, began + timeout - time.monotonic()))
            with self._lock:
                self._callers.gather(self._last)
                return self._last.report(pending=self._used)
        finally:
            with self._lock:
                self._closing -= 1
                if not self._closing:
                    self._last = Tally(self._max_results)

    # For batches.

    def _publish(
        self,
        caller: _Caller,
        key: Key,
        body: bytes | bytearray | memoryview,
        properties: pika.BasicProperties | None,
        timeout: float,
    ) -> int:
        shard_map = self._map_in_force()
        shard = shard_map.shard_of(key).name
        if not isinstance(key, str | bytes):
            key = bytes(key)
        self._check_key(key, shard_map)
        if not isinstance(body, bytes):
            body = _to_bytes(body)
        size = len(body)
        if size > self._max_body:
            rule = f"must be at most {self._max_body} bytes (max_message_bytes, window_bytes)"
            raise InvalidInput("body", rule, size)
        if self._routing.unavailable(shard):
            raise ShardUnavailable(
                f"{shard!r} is away, and its keys go nowhere else; try again when it is back"
            )
        encoded = None
        if properties is not None:
            encoded = Encoded(properties, shard if self._by_exchange else None)
        with self._lock:
            if (
                self._used >= self._window
                or self._used_bytes + size > self._window_bytes
                or self._closed
            ):
                self._wait_for_room(size, timeout)
            number = self._next_number
            self._next_number = number + 1
            self._used += 1
            self._used_bytes += size
            account = caller.account
            if not caller.pending:
                self._callers.sends(caller)
            caller.pending += 1
            deadline = self._clock() + self._confirm_timeout
            self._inbox.append(Message(number, key, shard, body, encoded, deadline, account))
            wake = not self._woken
            self._woken = True
        if wake:
            self._io_thread.wake()
        return number

    def _flush(self, caller: _Caller, timeout: float) -> Report:
        self._check_thread("flush")
        deadline = time.monotonic() + timeout
        with self._lock:
            is_settled = self._wait_until_settled(caller, deadline)
            return self._callers.report(caller, caller.pending, is_settled=is_settled)

    # For application threads, with the lock held.

    def _wait_for_room(self, size: int, timeout: float) -> None:
        if threading.current_thread() is self._thread:
            timeout = 0.0  # on_result may publish, but never wait for itself
        deadline = time.monotonic() + timeout
        self._waiters += 1
        try:
            while not self._closed and (
                self._used >= self._window or self._used_bytes + size > self._window_bytes
            ):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WindowFull(
                        f"no room for another message within {timeout:g} s: {self._used} of "
                        f"{self._window} messages and {self._used_bytes} of {self._window_bytes} "
                        "bytes are unconfirmed; publish more slowly or raise window, window_bytes"
                    )
                self._lock.wait(left)
        finally:
            self._waiters -= 1
        if self._closed:
            raise PublisherClosed(f"the publisher of {self.logical!r} is closed")

    def _wait_until_settled(self, caller: _Caller, deadline: float) -> bool:
        """Whether all that this caller had published before is settled."""
        if not caller.pending or deadline <= time.monotonic():
            return not caller.pending
        wait = Wait(caller.account, self._next_number - 1)
        self._io_thread.watch(wait)
        try:
            self._wait(lambda: wait.is_over or not caller.pending or self._ended, deadline)
        finally:
            wait.given_up = True
        return wait.is_over or not caller.pending

    def _wait(self, is_over: Callable[[], bool], deadline: float) -> None:
        self._waiters += 1
        try:
            while not is_over() and not self._ended:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._lock.wait(left)
        finally:
            self._waiters -= 1

    # For the I/O thread.

    def _take_inbox(self) -> list[OutgoingMessage]:
        with self._lock:
            batch, self._inbox = self._inbox, []
            self._woken = False
        return batch

    def _release(self, ledger: Ledger[Encoded | None], *, ended: bool = False) -> None:
        freed, freed_bytes = ledger.take_freed()
        with self._lock:
            self._used -= freed
            self._used_bytes -= freed_bytes
            for account in ledger.take_changed():
                caller = self._callers[account]
                caller.pending -= account.freed
                account.freed = 0
                self._settled.update(account.tally.counts)
                caller.tally.absorb(account.tally)
            for wait in ledger.take_ended_waits():
                wait.is_over = True
            if ended:
                self._closed = self._ended = True
            if self._waiters:
                self._lock.notify_all()

    # Checks.

    def _map_in_force(self) -> ShardMap:
        shard_map = self._routing.shard_map(self.logical)
        if shard_map is None:
            rule = (
                "must be sharded: set a policy that matches it (warren policy set), "
                "or publish to it with a plain channel"
            )
            raise InvalidInput("logical queue", rule, self.logical)
        return shard_map

    def _check_key(self, key: Key, shard_map: ShardMap) -> None:
        on_the_wire = wire(key)
        if len(on_the_wire) > MAX_NAME_BYTES:
            rule = f"must be at most {MAX_NAME_BYTES} bytes to be an AMQP routing key"
            raise InvalidInput("key", rule, key)
        if self._checked is not shard_map:
            if self._by_exchange and shard_map.kind is ShardKind.STREAM:
                rule = "must not be a super stream: publish to it with a stream producer"
                raise InvalidInput("logical queue", rule, self.logical)
            self._checked = shard_map
        if self._by_exchange and shard_map.leads_to_shard(key):
            # The shards are bound under their names: it would be routed to two of them.
            raise InvalidInput("key", "must not be the name of a shard", key)

    def _check_thread(self, what: str) -> None:
        if threading.current_thread() is self._thread:
            raise LocalError(f"{what}() can't be called from on_result: it would wait for itself")


class Batch(SharedBatch[ShardedPublisher, _Caller]):
    """What one of several callers publishes: made by `ShardedPublisher.batch`."""

    def publish(
        self,
        key: Key,
        body: bytes | bytearray | memoryview,
        properties: pika.BasicProperties | None = None,
        *,
        timeout: float = 30.0,
    ) -> int:
        """As `ShardedPublisher.publish`; numbers are the publisher's."""
        return self._of._publish(self._caller, key, body, properties, timeout)

    def flush(self, timeout: float = 30.0) -> Report:
        """As `ShardedPublisher.flush`, for what was published through this batch."""
        return self._of._flush(self._caller, timeout)


def _to_bytes(body: object) -> bytes:
    if isinstance(body, bytearray | memoryview):
        return bytes(body)
    raise InvalidInput("body", "must be bytes", body)


def _guard(on_result: Callable[[Result], None] | None) -> Callable[[Result], None] | None:
    if on_result is None:
        return None

    def guarded(result: Result) -> None:
        try:
            on_result(result)
        except BaseException:  # an exit too would end the thread, and with it all that waits
            log.exception("on_result failed for message %d", result.number)

    return guarded
