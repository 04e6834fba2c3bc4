"""Streams for a test, and what is stored in them afterwards."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sharding import Policy
from sharding.stream.environment import StreamEnvironment
from sharding.stream.options import Columns
from sharding.stream.producer.partitioning import by_hash
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.sharded import fresh_queue, raw_channel, shards_in_broker, topology_of
from tests.support.streams import await_replicas


@dataclass(frozen=True)
class StoredRow:
    key: str | None
    body: bytes


def stream_uri(cluster: Cluster) -> str:
    """The option `uri`: every node, without a login."""
    return ",".join(node.endpoint.url("stream") for node in cluster.nodes)


PATIENT = {"connectTimeout": f"{PATIENCE:g}s", "requestTimeout": f"{PATIENCE:g}s"}


def reach(cluster: Cluster) -> dict[str, str]:
    """Where streams are, for who waits for a broker that is held up."""
    return {"uri": stream_uri(cluster), **PATIENT}


def amqp_uri(cluster: Cluster) -> str:
    return ",".join(node.endpoint.url("amqp") for node in cluster.nodes)


def environment_of(cluster: Cluster) -> StreamEnvironment:
    return StreamEnvironment(
        *(node.endpoint.stream_url for node in cluster.nodes),
        amqp_url=cluster.nodes[0].endpoint.amqp_url,  # 3.10 makes super streams over AMQP
        **patient.STREAMS,
    )


@contextmanager
def super_stream(
    environment: StreamEnvironment, partitions: int = 3, replicas: int = 2
) -> Iterator[str]:
    name = f"orders-{secrets.token_hex(4)}"
    environment.create_super_stream(name, partitions=partitions)
    try:
        for stream in environment.partitions(name):
            await_replicas(environment, stream, replicas)
        yield name
    finally:
        environment.delete_super_stream(name)


@contextmanager
def one_stream(environment: StreamEnvironment) -> Iterator[str]:
    name = f"orders-{secrets.token_hex(4)}"
    environment.create_stream(name)
    try:
        await_replicas(environment, name)
        yield name
    finally:
        environment.delete_stream(name)


@contextmanager
def sharded_queue(cluster: Cluster) -> Iterator[str]:
    """A logical queue with a shard on each node; its queues go with it."""
    logical = fresh_queue()
    with topology_of(cluster.nodes) as topology:
        topology.set_policy(Policy.exactly(logical, 1, name=logical))
        topology.ensure(logical)
        try:
            yield logical
        finally:
            queues = shards_in_broker(cluster, logical)
            topology.clear_policy(logical)
            topology.forget(logical)
            with raw_channel(cluster.nodes[0]) as channel:
                for queue in queues:
                    channel.queue_delete(queue)
                channel.exchange_delete(logical)


def count_of(environment: StreamEnvironment, streams: Iterable[str]) -> int:
    """How many messages are stored for good."""
    ends = [environment.offsets(stream) for stream in streams]
    return sum(each.last + 1 for each in ends if each is not None)


def stored_in(environment: StreamEnvironment, streams: Iterable[str]) -> dict[str, list[StoredRow]]:
    """Every row of every stream, in its order."""
    found: dict[str, list[StoredRow]] = {}
    for stream in streams:
        rows = found[stream] = []
        ends = environment.offsets(stream)
        if ends is None:
            continue
        columns = Columns(key=True)
        for batch in environment.read_range(stream, 0, ends.last + 1, columns=columns):
            rows += map(
                StoredRow, batch.column("key").to_pylist(), batch.column("body").to_pylist()
            )
    return found


@dataclass(frozen=True)
class Orders:
    """Rows that can be told apart: each key has its numbers from 0 on, in order."""

    keys: int
    of_each: int

    def __len__(self) -> int:
        return self.keys * self.of_each

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        for number in range(self.of_each):
            for key in range(self.keys):
                yield f"customer-{key}", b"customer-%d %d" % (key, number)

    def lost_and_twice(self, stored: Mapping[str, Sequence[StoredRow]]) -> tuple[int, int]:
        """By row, not by count."""
        found = Counter(row.body for rows in stored.values() for row in rows)
        wanted = {body for _, body in self}
        assert set(found) <= wanted, "rows that nobody sent"
        return len(wanted - set(found)), sum(times - 1 for times in found.values())

    def assert_in_order(self, stored: Mapping[str, Sequence[StoredRow]]) -> None:
        """Each key in its own partition only, and its numbers rising."""
        for number, rows in enumerate(stored.values()):
            last: dict[str, int] = {}
            for row in rows:
                key, place = row.body.decode().split()
                assert row.key == key
                assert by_hash(key, len(stored)) == number
                assert last.get(key, -1) < int(place), f"{key} is out of order"
                last[key] = int(place)
