"""Where rows go: found on the driver, so that mistakes fail the plan, and opened in the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sharding.stream.errors import StreamNotFound
from sharding.stream.protocol.constants import Code
from spark.connections import environment
from spark.errors import without_secrets
from spark.option_values import BadOption, OptionValues
from spark.options import ConnectOptions
from spark.senders import BoundSender, HashSender, Sender, StreamSender, producer_options
from spark.write_options import Routing, WriteOptions

if TYPE_CHECKING:
    from sharding.stream.producer.producer import Producer

CLOSE_TIMEOUT = 2.0


@dataclass(frozen=True)
class Target:
    """What the driver found, for the tasks."""

    streams: tuple[str, ...] = ()
    """Of a super stream, in the order in which keys are routed; or the stream itself."""
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
        from spark.queue_shards import Broker, map_of

        with without_secrets(connect.credentials):
            shard_map = map_of(options.name, Broker(options.amqp_uris, connect.credentials))
        return Target(map_text=shard_map.dumps())
    with environment(connect) as found:
        if options.kind == "superStream":
            try:
                return Target(found.partitions(options.name))
            except StreamNotFound:
                raise _no_such("superStream", options.name) from None
        if not found.exists(options.name):
            raise _no_such("stream", options.name)
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
            streams = found.partitions(options.name)
            yield HashSender([open_producer(stream) for stream in streams], options)


@contextmanager
def _queue_sender(
    connect: ConnectOptions, options: WriteOptions, target: Target | None
) -> Iterator[Sender]:
    from spark.queue_shards import Broker, QueueSender, link

    text = None if target is None else target.map_text
    if text is None:
        text = resolve(connect, options).map_text or ""
    broker = Broker(options.amqp_uris, connect.credentials)
    with without_secrets(connect.credentials), link(options, broker, text) as lent:
        yield QueueSender(lent.publisher, options)


def _no_such(kind: str, name: str) -> BadOption:
    code = Code.NO_SUCH_STREAM.name.lower().replace("_", " ")
    return BadOption(kind, f"must exist; the broker says {code!r}", name)
