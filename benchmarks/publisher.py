"""What the publisher for volume gains over pika's own confirms, and what it leaves on the table.

Run it with `python -m benchmarks.publisher`. It starts a cluster of its own, with two shards on
each of three nodes, and publishes persistent, mandatory messages of 100 bytes in three ways, all of
them confirmed:

* `ShardedPublisher`, through the logical queue's exchange (as consumers want it), and straight to
  the queues (`through="default"`);
* pika's `BlockingChannel` after `confirm_delivery()`, to the same shards;
* frames encoded beforehand, on bare sockets to the same nodes, the same window: what the brokers
  take from a client that does no work.

Speeds are of this machine, which the brokers share with the client; the ratios are what counts.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Literal, cast

import pika
from pika import frame, spec

from benchmarks.rounds import Ratio, alternate, print_ratio
from sharding import Address, Node, Policy, Shard, ShardMap, ShardName
from sharding.publishing.publisher import ShardedPublisher
from tests.cluster import Cluster

LOGICAL = "images"
SHARDS_PER_NODE = 2
WINDOW = 2_000
BODY = b"x" * 100
MESSAGES = 30_000
BLOCKING_MESSAGES = 2_000
ROUNDS = 5
PUBLISHER = "`ShardedPublisher`, all confirmed"
STRAIGHT = "`ShardedPublisher` through the default exchange"
BLOCKING = "pika's blocking channel with confirms"
FRAMES = "frames encoded beforehand on bare sockets"
STRAIGHT_FRAMES = "such frames through the default exchange"
PERSISTENT = pika.BasicProperties(delivery_mode=2)


def main() -> list[Ratio]:
    with Cluster.start(nodes=3) as cluster:
        return measure(cluster)


def measure(cluster: Cluster) -> list[Ratio]:
    routing = DeclaredRouting(cluster)
    ways: dict[str, Callable[[], float]] = {
        PUBLISHER: lambda: publisher_speed(routing, "exchange"),
        STRAIGHT: lambda: publisher_speed(routing, "default"),
        FRAMES: lambda: bare_speed(routing, by_exchange=True),
        STRAIGHT_FRAMES: lambda: bare_speed(routing, by_exchange=False),
        BLOCKING: lambda: blocking_speed(routing),
    }
    speeds = alternate(ways, ROUNDS, before=routing.purge)
    return [
        print_ratio(speeds, PUBLISHER, BLOCKING, 8),
        print_ratio(speeds, PUBLISHER, FRAMES, 0.7),
        print_ratio(speeds, STRAIGHT, STRAIGHT_FRAMES, 0.7),
    ]


def keys(count: int) -> list[str]:
    return [f"user-{number % 10_000}" for number in range(count)]


def publisher_speed(routing: DeclaredRouting, through: Literal["exchange", "default"]) -> float:
    todo = keys(MESSAGES)
    with ShardedPublisher(routing, LOGICAL, window=WINDOW, through=through) as publisher:
        for key in {routing.map.shard_of(key).node: key for key in todo}.values():
            publisher.publish(key, BODY)  # connections are opened before the clock starts
        publisher.flush()
        began = perf_counter()
        for key in todo:
            publisher.publish(key, BODY)
        report = publisher.flush()
        took = perf_counter() - began
    assert report.stored == len(todo), report
    return len(todo) / took


def blocking_speed(routing: DeclaredRouting) -> float:
    todo = keys(BLOCKING_MESSAGES)
    connections = {
        node.name: pika.BlockingConnection(routing.connection_parameters(node.name))
        for node in routing.map.nodes
    }
    channels = {name: connection.channel() for name, connection in connections.items()}
    for channel in channels.values():
        channel.confirm_delivery()
    properties = {
        shard.name: pika.BasicProperties(delivery_mode=2, headers={"BCC": [shard.name]})
        for shard in routing.map.shards
    }
    began = perf_counter()
    for key in todo:
        shard = routing.map.shard_of(key)
        channels[shard.node].basic_publish(LOGICAL, key, BODY, properties[shard.name], True)
    took = perf_counter() - began
    for connection in connections.values():
        connection.close()
    return len(todo) / took


def bare_speed(routing: DeclaredRouting, by_exchange: bool) -> float:
    """Send what is encoded already as fast as the window lets, and count what is confirmed."""
    waiting: dict[str, list[bytes]] = defaultdict(list)
    for key in reversed(keys(MESSAGES)):
        shard = routing.map.shard_of(key)
        waiting[shard.node].append(encoded(key, shard.name, by_exchange))
    channels = {node: BareChannel(routing.connection_parameters(node)[0]) for node in waiting}
    selector = selectors.DefaultSelector()
    for node, channel in channels.items():
        selector.register(channel.socket, selectors.EVENT_READ, node)
    began = perf_counter()
    room, confirmed = WINDOW, 0
    while confirmed < MESSAGES:
        for node, messages in waiting.items():
            share = messages[-(room // len(waiting) or 1) :] if room else []
            if share:
                del messages[-len(share) :]
                room -= len(share)
                channels[node].socket.sendall(b"".join(reversed(share)))
        for ready, _ in selector.select(10):
            settled = channels[ready.data].read_confirms()
            confirmed += settled
            room += settled
    took = perf_counter() - began
    selector.close()
    for channel in channels.values():
        channel.socket.close()
    return MESSAGES / took


def encoded(key: str, shard: str, by_exchange: bool) -> bytes:
    if by_exchange:
        properties = pika.BasicProperties(delivery_mode=2, headers={"BCC": [shard]})
        method = spec.Basic.Publish(exchange=LOGICAL, routing_key=key, mandatory=True)
    else:
        properties = PERSISTENT
        method = spec.Basic.Publish(exchange="", routing_key=shard, mandatory=True)
    frames = (frame.Method(1, method), frame.Header(1, len(BODY), properties), frame.Body(1, BODY))
    return b"".join(part.marshal() for part in frames)


class BareChannel:
    """A socket on which the AMQP handshake is done and a channel is in confirm mode."""

    def __init__(self, parameters: pika.ConnectionParameters) -> None:
        self.socket = socket.create_connection((parameters.host, parameters.port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._confirmed: set[int] = set()
        self._all_up_to = 0
        credentials = cast(pika.PlainCredentials, parameters.credentials)
        self.socket.sendall(b"AMQP\0\0\x09\x01")
        self._answer(b"")
        response = f"\0{credentials.username}\0{credentials.password}"
        start = spec.Connection.StartOk({}, "PLAIN", response, "en_US")
        self._answer(frame.Method(0, start).marshal())
        tuned = frame.Method(0, spec.Connection.TuneOk(2047, 131072, 0)).marshal()
        self._answer(tuned + frame.Method(0, spec.Connection.Open("/", insist=True)).marshal())
        self._answer(frame.Method(1, spec.Channel.Open()).marshal())
        self._answer(frame.Method(1, spec.Confirm.Select()).marshal())

    def _answer(self, request: bytes) -> None:
        self.socket.sendall(request)
        while True:
            self._buffer += self.socket.recv(65536)
            size, found = frame.decode_frame(self._buffer)
            if found is not None:
                self._buffer = self._buffer[size:]
                return

    def read_confirms(self) -> int:
        """How many more messages are confirmed by what has arrived. Knows Basic.Ack only."""
        self._buffer += self.socket.recv(1 << 20)
        whole = len(self._buffer) // 21 * 21  # the size of a Basic.Ack with its frame
        before = self._all_up_to + len(self._confirmed)
        for offset in range(0, whole, 21):
            kind, tag, multiple = struct.unpack_from(">7xIQB", self._buffer, offset)
            assert kind == spec.Basic.Ack.INDEX, "the bare client only expects acks"
            if multiple:
                self._all_up_to = tag
                self._confirmed = {single for single in self._confirmed if single > tag}
            else:
                self._confirmed.add(tag)
        self._buffer = self._buffer[whole:]
        return self._all_up_to + len(self._confirmed) - before


class DeclaredRouting:
    """A fixed map of shards that are declared here; nothing is ever away."""

    def __init__(self, cluster: Cluster) -> None:
        self._parameters = {
            node.name: pika.ConnectionParameters(
                node.endpoint.address,
                node.endpoint.ports["amqp"],
                credentials=pika.PlainCredentials(node.endpoint.user, node.endpoint.password),
            )
            for node in cluster
        }
        shards = []
        for node in cluster:
            with pika.BlockingConnection(self._parameters[node.name]) as connection:
                channel = connection.channel()
                channel.exchange_declare(LOGICAL, "direct", durable=True)
                for index in range(SHARDS_PER_NODE):
                    name = str(ShardName(LOGICAL, node.name, index))
                    channel.queue_declare(name, durable=True)
                    channel.queue_bind(name, LOGICAL, name)
                    shards.append(Shard(name, node.name))
        nodes = tuple(
            Node(node.name, (Address(node.endpoint.address, node.endpoint.ports["amqp"]),))
            for node in cluster
        )
        policy = Policy("benchmark", f"^{LOGICAL}$", shards_per_node=SHARDS_PER_NODE)
        self.map = ShardMap(LOGICAL, 1, tuple(shards), nodes, policy)

    def purge(self) -> None:
        with pika.BlockingConnection(next(iter(self._parameters.values()))) as connection:
            channel = connection.channel()
            for shard in self.map.shards:
                channel.queue_purge(shard.name)

    def shard_map(self, logical: str) -> ShardMap | None:
        return self.map if logical == LOGICAL else None

    def connection_parameters(self, node: str) -> Sequence[pika.ConnectionParameters]:
        return [self._parameters[node]]

    def unavailable(self, shard: str) -> bool:
        return not shard

    def suspect(self, shard: str) -> None:
        raise AssertionError(f"{shard} gave trouble")

    def refresh(self, timeout: float) -> None:
        pass


if __name__ == "__main__":
    main()
