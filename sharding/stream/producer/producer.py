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

Order is kept within a partition. Safe to use from any thread; messages from one thread keep their
order. The threads behind it are daemons: a producer left open does not keep a process alive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace

from sharding.errors import InvalidInput
from sharding.maps.slots import Key
from sharding.metrics.sources import Subject
from sharding.outcomes import Outcome, Report
from sharding.stream.connections.background import Recovery
from sharding.stream.messages.amqp_values import AmqpValue
from sharding.stream.messages.message import Body, Properties, encoded, with_key
from sharding.stream.options import ProducerOptions
from sharding.stream.producer import publish_frames
from sharding.stream.producer.outbox import results
from sharding.stream.producer.partition_writer import PartitionWriter, Shared
from sharding.stream.producer.partitioning import BrokerRoutes, PartitionFunction, Targets
from sharding.stream.producer.publish_frames import filter_bytes
from sharding.stream.producer.publishing import Connections, Leaders, Publishers
from sharding.stream.producer.window import Load

logger = logging.getLogger("warren.stream.producer")


class Producer:
    """Made by `StreamEnvironment.producer`. Leaving a `with` block closes it, and raises if some
    message is not known to be stored."""

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
            leaders, connections, name=options.name, filtering=options.filtering, clock=clock
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
                **self._shared.tally.totals,
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
        message, is_plain = encoded(body, key, properties, application_properties)
        load = Load(
            (message,),
            (0,),
            is_plain,
            None if filter_value is None else self._filters((filter_value,)),
            None if publishing_id is None else (publishing_id,),
        )
        return self._send_one(self._targets.of(key), load, self._deadline(timeout))

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
        if keys is None:
            load = self._load(bodies, True, filter_values, publishing_ids)
        else:
            _check_count("keys", keys, bodies)
            messages = list(map(with_key, keys, bodies))
            load = self._load(messages, False, filter_values, publishing_ids)
        return self._send_all(load, keys, self._deadline(timeout))

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
        load = self._load(messages, False, filter_values, publishing_ids)
        return self._send_all(load, keys, self._deadline(timeout))

    # Outcomes

    def flush(self, timeout: float) -> Report:
        """Write what is buffered, wait for every outcome, and report those since the last flush.

        If some have none when the time is up, `pending` counts what a later report will have.
        Messages that other threads send meanwhile are not waited for.
        """
        with self._lock:
            is_settled = self._wait_for_outcomes(self._clock() + timeout)
            unsettled = sum(writer.window.unsettled for writer in self._writers)
            return self._shared.tally.take_report(pending=0 if is_settled else unsettled)

    def close(self, timeout: float = 10) -> Report:
        """Flush within `timeout`, then end. What has no outcome by then is unknown for good.

        The report holds all outcomes since the last flush; failures are logged as well.
        """
        deadline = self._clock() + timeout
        with self._lock:
            self._wait_for_outcomes(deadline)
        for writer in self._writers:
            writer.close(max(0.5, deadline - self._clock()))
        with self._lock:
            report = self._shared.tally.take_report()
        if not report.all_stored:
            logger.warning("%r is closed: %s", self, report)
        return report

    def _wait_for_outcomes(self, deadline: float) -> bool:
        """Locked: whether every message that was there when this began has its outcome."""
        counts = {writer: writer.window.accepted for writer in self._writers}
        for writer in self._writers:
            writer.write_soon()
        while not all(writer.window.has_settled(count) for writer, count in counts.items()):
            left = deadline - self._clock()
            if left <= 0:
                return False
            self._shared.changed.wait(left)
        return True

    # Preparing

    def _load(
        self,
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
        return Load(messages, range(len(messages)), is_plain, filters, ids)

    def _filters(self, values: Sequence[str | None]) -> list[bytes | None]:
        if not self.options.filtering:
            raise InvalidInput("filter_value", "needs a producer with filtering=True", values[0])
        return list(map(filter_bytes, values))

    def _check_size(self, writer: PartitionWriter, load: Load) -> None:
        largest = writer.window.largest_message - (
            publish_frames.DATA_OVERHEAD if load.plain else 0
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
            for writer in writers:
                writer.wait_for_room(deadline)
                if load.ids is not None:
                    writer.window.pending.check_ids(load.ids)
            numbers = self._take_numbers(1)
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
            numbers = self._take_numbers(len(load))
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
            self._shared.tally.add(results(load.named(), outcome, stream, reason))

    def _take_numbers(self, count: int) -> range:
        """Locked."""
        first = self._next_number
        self._next_number = first + count
        return range(first, first + count)


def _check_count(what: str, values: Sized | None, messages: Sized) -> None:
    if values is not None and len(values) != len(messages):
        raise InvalidInput(what, f"must be as many as messages, {len(messages)}", len(values))
