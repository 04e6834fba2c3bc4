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

Order is kept within a partition. Safe to use from any thread; messages from one thread keep their
order. The threads behind it are daemons: a producer left open does not keep a process alive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sharding.errors import InvalidInput, LocalError, WarrenError
from sharding.hashing import Key
from sharding.stream import entries
from sharding.stream.amqp_types import AmqpValue
from sharding.stream.broker_routes import BrokerRoutes
from sharding.stream.entries import filter_bytes
from sharding.stream.errors import NoAnswerInTime
from sharding.stream.keyed import text_of, with_key
from sharding.stream.message import encode_message
from sharding.stream.partition_writer import PartitionWriter, Shared
from sharding.stream.partitioning import PartitionFunction
from sharding.stream.producer_options import ProducerOptions
from sharding.stream.properties import Properties
from sharding.stream.publishing import Connections, Leaders, Publishers
from sharding.stream.recovery import Recovery
from sharding.stream.report import Report

logger = logging.getLogger("warren.stream.producer")

Body = bytes | bytearray | memoryview


class Unroutable(LocalError):
    """No partition of the super stream is bound to the key."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self._routing = routing
        self._clock = clock
        publishers = Publishers(
            leaders, connections, name=options.name, filtering=options.filtering, clock=clock
        )
        self._shared = Shared(options, publishers, recovery, clock)
        self._lock = self._shared.lock
        self._next_number = 0
        self._is_closed = False
        self._writers = tuple(PartitionWriter(stream, self._shared) for stream in streams)
        self._by_stream = {writer.stream: writer for writer in self._writers}
        self._only = self._writers[0]
        self._takes_bodies = len(self._writers) == 1
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
            return {writer.stream: writer.pending.last_id for writer in self._writers}

    @property
    def counters(self) -> Mapping[str, float]:
        with self._lock:
            return {
                "recoveries": sum(writer.recoveries for writer in self._writers),
                "longest_recovery": max(writer.longest_recovery for writer in self._writers),
            }

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
        if key is properties is application_properties is filter_value is publishing_id is None:
            if self._takes_bodies and body.__class__ is bytes:
                # The way of most messages: every step here counts.
                writer = self._only
                with self._lock:
                    pending = writer.pending
                    size = pending.size + len(body)
                    if 0 < len(pending.messages) < writer.quick_messages and (
                        size < writer.quick_bytes
                    ):
                        pending.messages.append(body)  # type: ignore[arg-type]
                        pending.size = size
                        number = self._next_number
                        pending.numbers.append(number)
                        self._next_number = number + 1
                        return number
        message, is_plain = self._message(body, key, properties, application_properties)
        filters = self._filters([filter_value], 1) if filter_value is not None else None
        ids = None if publishing_id is None else (publishing_id,)
        deadline = self._clock() + (self.options.send_timeout if timeout is None else timeout)
        return self._send_one(self._targets(key), message, is_plain, filters, ids, deadline)

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
            return self._send_all(bodies, None, True, filter_values, publishing_ids, timeout)
        messages = list(map(with_key, keys, bodies))
        return self._send_all(messages, keys, False, filter_values, publishing_ids, timeout)

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
        return self._send_all(messages, keys, False, filter_values, publishing_ids, timeout)

    def _message(
        self,
        body: Body,
        key: Key | None,
        properties: Properties | None,
        application_properties: Mapping[str, AmqpValue] | None,
    ) -> tuple[bytes, bool]:
        """The encoded message; or the body, and True, if there is nothing else."""
        if not isinstance(body, bytes | bytearray | memoryview):
            raise InvalidInput("body", "must be bytes", body)
        content = bytes(body)
        if properties is None and application_properties is None:
            return (content, True) if key is None else (with_key(key, content), False)
        message = encode_message(
            content,
            key=None if key is None else text_of(key),
            properties=properties,
            application_properties=application_properties,
        )
        return message, False

    def _send_one(
        self,
        writers: Sequence[PartitionWriter],
        message: bytes,
        is_plain: bool,
        filters: Sequence[bytes | None] | None,
        ids: Sequence[int] | None,
        deadline: float,
    ) -> int:
        size = len(message) + (len(filters[0] or b"") if filters else 0)
        for writer in writers:
            self._check_size(writer, size, is_plain)
        with self._lock:
            for writer in writers:
                writer.wait_for_room(deadline)
                if ids is not None:
                    writer.pending.check_ids(ids)
            numbers = self._take_numbers(1)
            full = [
                writer
                for writer in writers
                if writer.add((message,), numbers, plain=is_plain, filters=filters, ids=ids)
            ]
        for writer in full:
            writer.write()
        return numbers[0]

    def _send_all(
        self,
        messages: Sequence[bytes],
        keys: Sequence[Key] | None,
        is_plain: bool,
        filter_values: Sequence[str | None] | None,
        ids: Sequence[int] | None,
        timeout: float | None,
    ) -> range:
        for what, values in (
            ("keys", keys),
            ("filter_values", filter_values),
            ("publishing_ids", ids),
        ):
            if values is not None and len(values) != len(messages):
                raise InvalidInput(what, f"must be as many as messages, {len(messages)}", len(values))
        if not set(map(type, messages)) <= {bytes}:
            raise InvalidInput("bodies", "must all be bytes", set(map(type, messages)))
        filters = None if filter_values is None else self._filters(filter_values)
        deadline = self._clock() + (self.options.send_timeout if timeout is None else timeout)
        shares, unroutable = self._shares(len(messages), keys)
        longest = max(map(len, messages), default=0)
        longest += max((len(each or b"") for each in filters), default=0) if filters else 0
        for writer in shares:
            self._check_size(writer, longest, is_plain)
        with self._lock:
            numbers = self._take_numbers(len(messages))
            self._shared.tally.refuse(
                Failure(numbers[position], "", None, reason) for position, reason in unroutable
            )
        taken = len(unroutable)
        for writer, chosen in shares.items():
            part = _Share(messages, numbers, filters, ids, chosen)
            count, error = writer.add_many(part, plain=is_plain, deadline=deadline)
            taken += count
            if error is not None and not taken:
                raise error
            if error is not None:
                with self._lock:
                    self._shared.tally.refuse(part.failures(writer.stream, count, error))
        return numbers
