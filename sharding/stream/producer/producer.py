"""`Producer`: sends messages to a stream, or to the partitions of a super stream by their keys.

    with environment.producer("invoices", name="billing") as producer:
        for body, key in rows:
            producer.send(body, key=key)
        producer.flush(timeout=30).raise_for_failures()

`send` returns as soon as the message is buffered, and waits only when too much is unconfirmed.
What becomes of the messages is told by `flush`.

* With a name, messages get rising publishing ids, and the broker drops what it has already. After
  a lost connection all that has no confirm is sent again, in order and before anything new: no
  message is lost, stored twice or out of order.
* Without, nothing is ever sent twice. What had no confirm when the connection was lost is
  reported as unknown.
* With sub-entry batches, a batch has one publishing id, its last message's. What the producer
  sends again are the same batches, so deduplication holds. An application that repeats messages
  with ids of its own must begin after `last_publishing_ids`: ones that fall into a batch together
  with new messages are stored again.
* A key that the broker binds to several partitions is sent to each, under one number; a report
  counts each copy. A key bound to none is unroutable, and stored nowhere.

* Whoever shares a producer takes a `batch()` of it: a report names the messages of one batch. What
  is sent and flushed on the producer itself is one more batch, of all who do so.

Order is kept within a partition. Safe to use from any thread; messages from one thread keep their
order. The threads behind it are daemons: a producer left open does not keep a process alive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace

from sharding.callers import Caller, SharedBatch
from sharding.errors import InvalidInput
from sharding.maps.slots import Key
from sharding.metrics.names import Subject
from sharding.outcomes import Outcome, Report, Tally
from sharding.stream.connections.background import Recovery
from sharding.stream.messages.amqp_values import AmqpValue
from sharding.stream.messages.message import Body, Properties, encoded, with_key
from sharding.stream.options import ProducerOptions
from sharding.stream.producer import publish_entries
from sharding.stream.producer.partition_writer import MAX_RESULTS, PartitionWriter, Shared
from sharding.stream.producer.partitioning import BrokerRoutes, PartitionFunction, Targets
from sharding.stream.producer.publish_entries import filter_bytes
from sharding.stream.producer.publishing import Connections, Leaders, Publishers
from sharding.stream.producer.window import Load

logger = logging.getLogger("warren.stream.producer")

_LEAVE_TIMEOUT = 0.5
"""At least so long brokers have to answer that publishers are gone; later they do so unseen."""


class Producer:
    """Made by `StreamEnvironment.producer`. Leaving a `with` block closes it, and raises if some
    message is not known to be stored.

    Its own `send` and `flush` are for one caller, or for many of whom one flushes for all. Where
    several flush, each takes a `batch()`, and is told of his own messages.
    """

    def __init__(
        self,
        streams: Sequence[str],
        routing: PartitionFunction | BrokerRoutes,
        leaders: Leaders,
        connections: Connections,
        recovery: Recovery,
        options: ProducerOptions,
        *,
        target: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.counted_as = Subject("producer", {"stream": target or streams[0]})
        self._clock = clock
        publishers = Publishers(
            leaders,
            connections,
            name=options.name,
            later=recovery,
            filtering=options.filtering,
            clock=clock,
        )
        self._shared = Shared(options, publishers, recovery, clock)
        self._lock = self._shared.lock
        self._next_number = 0
        self._writers = tuple(
            PartitionWriter(stream, self._shared) for stream in dict.fromkeys(streams)
        )
        writers = {writer.stream: writer for writer in self._writers}
        self._targets = Targets(writers, routing, bound=streams)
        self._only = self._targets.only
        self._open()

    def _open(self) -> None:
        deadline = self._clock() + self.options.open_timeout
        try:
            for writer in self._writers:
                writer.open(deadline)
        except BaseException:
            for writer in self._writers:
                writer.close(timeout=1)
            raise

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        report = self.close()
        if kind is None:
            report.raise_for_failures()

    def __repr__(self) -> str:
        name = f" {self.options.name!r}" if self.options.name else ""
        streams = ", ".join(repr(writer.stream) for writer in self._writers[:3])
        more = ", …" if len(self._writers) > 3 else ""
        return f"<Producer{name} to {streams}{more}>"

    @property
    def last_publishing_ids(self) -> Mapping[str, int]:
        """By stream: the last id given to a message, or found when the producer was made."""
        with self._lock:
            return {writer.stream: writer.window.pending.last_id for writer in self._writers}

    @property
    def counters(self) -> Mapping[str, float]:
        with self._lock:
            return {
                "accepted": sum(each.window.accepted for each in self._writers),
                **{str(each): self._shared.settled[each] for each in Outcome},
                "recoveries": sum(each.reconnecting.recoveries for each in self._writers),
                "longest_recovery": max(each.reconnecting.longest for each in self._writers),
            }

    @property
    def largest_message(self) -> int:
        """How many bytes an encoded message may have, to fit into a frame of any partition."""
        return min(writer.window.largest_message for writer in self._writers)

    def partition(self, key: Key) -> str:
        """The stream that a key goes to; the first of them if the broker binds it to several."""
        return self._targets.of(key)[0].stream

    # Sending

    def send(
        self,
        body: Body = b"",
        *,
        key: Key | None = None,
        properties: Properties | None = None,
        application_properties: Mapping[str, AmqpValue] | None = None,
        filter_value: str | None = None,
        publishing_id: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Hand over one message; returns its number, by which a report names it.

        Waits for room up to `timeout` (by default `send_timeout`), then raises `Overloaded` and
        the message is not sent. The call that fills a batch also writes it, which takes at most
        `send_timeout` more.
        """
        if (
            properties is None
            and application_properties is None
            and filter_value is None
            and publishing_id is None
        ):
            # The way of most messages: every step here counts.
            writer = None
            if body.__class__ is bytes:
                if key is None:
                    writer, message, is_plain = self._only, body, True
                elif self._targets.has_function:
                    writer = self._targets.by_function(key)
                    message, is_plain = with_key(key, body), False
            if writer is not None:
                with self._lock:
                    window = writer.window
                    pending = window.pending
                    size = pending.size + len(message)
                    if (
                        0 < len(pending.messages) < window.quick_messages
                        and size < window.quick_bytes
                        and pending.plain is is_plain
                    ):
                        number = self._next_number
                        try:
                            pending.numbers.append(number)
                            pending.messages.append(message)
                            pending.size = size
                            self._next_number = number + 1
                            return number
                        except BaseException:  # a signal's: not one without the other
                            pending.cut(min(len(pending.numbers), len(pending.messages)))
                            self._next_number = number + 1
                            raise
        return self._send(
            None,
            body,
            key,
            properties,
            application_properties,
            filter_value,
            publishing_id,
            timeout,
        )

    def send_many(
        self,
        bodies: Sequence[bytes],
        keys: Sequence[Key] | None = None,
        *,
        filter_values: Sequence[str | None] | None = None,
        publishing_ids: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> range:
        """Hand over many messages, the fastest way; returns their numbers.

        Raises only if none was taken. If the time is up, or a partition fails, after some were,
        the others are reported as refused.
        """
        return self._send_many(None, bodies, keys, filter_values, publishing_ids, timeout)

    def send_encoded(
        self,
        messages: Sequence[bytes],
        keys: Sequence[Key] | None = None,
        *,
        filter_values: Sequence[str | None] | None = None,
        publishing_ids: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> range:
        """`send_many` for AMQP 1.0 messages; `keys` only choose partitions."""
        return self._send_encoded(None, messages, keys, filter_values, publishing_ids, timeout)

    def batch(self) -> Batch:
        """For one of several who share this producer: its reports name its own messages only."""
        with self._lock:
            return Batch(self, self._shared.callers.new())

    # Outcomes

    def flush(self, timeout: float) -> Report:
        """Write what is buffered, wait for every outcome, and report those since the last flush.

        If some have none when the time is up, `pending` counts what a later report will have.
        Messages that other threads send meanwhile are not waited for. What is sent through a
        `batch()` is told by that, or here if nobody has the batch any more.
        """
        return self._flush(self._shared.callers.own, timeout)

    def close(self, timeout: float = 10) -> Report:
        """Flush within `timeout`, then end. What has no outcome by then is unknown for good.

        The report holds all outcomes that none has told yet, those of batches too; each batch tells
        its own once more. Failures are logged as well.
        """
        deadline = self._clock() + timeout
        with self._lock:
            self._wait_for({each: each.window.accepted for each in self._writers}, deadline)
        deadline = max(deadline, self._clock() + _LEAVE_TIMEOUT)
        for writer in self._writers:
            # Never 0: brokers are told at least, before they are asked for the same name again.
            writer.close(max(0.01, deadline - self._clock()))
        with self._lock:
            last = Tally(MAX_RESULTS)
            self._shared.callers.gather(last)
            report = last.report()
        if not report.all_stored:
            logger.warning("%r is closed: %s", self, report)
        return report

    def _flush(self, caller: Caller, timeout: float) -> Report:
        with self._lock:
            counts = {writer: self._accepted_of(caller, writer) for writer in self._writers}
            is_settled = self._wait_for(counts, self._clock() + timeout)
            pending = self._pending_of(caller)
            return self._shared.callers.report(caller, pending, is_settled=is_settled)

    def _accepted_of(self, caller: Caller, writer: PartitionWriter) -> int:
        """Locked: how many messages a partition had taken with the last that he waits for."""
        window = writer.window
        if caller is not self._shared.callers.own:
            return window.accepted_of(caller)
        return window.accepted if window.own_unsettled else 0

    def _pending_of(self, caller: Caller) -> int:
        """Locked."""
        if caller is not self._shared.callers.own:
            return caller.pending
        return sum(writer.window.own_unsettled for writer in self._writers)

    def _wait_for(self, counts: Mapping[PartitionWriter, int], deadline: float) -> bool:
        """Locked: whether so many messages of each partition have got their outcome."""
        for writer in self._writers:
            writer.write_soon()
        while not all(writer.window.has_settled(count) for writer, count in counts.items()):
            left = deadline - self._clock()
            if left <= 0:
                return False
            self._shared.changed.wait(left)
        return True

    # For batches, and the long way for the producer itself

    def _send(
        self,
        caller: Caller | None,
        body: Body,
        key: Key | None,
        properties: Properties | None,
        application_properties: Mapping[str, AmqpValue] | None,
        filter_value: str | None,
        publishing_id: int | None,
        timeout: float | None,
    ) -> int:
        message, is_plain = encoded(body, key, properties, application_properties)
        load = Load(
            (message,),
            (0,),
            is_plain,
            None if filter_value is None else self._filters((filter_value,)),
            None if publishing_id is None else (publishing_id,),
            caller,
        )
        return self._send_one(self._targets.of(key), load, self._deadline(timeout))

    def _send_many(
        self,
        caller: Caller | None,
        bodies: Sequence[bytes],
        keys: Sequence[Key] | None,
        filter_values: Sequence[str | None] | None,
        ids: Sequence[int] | None,
        timeout: float | None,
    ) -> range:
        if keys is None:
            load = self._load(caller, bodies, True, filter_values, ids)
        else:
            _check_count("keys", keys, bodies)
            messages = list(map(with_key, keys, bodies))
            load = self._load(caller, messages, False, filter_values, ids)
        return self._send_all(load, keys, self._deadline(timeout))

    def _send_encoded(
        self,
        caller: Caller | None,
        messages: Sequence[bytes],
        keys: Sequence[Key] | None,
        filter_values: Sequence[str | None] | None,
        ids: Sequence[int] | None,
        timeout: float | None,
    ) -> range:
        load = self._load(caller, messages, False, filter_values, ids)
        return self._send_all(load, keys, self._deadline(timeout))

    # Preparing

    def _load(
        self,
        caller: Caller | None,
        messages: Sequence[bytes],
        is_plain: bool,
        filter_values: Sequence[str | None] | None,
        ids: Sequence[int] | None,
    ) -> Load:
        if not set(map(type, messages)) <= {bytes}:
            raise InvalidInput("messages", "must all be bytes", set(map(type, messages)))
        _check_count("filter_values", filter_values, messages)
        _check_count("publishing_ids", ids, messages)
        filters = None if filter_values is None else self._filters(filter_values)
        return Load(messages, range(len(messages)), is_plain, filters, ids, caller)

    def _filters(self, values: Sequence[str | None]) -> list[bytes | None]:
        if not self.options.filtering:
            raise InvalidInput("filter_value", "needs a producer with filtering=True", values[0])
        return list(map(filter_bytes, values))

    def _check_size(self, writer: PartitionWriter, load: Load) -> None:
        largest = writer.window.largest_message - (
            publish_entries.DATA_OVERHEAD if load.plain else 0
        )
        if load.longest > largest:
            rule = f"must fit into a frame, so have {largest} bytes at most; raise frame_max"
            raise InvalidInput("body", rule, f"{load.longest} bytes")

    def _deadline(self, timeout: float | None) -> float:
        return self._clock() + (self.options.send_timeout if timeout is None else timeout)

    # Handing over

    def _send_one(self, writers: Sequence[PartitionWriter], load: Load, deadline: float) -> int:
        for writer in writers:
            self._check_size(writer, load)
        with self._lock:
            # While one is waited for, those before it may fill up, or fail.
            while any(writer.wait_for_room(deadline) for writer in writers):
                continue
            for writer in writers:
                if load.ids is not None:
                    writer.window.pending.check_ids(load.ids)
            numbers = self._take_numbers(load)
            load = replace(load, numbers=numbers)
            full = [writer for writer in writers if writer.add(load)]
        for writer in full:
            writer.write()
        return numbers[0]

    def _send_all(self, load: Load, keys: Sequence[Key] | None, deadline: float) -> range:
        _check_count("keys", keys, load)
        shares, unroutable = self._targets.spread(keys, len(load))
        for writer in shares:
            self._check_size(writer, load)
        with self._lock:
            numbers = self._take_numbers(load)
        load = replace(load, numbers=numbers)
        taken = 0
        for writer, positions in shares.items():
            share = load if len(positions) == len(load) else load.chosen(positions)
            count, error = writer.add_many(share, deadline)
            taken += count
            if error is not None:
                if not taken:
                    raise error
                self._not_sent(share.part(count, len(share)), Outcome.REFUSED, writer.stream, error)
        for position, reason in unroutable.items():
            self._not_sent(load.part(position, position + 1), Outcome.UNROUTABLE, None, reason)
        return numbers

    def _not_sent(
        self, load: Load, outcome: Outcome, stream: str | None, reason: Exception
    ) -> None:
        with self._lock:
            self._shared.not_stored(load.failing(), outcome, stream, reason, were_pending=False)

    def _take_numbers(self, load: Load) -> range:
        """Locked."""
        first, count = self._next_number, len(load)
        self._next_number = first + count
        if load.caller is not None:
            self._shared.callers.sends(load.caller)
        return range(first, first + count)


class Batch(SharedBatch[Producer, Caller]):
    """What one of several callers sends: made by `Producer.batch`. Numbers are the producer's."""

    def send(
        self,
        body: Body = b"",
        *,
        key: Key | None = None,
        properties: Properties | None = None,
        application_properties: Mapping[str, AmqpValue] | None = None,
        filter_value: str | None = None,
        publishing_id: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """As `Producer.send`."""
        return self._of._send(
            *(self._caller, body, key, properties, application_properties),
            *(filter_value, publishing_id, timeout),
        )

    def send_many(
        self,
        bodies: Sequence[bytes],
        keys: Sequence[Key] | None = None,
        *,
        filter_values: Sequence[str | None] | None = None,
        publishing_ids: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> range:
        """As `Producer.send_many`."""
        return self._of._send_many(
            self._caller, bodies, keys, filter_values, publishing_ids, timeout
        )

    def send_encoded(
        self,
        messages: Sequence[bytes],
        keys: Sequence[Key] | None = None,
        *,
        filter_values: Sequence[str | None] | None = None,
        publishing_ids: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> range:
        """As `Producer.send_encoded`."""
        return self._of._send_encoded(
            self._caller, messages, keys, filter_values, publishing_ids, timeout
        )

    def flush(self, timeout: float = 30.0) -> Report:
        """As `Producer.flush`, for what was sent through this batch."""
        return self._of._flush(self._caller, timeout)


def _check_count(what: str, values: Sized | None, messages: Sized) -> None:
    if values is not None and len(values) != len(messages):
        raise InvalidInput(what, f"must be as many as messages, {len(messages)}", len(values))
