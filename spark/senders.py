"""Publishes the rows of a task to a stream or a super stream, and waits for every confirm.

Rows that a failed task has stored are stored again by the next try: these are for the plain sink.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from sharding.stream.messages.codecs import Compression
from sharding.stream.options import ProducerOptions
from spark.dealing import Dealer
from spark.messages import Key, Messages
from spark.write_options import WriteOptions

if TYPE_CHECKING:
    from sharding.stream.producer.producer import Producer


class Sender(Protocol):
    """Where a task puts its rows. What fails raises, and then the task fails."""

    def send(self, messages: Messages) -> None:
        """Take rows; waits while too many are on their way."""

    def finish(self) -> int:
        """Wait for every outcome; how many rows are stored, if it is all of them."""


class StreamSender:
    """To one stream, whatever the keys."""

    def __init__(self, producer: Producer, options: WriteOptions) -> None:
        self._producer = producer
        self._options = options

    def send(self, messages: Messages) -> None:
        producer, timeout = self._producer, self._options.flush_timeout
        filters = messages.filters
        # The key chooses nothing here, and rows may have none.
        if messages.plain and messages.keys is None:
            producer.send_many(messages.bodies, filter_values=filters, timeout=timeout)
        else:
            producer.send_encoded(messages.encoded(), filter_values=filters, timeout=timeout)

    def finish(self) -> int:
        report = self._producer.flush(self._options.flush_timeout)
        report.raise_for_failures()
        return report.stored


class BoundSender(StreamSender):
    """To a super stream whose partitions the broker chooses, by what it has bound to the keys."""

    def send(self, messages: Messages) -> None:
        keys = cast("Sequence[Key]", messages.keys)  # of_batch and of_rows let no null pass
        self._producer.send_encoded(
            messages.encoded(),
            keys,
            filter_values=messages.filters,
            timeout=self._options.flush_timeout,
        )


class HashSender:
    """To a super stream, by the hash of the keys: a producer for each partition, in order.

    The producer of a whole super stream would do, but it looks at each message by itself.
    """

    def __init__(
        self,
        producers: Sequence[Producer],
        options: WriteOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._producers = producers
        self._dealer = Dealer(len(producers))
        self._timeout = options.flush_timeout
        self._clock = clock

    def send(self, messages: Messages) -> None:
        for producer, share in zip(self._producers, self._dealer.deal(messages), strict=True):
            if share.messages:
                producer.send_encoded(
                    share.messages, filter_values=share.filters or None, timeout=self._timeout
                )

    def finish(self) -> int:
        deadline = self._clock() + self._timeout
        stored = 0
        for producer in self._producers:
            report = producer.flush(max(0.0, deadline - self._clock()))
            report.raise_for_failures()
            stored += report.stored
        return stored


def producer_options(options: WriteOptions, name: str | None = None) -> ProducerOptions:
    return ProducerOptions(
        name=name,
        max_unconfirmed=options.max_unconfirmed,
        send_timeout=options.confirm_timeout,
        confirm_timeout=options.confirm_timeout,
        recovery_timeout=options.flush_timeout,
        compression=Compression[options.compression.upper()],
        sub_entry_messages=options.sub_entry_messages,
        filtering=options.columns.filter is not None,
    )
