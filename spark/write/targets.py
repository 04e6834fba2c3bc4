"""Where rows go: found on the driver, so that mistakes fail the plan, and opened in the tasks.

A *sender* takes the rows of one task and waits for every confirm: to a stream, to the partitions of
a super stream, or to queue shards (`queue_targets`). Rows that a failed task has stored are stored
again by the next try: senders are for the plain sink.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from sharding.stream.errors import StreamNotFound
from sharding.stream.messages.codecs import Compression
from sharding.stream.options import ProducerOptions
from spark.options.connect import ConnectOptions
from spark.options.values import BadOption, OptionValues
from spark.options.write import Routing, WriteOptions
from spark.process import environment, without_secrets
from spark.write.messages import Dealer, Key, Messages
from spark.write.queue_targets import CLOSE_TIMEOUT, QueueSender, broker_of, link, map_of

if TYPE_CHECKING:
    from sharding.stream.producer.producer import Producer


@dataclass(frozen=True)
class Target:
    """What the driver found, for the tasks."""

    bound: tuple[str, ...] = ()
    """What keys are routed by, `StreamEnvironment.bound_streams`; or the stream itself."""
    map_text: str | None = field(default=None, repr=False)
    """The map of queue shards."""


def parse(options: Mapping[str, str]) -> tuple[ConnectOptions, WriteOptions]:
    """Everything that can be asked of a sink; an unknown name is an error."""
    values = OptionValues(options, "writing")
    connect, write = ConnectOptions.parse(values), WriteOptions.parse(values)
    values.refuse_unknown()
    return connect, write


def resolve(connect: ConnectOptions, options: WriteOptions) -> Target:
    """Ask the cluster for the target; an error if it is not there."""
    if options.kind == "queue":
        with without_secrets(connect.credentials):
            shard_map = map_of(options.name, broker_of(connect, options))
        return Target(map_text=shard_map.dumps())
    with environment(connect) as found:
        if options.kind == "superStream":
            try:
                return Target(found.bound_streams(options.name))
            except StreamNotFound:
                raise _no_such("superStream", options.name) from None
        if not found.exists(options.name):
            raise _no_such("stream", options.name)
        try:
            found.bound_streams(options.name)
        except StreamNotFound:
            return Target((options.name,))
        # A producer of that name would be the super stream's.
        raise BadOption("stream", "must not have the name of a super stream too", options.name)


@contextmanager
def sender_to(
    connect: ConnectOptions, options: WriteOptions, target: Target | None
) -> Iterator[Sender]:
    """A sender for one task, over connections that the process keeps for the next ones."""
    if options.kind == "queue":
        with _queue_sender(connect, options, target) as sender:
            yield sender
        return
    with environment(connect) as found, ExitStack() as opened:

        def open_producer(name: str, partitioning: Routing = "hash") -> Producer:
            producer = found.producer(name, producer_options(options), partitioning=partitioning)
            opened.callback(producer.close, CLOSE_TIMEOUT)
            return producer

        if options.kind == "stream":
            yield StreamSender(open_producer(options.name), options)
        elif options.routing == "broker":
            yield BoundSender(open_producer(options.name, "broker"), options)
        else:
            # Asked for by each task, not by the driver: partitions may be added while a query runs.
            bound = found.bound_streams(options.name)
            producers = {stream: open_producer(stream) for stream in dict.fromkeys(bound)}
            yield HashSender(producers, bound, options)


@contextmanager
def _queue_sender(
    connect: ConnectOptions, options: WriteOptions, target: Target | None
) -> Iterator[Sender]:
    broker = broker_of(connect, options)
    with without_secrets(connect.credentials):
        text = None if target is None else target.map_text
        if text is None:
            text = map_of(options.name, broker).dumps()
        with link(options, broker, text) as lent:
            yield QueueSender(lent.publisher.batch(), options)


def _no_such(kind: str, name: str) -> BadOption:
    return BadOption(kind, "must exist; the broker has no such stream", name)


class Sender(Protocol):
    """Where a task puts its rows. What fails raises, then the task fails and Spark repeats it."""

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
    """To a super stream, by the hash of the keys: a producer for each partition.

    The producer of a whole super stream would do, but it looks at each message by itself.
    """

    def __init__(
        self,
        producers: Mapping[str, Producer],
        bound: Sequence[str],
        options: WriteOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._producers = list(producers.values())
        numbers = {stream: number for number, stream in enumerate(producers)}
        self._dealer = Dealer([numbers[stream] for stream in bound])
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
        sub_entry_messages=options.sub_entry_messages or 0,
        filtering=options.columns.filter is not None,
    )
