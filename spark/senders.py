"""Publishes the rows of a task to a stream or a super stream, and waits for every confirm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from sharding.stream.formats.codecs import Compression
from sharding.stream.producing.producer_options import ProducerOptions
from spark.messages import Key, Messages
from spark.write_options import WriteOptions

if TYPE_CHECKING:
    from sharding.stream.producing.producer import Producer

_CLOSE_TIMEOUT = 2.0


class Sender(Protocol):
    """Where a task puts its rows. What fails raises, and then the task fails."""

    def send(self, messages: Messages) -> None:
        """Take rows; waits while too many are on their way."""

    def finish(self) -> int:
        """Wait for every outcome; how many rows are stored, if it is all of them."""


class StreamSender:
    """For the plain sink: rows that a failed task has stored are stored again by the next try."""

    def __init__(self, producer: Producer, options: WriteOptions) -> None:
        self._producer = producer
        self._options = options

    def send(self, messages: Messages) -> None:
        producer, timeout = self._producer, self._options.flush_timeout
        filters = messages.filters
        if self._options.kind == "stream":
            # The key chooses nothing here, and rows may have none.
            if messages.plain and messages.keys is None:
                producer.send_many(messages.bodies, filter_values=filters, timeout=timeout)
            else:
                producer.send_encoded(messages.encoded(), filter_values=filters, timeout=timeout)
            return
        keys = cast("Sequence[Key]", messages.keys)  # of_batch and of_rows let no null pass
        if messages.plain:
            producer.send_many(messages.bodies, keys, filter_values=filters, timeout=timeout)
        else:
            producer.send_encoded(messages.encoded(), keys, filter_values=filters, timeout=timeout)

    def finish(self) -> int:
        report = self._producer.flush(self._options.flush_timeout)
        report.raise_for_failures()
        return report.stored


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
