"""`StreamEnvironment`: one cluster's streams, for a whole process.

    with StreamEnvironment("rabbitmq-stream://guest:guest@localhost:5552") as environment:
        environment.create_super_stream("invoices", partitions=6)
        with environment.producer("invoices") as producer:
            producer.send(b"…", key="customer-7")
            producer.flush(timeout=10).raise_for_failures()
        for batch in environment.consumer("invoices", offset="first"):
            …

It holds what producers and consumers share: the routes, the connections, and the threads that make
them again. Safe to use from any thread.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, Protocol
from weakref import WeakSet

from sharding.errors import InvalidInput
from sharding.metrics.names import Subject
from sharding.stream.admin import Administration, SuperStreamsOverAmqp
from sharding.stream.connections.access import Access
from sharding.stream.connections.background import Recovery
from sharding.stream.connections.connection import ConnectOptions, Login, StreamClient, connect
from sharding.stream.connections.locator import Locator
from sharding.stream.connections.open_connections import CAPACITY
from sharding.stream.connections.pool import DedicatedConnections, Pool
from sharding.stream.consumer.consumer import Consumer
from sharding.stream.consumer.offset_store import check_offset, store_offset_surely
from sharding.stream.consumer.probe import Ends, leader_ends
from sharding.stream.consumer.ranges import RangeReading, offset_at, read_range
from sharding.stream.consumer.starting import note_stored
from sharding.stream.errors import StreamNotFound
from sharding.stream.forks import of_this_process
from sharding.stream.options import ConsumerOptions, ProducerOptions, RouteOptions, StreamArguments
from sharding.stream.producer.partitioning import BrokerRoutes, PartitionFunction, by_hash
from sharding.stream.producer.producer import Producer
from sharding.stream.protocol.commands import QueryOffset, QueryPublisherSequence
from sharding.stream.protocol.constants import Broker, Limits
from sharding.stream.routes.cache import RouteCache
from sharding.stream.routes.near_replicas import Placement
from sharding.stream.routes.values import Partitions, StreamRoute
from sharding.stream.uris import StreamUri, parse_all


class Closable(Protocol):
    def close(self, timeout: float) -> object: ...


Mechanism = Literal["PLAIN", "EXTERNAL", "ANONYMOUS"]
AddressResolver = Callable[[Broker], Broker]


@dataclass(frozen=True)
class EnvironmentOptions:
    """Everything has a default that works for a cluster that can be reached node by node."""

    load_balancer: bool = False
    """The addresses lead to a load balancer: connections are made until the wanted node answers."""
    address_resolver: AddressResolver | None = None
    """From the address that a node advertises to the one to dial, where they differ. With a load
    balancer it gets that one's address."""
    tls: ssl.SSLContext | None = None
    """How to check certificates; the default for +tls addresses trusts the system's authorities."""
    server_name: str | None = None
    """The name that certificates must have, if not the host that is dialled."""
    mechanism: Mechanism = "PLAIN"
    own_hosts: frozenset[str] = field(default_factory=lambda: frozenset({socket.gethostname()}))
    """Names and addresses of this host, as nodes on it advertise themselves."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """From hosts, the own ones included, to zones; consumers prefer replicas in their own."""
    amqp_url: str | None = field(default=None, repr=False)
    """Where super streams are made on brokers before 3.13."""
    limits: Limits = Limits()
    routes: RouteOptions = RouteOptions()
    heartbeat: float = 60.0
    """Seconds; a connection that is silent for twice as long is dead."""
    connect_timeout: float = 5.0
    """For one connection: address look-up, TCP, TLS and login."""
    request_timeout: float = 10.0
    """For one answer of a broker."""
    idle_timeout: float = 30.0
    """After which a connection that nobody uses is closed."""
    tries_per_node: int = 10
    """How often a load balancer is asked for a node, for each node of the cluster."""
    connection_name: str = "warren"
    """What the broker's management shows."""

    def __post_init__(self) -> None:
        for name in ("heartbeat", "connect_timeout", "request_timeout", "tries_per_node"):
            if not getattr(self, name) > 0:
                raise InvalidInput(name, "must be more than 0", getattr(self, name))
        if self.mechanism not in ("PLAIN", "EXTERNAL", "ANONYMOUS"):
            raise InvalidInput("mechanism", "must be PLAIN, EXTERNAL or ANONYMOUS", self.mechanism)
        if isinstance(self.own_hosts, str):
            raise InvalidInput("own_hosts", "must be a set of names", self.own_hosts)


class StreamEnvironment:
    """Streams of the cluster that the `urls` lead to; several of them for failover."""

    counted_as = Subject("streams")

    def __init__(
        self, *urls: str, options: EnvironmentOptions | None = None, **changes: Any
    ) -> None:
        self.options = replace(options or EnvironmentOptions(), **changes)
        uris = parse_all(urls)
        self._addresses = [uri.address for uri in uris]
        self._connect_options = _connect_options(uris[0], self.options)
        self._locator = Locator(self._addresses, self._dial)
        self._routes = RouteCache(self._locator, self.options.routes)
        self._pool = self._new_pool()
        self._single_pool: Pool | None = None
        self._lending = threading.Lock()
        self._recovery = Recovery()
        self._open: WeakSet[Closable] = WeakSet()
        self._administration = Administration(
            self._locator,
            self._routes,
            SuperStreamsOverAmqp(self.options.amqp_url, self.options.request_timeout),
            self.options.request_timeout,
        )
        self._access = Access(
            self._routes,
            self._pool,
            self._recovery,
            Placement(self.options.own_hosts, self.options.zones),
            self.options.limits,
            time.monotonic,
            random.Random(),
        )
        of_this_process(self, self._locator, self._routes, self._pool, self._recovery)

    def __enter__(self) -> StreamEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StreamEnvironment of {', '.join(map(str, self._addresses))}>"

    def close(self, timeout: float = 5) -> None:
        """Close the producers and consumers that are still open, and every connection."""
        deadline = time.monotonic() + timeout
        for user in tuple(self._open):
            user.close(max(0.1, deadline - time.monotonic()))
        pools = (self._pool, self._single_pool) if self._single_pool else (self._pool,)
        for part in (self._recovery, self._routes, *pools, self._locator):
            part.close(max(0.1, deadline - time.monotonic()))

    @property
    def counters(self) -> Mapping[str, int]:
        """What the routes and the connections have been doing, by name."""
        parts = {
            "routes": self._routes.counters,
            "pool": self._pool.counters,
            "locator": self._locator.counters,
        }
        return {
            f"{part}.{name}": count
            for part, counters in parts.items()
            for name, count in counters.items()
        }

    @property
    def server_version(self) -> tuple[int, ...]:
        """The RabbitMQ version of the node that answered last: (4, 0, 5)."""
        return self._locator.server_version

    # Administration

    def create_stream(
        self, name: str, arguments: StreamArguments | None = None, *, exist_ok: bool = False
    ) -> None:
        self._administration.create_stream(name, arguments or StreamArguments(), exist_ok)

    def delete_stream(self, name: str, *, missing_ok: bool = False) -> None:
        self._administration.delete_stream(name, missing_ok)

    def create_super_stream(
        self,
        name: str,
        partitions: int = 3,
        arguments: StreamArguments | None = None,
        *,
        binding_keys: Sequence[str] | None = None,
        exist_ok: bool = False,
    ) -> None:
        """Make the streams `name-0`, `name-1`, …; with `binding_keys` one for each of those."""
        self._administration.create_super_stream(
            name, partitions, binding_keys, arguments or StreamArguments(), exist_ok
        )

    def delete_super_stream(self, name: str, *, missing_ok: bool = False) -> None:
        self._administration.delete_super_stream(name, missing_ok)

    def exists(self, stream: str) -> bool:
        """Whether there is such a stream; asked of the cluster, not of memory."""
        self._routes.suspect(stream, "asked for")
        try:
            self.route(stream)
        except StreamNotFound:
            return False
        return True

    def partitions(self, super_stream: str) -> tuple[str, ...]:
        """The streams of a super stream, each once, in the order that keys are routed by."""
        return self._partitions(super_stream).streams

    def bound_streams(self, super_stream: str) -> tuple[str, ...]:
        """What a key's hash chooses from: a stream as often as it is bound to the super stream.

        `bound_streams(name)[by_hash(key, len(…))]` is a key's partition for every stream client.
        """
        return self._partitions(super_stream).bound

    def route(self, stream: str) -> StreamRoute:
        """Where a stream lives now: its leader and its replicas."""
        return self._routes.route(stream, self.options.request_timeout)

    def stats(self, stream: str) -> dict[str, int]:
        """The broker's own figures of a stream; RabbitMQ 3.11 and later."""
        return self._administration.stats(stream)

    def offsets(self, stream: str) -> Ends | None:
        """The first and the last offset that are stored for good; None if the stream is empty."""
        return leader_ends(self._access, stream, self.options.request_timeout)

    def offset_at(self, stream: str, time: datetime) -> int | None:
        """The first offset that was stored at that time or later; None if nothing was."""
        return offset_at(self._access, stream, time, self.options.request_timeout)

    def stored_offset(self, name: str, stream: str) -> int | None:
        """The offset that a consumer of this name has stored, or None."""
        return self._locator.call(QueryOffset(name, stream), self.options.request_timeout).offset

    def last_publishing_id(self, name: str, stream: str) -> int:
        """The last id that the stream has from producers of this name; 0 for none."""
        request = QueryPublisherSequence(name, stream)
        return self._locator.call(request, self.options.request_timeout).publishing_id

    def store_offset(self, name: str, stream: str, offset: int) -> None:
        """Say that a consumer of this name has dealt with all up to `offset`; also backwards.

        Returns when the broker has it. One that is running stores its own over it.
        """
        check_offset(name, offset)
        timeout = self.options.request_timeout
        deadline = time.monotonic() + timeout
        client = self._locator.connect(timeout)
        store_offset_surely(client, name, stream, offset, deadline, exactly=True)
        note_stored(client, name, stream, deadline, time.monotonic)

    # Messages

    def lend(self, borrower: Closable) -> Access:
        """Routes and connections of its own, for a part that is closed with all others."""
        self._open.add(borrower)
        with self._lending:
            self._single_pool = self._single_pool or self._new_pool(capacity=1)
            of_this_process(borrower, self._single_pool)
            return replace(self._access, pool=DedicatedConnections(self._single_pool))

    def producer(
        self,
        name: str,
        /,
        options: ProducerOptions | None = None,
        *,
        partitioning: PartitionFunction | Literal["hash", "broker"] = "hash",
        **changes: Any,
    ) -> Producer:
        """A producer to the stream or super stream `name`; `changes` are fields of the options."""
        streams, super_stream = self._streams_of(name)
        producer = Producer(
            streams.bound,
            self._routing(partitioning, super_stream),
            self._routes,
            self._pool,
            self._recovery,
            replace(options or ProducerOptions(), **changes),
            target=name,
        )
        self._open.add(producer)
        of_this_process(producer)
        return producer

    def consumer(
        self, name: str, /, options: ConsumerOptions | None = None, **changes: Any
    ) -> Consumer:
        """A consumer of the stream or of all partitions of the super stream `name`."""
        streams, super_stream = self._streams_of(name)
        chosen = replace(options or ConsumerOptions(), **changes)
        consumer = Consumer(streams.streams, self._access, chosen, super_stream=super_stream)
        self._open.add(consumer)
        of_this_process(consumer)
        return consumer

    def read_range(self, stream: str, first: int, end: int, **how: Any) -> RangeReading:
        """Exactly the messages of one stream at offsets from `first` up to `end`, without it.

        `how` are the arguments of `consumer.ranges.read_range`.
        """
        reading = read_range(self._access, stream, first, end, **how)
        of_this_process(reading)
        return reading

    def _partitions(self, super_stream: str) -> Partitions:
        return self._routes.partitions(super_stream, self.options.request_timeout)

    def _streams_of(self, name: str) -> tuple[Partitions, str | None]:
        """The streams behind a name, and the name itself if it is a super stream's.

        Who uses them keeps them for its life, so memory is not enough: a partition may just have
        been added.
        """
        try:
            self._partitions(name)
            self._routes.suspect(name, "a producer or consumer is made")
            return self._partitions(name), name
        except StreamNotFound:
            self.route(name)  # raises if there is no such stream either
            return Partitions(name, (name,)), None

    def _routing(
        self, partitioning: PartitionFunction | str, super_stream: str | None
    ) -> PartitionFunction | BrokerRoutes:
        if partitioning == "hash":
            return by_hash
        if callable(partitioning):
            return partitioning
        rule = 'must be "hash", "broker" (of a super stream) or a function'
        if partitioning != "broker" or super_stream is None:
            raise InvalidInput("partitioning", rule, partitioning)
        return BrokerRoutes(super_stream, self._locator, self.options.request_timeout)

    # Connecting

    def _new_pool(self, capacity: int = CAPACITY) -> Pool:
        return Pool(
            self._dial_node,
            balancers=self._addresses if self.options.load_balancer else (),
            tries_per_node=self.options.tries_per_node,
            idle_timeout=self.options.idle_timeout,
            capacity=capacity,
        )

    def _dial(self, address: Broker) -> StreamClient:
        return connect(address, self._connect_options)

    def _dial_node(self, node: Broker) -> StreamClient:
        resolver = self.options.address_resolver
        return self._dial(resolver(node) if resolver else node)


def _connect_options(uri: StreamUri, options: EnvironmentOptions) -> ConnectOptions:
    if options.tls is not None and not uri.tls:
        raise InvalidInput("tls", "goes with addresses of rabbitmq-stream+tls://", uri.address)
    return ConnectOptions(
        login=Login(uri.user, uri.password, options.mechanism, uri.vhost),
        tls=(options.tls or ssl.create_default_context()) if uri.tls else None,
        server_name=options.server_name,
        limits=options.limits,
        heartbeat=options.heartbeat,
        connect_timeout=options.connect_timeout,
        request_timeout=options.request_timeout,
        connection_name=options.connection_name,
    )
