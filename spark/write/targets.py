"""Where rows go: found on the driver, so that mistakes fail the plan, and opened in the tasks.

A *sender* takes the rows of one task and waits for every confirm: to a stream, to the partitions of
a super stream, or to queue shards. Rows that a failed task has stored are stored again by the next
try: senders are for the plain sink.

Queue shards: the driver reads the map log once for each batch and ships the map, so all tasks of a
batch agree on it, and no executor has to read the log. A map that changes while a task runs is used
from the next batch on; a shard that is taken away meanwhile makes the task fail, and loses nothing.
A process keeps its publisher, with its connections, from task to task, until a task fails. Tasks
may use it at the same time (threads of the driver do): each has a batch of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

import pika

from interceptors import Batch, ShardedPublisher
from sharding.cluster.topology import Topology, TopologyOptions
from sharding.errors import InvalidInput
from sharding.maps.shard_map import ShardKind, ShardMap
from sharding.stream.errors import StreamNotFound
from sharding.stream.messages.codecs import Compression
from sharding.stream.options import ProducerOptions
from sharding.stream.protocol.constants import Code
from spark.options.connect import ConnectOptions, Credentials
from spark.options.values import BadOption, OptionValues
from spark.options.write import Routing, WriteOptions
from spark.process import ProcessCache, environment, without_secrets
from spark.write.messages import Dealer, Fields, Key, Messages, in_utc

if TYPE_CHECKING:
    from sharding.stream.producer.producer import Producer

CLOSE_TIMEOUT = 2.0
PERSISTENT = 2


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
        with suppress(StreamNotFound):
            found.bound_streams(options.name)  # a producer of that name would be the super stream's
            rule = "must not have the name of a super stream too"
            raise BadOption("stream", rule, options.name)
        return Target((options.name,))


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
    text = None if target is None else target.map_text
    if text is None:
        text = resolve(connect, options).map_text or ""
    broker = broker_of(connect, options)
    with without_secrets(connect.credentials), link(options, broker, text) as lent:
        yield QueueSender(lent.publisher.batch(), options)


def _no_such(kind: str, name: str) -> BadOption:
    code = Code.NO_SUCH_STREAM.name.lower().replace("_", " ")
    return BadOption(kind, f"must exist; the broker says {code!r}", name)


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


@dataclass(frozen=True)
class Broker:
    """Where to log in."""

    uris: tuple[str, ...]
    credentials: Credentials
    trusted_hosts: tuple[str, ...] = ()

    def topology(self, maps: Iterable[ShardMap] | None = None) -> Topology:
        # A map that was read from the log is not the user's own word for the hosts in it.
        hosts = (*(str(urlsplit(uri).hostname) for uri in self.uris), *self.trusted_hosts)
        options = TopologyOptions(trusted_hosts=hosts)
        return Topology(*self.urls(), maps=maps, options=options)

    def urls(self) -> list[str]:
        login = self.credentials.login()
        return [login.into(uri) for uri in self.uris]


@dataclass(frozen=True)
class PublisherKey:
    """All that two tasks must have in common to share a publisher."""

    broker: Broker
    map_text: str = field(repr=False)
    through: Any
    window: int
    confirm_timeout: float


@dataclass(frozen=True)
class Link:
    topology: Topology
    publisher: ShardedPublisher

    def close(self) -> None:
        self.publisher.close(CLOSE_TIMEOUT)
        self.topology.close(CLOSE_TIMEOUT)


def broker_of(connect: ConnectOptions, options: WriteOptions) -> Broker:
    return Broker(options.amqp_uris, connect.credentials, options.trusted_hosts)


def map_of(logical: str, broker: Broker) -> ShardMap:
    """The shard map in force; `InvalidInput` if the queue has none."""
    with _topologies.lend(broker) as topology:
        topology.wait_until_ready(topology.options.start_timeout)  # says so if nobody lets us in
        topology.refresh()
        shard_map = topology.shard_map(logical)
    if shard_map is None or shard_map.kind is not ShardKind.QUEUE:
        rule = "must be sharded: set a policy that matches it (warren policy set)"
        raise InvalidInput("option 'queue'", rule, logical)
    return shard_map


def link(options: WriteOptions, broker: Broker, map_text: str) -> AbstractContextManager[Link]:
    """This process's publisher; whatever fails in the block, the next task gets another one."""
    return _links.lend(
        PublisherKey(
            broker, map_text, options.through, options.max_unconfirmed, options.confirm_timeout
        )
    )


class QueueSender:
    """Publishes the rows of one task."""

    def __init__(self, batch: Batch, options: WriteOptions) -> None:
        self._batch = batch
        self._options = options

    def send(self, messages: Messages) -> None:
        publish, timeout = self._batch.publish, self._options.confirm_timeout
        keys: Sequence[Any] = messages.keys or ()
        if messages.plain:
            for key, body in zip(keys, messages.bodies, strict=True):
                publish(key, body, timeout=timeout)
            return
        nothing: Sequence[None] = (None,) * len(messages)
        for key, body, properties, headers in zip(
            keys,
            messages.bodies,
            messages.properties or nothing,
            messages.headers or nothing,
            strict=True,
        ):
            publish(key, body, basic_properties(properties, headers), timeout=timeout)

    def finish(self) -> int:
        report = self._batch.flush(self._options.flush_timeout)
        report.raise_for_failures()
        return report.stored


def basic_properties(properties: Fields | None, headers: Fields | None) -> pika.BasicProperties:
    """AMQP 0-9-1's properties; persistent unless a row says otherwise."""
    named = {name: value for name, value in (properties or {}).items() if value is not None}
    moment = named.pop("creation_time", None)
    if moment is not None:
        if not isinstance(moment, datetime):
            raise InvalidInput("creation_time", "must be a datetime", moment)
        named["timestamp"] = int(in_utc(moment).timestamp())
    user = named.get("user_id")
    if isinstance(user, bytes | bytearray):
        try:
            named["user_id"] = user.decode()
        except UnicodeDecodeError:
            raise InvalidInput("user_id", "must be text in UTF-8", user) from None
    named.setdefault("delivery_mode", PERSISTENT)
    try:
        return pika.BasicProperties(headers=dict(headers) if headers else None, **named)
    except TypeError:
        raise InvalidInput("properties", "must be named as AMQP's are", sorted(named)) from None


def _connect(key: PublisherKey) -> Link:
    shard_map = ShardMap.loads(key.map_text)
    topology = key.broker.topology([shard_map])
    try:
        publisher = ShardedPublisher(
            topology,
            shard_map.logical,
            window=key.window,
            confirm_timeout=key.confirm_timeout,
            through=key.through,
        )
    except BaseException:
        topology.close(CLOSE_TIMEOUT)
        raise
    return Link(topology, publisher)


def _is_spoilt(_: BaseException) -> bool:
    # Whatever failed the task, the publisher may still have some of its rows on their way.
    return True


_links: ProcessCache[PublisherKey, Link] = ProcessCache(_connect, Link.close, _is_spoilt)
_topologies: ProcessCache[Broker, Topology] = ProcessCache(
    Broker.topology,
    lambda topology: topology.close(CLOSE_TIMEOUT),
    lambda error: not isinstance(error, InvalidInput),
)
