"""Who runs goes on: with a stale map, beyond the broker's patience, and off a node that lets nobody
in."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pika
import pytest

from interceptors import AsyncShardedChannel, ShardedChannel, ShardedPublisher
from sharding import OnUnavailable, ShardMap, StaleMap, Topology
from sharding.groups import ConsumerGroup, Delivery
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.other_views import View
from tests.support.sharded import (
    keys_of,
    make_sharded,
    publish_all,
    raw_channel,
    topology_of,
)

pytestmark = pytest.mark.cluster


# A map that is stale


class Reader(View):
    """The topology of a user whose right to read the map log can be taken away."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._api = cluster.nodes[0].management
        self._user = f"reader-{secrets.token_hex(3)}"
        body = {"password": self._user, "tags": ""}
        self._api.call("PUT", "users", self._user, body=body, timeout=PATIENCE)
        self._may_read(".*")
        login = f"{self._user}:{self._user}"
        self.url = cluster.nodes[0].endpoint.amqp_url.replace("guest:guest", login)
        self.stale_looks = 0
        super().__init__(Topology(self.url, options=replace(patient.TOPOLOGY, poll_interval=0.5)))
        self._topology.wait_until_ready(PATIENCE)

    def shard_map(self, logical: str) -> ShardMap | None:
        try:
            return self._topology.shard_map(logical)
        except StaleMap:
            self.stale_looks += 1
            raise

    def lose_the_log(self) -> None:
        """Return when the map is stale: it could not be checked for longer than is allowed."""
        self._may_read("^sharding: .*$")
        self._topology.options = replace(self._topology.options, max_staleness=2.0)
        wait_until(self._is_stale)

    def close(self) -> None:
        self._topology.close()
        self._api.call("DELETE", "users", self._user, timeout=PATIENCE)

    def _is_stale(self) -> bool:
        try:
            return self._topology.state is None
        except StaleMap:
            return True

    def _may_read(self, pattern: str) -> None:
        rights = {"configure": ".*", "write": ".*", "read": pattern}
        path = ("permissions", self._cluster.vhost, self._user)
        self._api.call("PUT", *path, body=rights, timeout=PATIENCE)


@pytest.fixture
def reader(cluster: Cluster) -> Iterator[Any]:
    made = Reader(cluster)
    yield made
    made.close()


def messages_of(shard_map: ShardMap, shards: list[str], text: str) -> list[tuple[str, bytes]]:
    """One for each of these shards."""
    return [(next(keys_of(shard_map, shard)), f"{text} {shard}".encode()) for shard in shards]


def test_consumers_of_a_blocking_channel_go_on_when_the_map_is_stale(
    cluster: Cluster, topology: Topology, reader: Any
) -> None:
    """13. A channel that looked for a shard which was away asked for the map in a callback of the
    application's connection: StaleMap left `start_consuming()`."""
    shard_map = make_sharded(topology)
    *others, gone = [shard.name for shard in shard_map.shards]
    wait_until(lambda: reader.shard_map(shard_map.logical))
    connection = pika.BlockingConnection(patient.parameters(reader.url))
    channel = ShardedChannel(connection.channel(), reader, placement="any")
    got: set[bytes] = set()

    def on_message(channel: Any, method: Any, _: Any, body: bytes) -> None:
        channel.basic_ack(method.delivery_tag)
        got.add(body)

    channel.basic_consume_all(shard_map.logical, on_message)
    with raw_channel(cluster.nodes[0]) as raw:
        raw.queue_delete(gone)
    reader.lose_the_log()

    def looked(times: int) -> bool:
        connection.process_data_events(0.05)
        return bool(reader.stale_looks >= times)

    wait_until(lambda: looked(3))
    sent = messages_of(shard_map, others, "stale")
    publish_all(topology, shard_map.logical, sent)
    wait_until(lambda: looked(0) and got == {body for _, body in sent})
    connection.close()


def test_consumers_of_a_callback_channel_go_on_when_the_map_is_stale(
    cluster: Cluster, topology: Topology, reader: Any
) -> None:
    """q22. The same there: StaleMap went into pika's I/O loop and ended it, with every connection
    and consumer on it."""
    shard_map = make_sharded(topology)
    *others, gone = [shard.name for shard in shard_map.shards]
    wait_until(lambda: reader.shard_map(shard_map.logical))
    got: set[bytes] = set()
    opened: list[AsyncShardedChannel] = []
    ended: list[object] = []

    def consume(raw: Any) -> None:
        channel = AsyncShardedChannel(raw, reader)
        channel.add_on_close_callback(lambda _, reason: ended.append(reason))
        channel.basic_consume_all(shard_map.logical, lambda *what: got.add(what[3]), auto_ack=True)
        opened.append(channel)

    connection = pika.SelectConnection(
        patient.parameters(reader.url),
        on_open_callback=lambda made: made.channel(on_open_callback=consume),
        on_close_callback=lambda *_: connection.ioloop.stop(),
    )

    def run() -> None:
        try:
            connection.ioloop.start()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def arrive(text: str) -> None:
        sent = messages_of(shard_map, others, text)
        publish_all(topology, shard_map.logical, sent)
        wait_until(lambda: got >= {body for _, body in sent} or ended)
        assert ended == []

    try:
        wait_until(lambda: opened)
        arrive("before")
        reader.lose_the_log()
        arrive("with a stale map")
        with raw_channel(cluster.nodes[0]) as raw:
            raw.queue_delete(gone)
        wait_until(lambda: reader.stale_looks >= 3 or ended)
        arrive("while a shard is looked for")
    finally:
        connection.ioloop.add_callback_threadsafe(connection.close)
        thread.join(PATIENCE)
        connection.ioloop.close()


# The broker's patience


@pytest.mark.twin(
    "integration/test_queue_groups.py::"
    "test_a_shard_is_taken_anew_before_the_broker_gives_its_consumer_up"
)
def test_the_broker_takes_no_shard_whose_messages_wait_for_longer_than_its_consumer_timeout(
    cluster: Cluster, topology: Topology
) -> None:
    """11. It closes the channel of a consumer that has had a message for too long, begun or not:
    the shard was lost in the middle of a handler, and messages of a key came again, elsewhere too.
    The group is told the broker's time, which no API tells; one that is not shows that the broker
    means it."""
    if not (3, 12) <= tuple(map(int, cluster.version.split(".")[:2])) < (4, 3):
        pytest.skip("classic queues have a time of their own from 3.12 to 4.2")
    limit = 20.0
    arguments = {"x-consumer-timeout": round(limit * 1000)}  # looked at once a minute
    begun: dict[str, list[int]] = {}

    def handle(delivery: Delivery) -> None:
        begun[delivery.shard].append(int(delivery.body))
        time.sleep(0.5)

    with ExitStack() as workers:

        def start(told: float | None, count: int) -> tuple[str, list[ConsumerGroup]]:
            """So many workers, and one shard with more than they handle within that time."""
            shard_map = make_sharded(topology, queue_arguments=arguments)
            shard = shard_map.shards[0].name
            begun[shard] = []
            key = next(keys_of(shard_map, shard))
            publish_all(topology, shard_map.logical, [(key, b"%d" % n) for n in range(400)])
            options = patient.group(consumer_timeout=told)
            made = [
                ConsumerGroup(topology, shard_map.logical, handle, options=options)
                for _ in range(count)
            ]
            for worker in made:
                workers.enter_context(worker)
            return shard, made

        shard, renewing = start(limit, 2)
        _, [unaware] = start(None, 1)
        wait_until(lambda: unaware.counters["lost"], 5 * PATIENCE)
        assert sum(worker.counters["lost"] for worker in renewing) == 0
        wait_until(lambda: sum(worker.counters["renewed"] for worker in renewing) > 1)
    assert begun[shard] == list(range(len(begun[shard])))


# A node that lets nobody in


def test_keys_move_off_a_node_in_maintenance_mode_and_come_home(harmed: Cluster) -> None:
    """q19. A node that is drained has closed its ports, but the management API calls it running:
    with `on_unavailable: move` its keys were not moved, and failed as long as that lasted."""
    victim = harmed.nodes[1]
    others = [harmed.nodes[0], harmed.nodes[2]]
    with topology_of(harmed) as operator:
        home = make_sharded(operator, on_unavailable=OnUnavailable.MOVE)
    logical = home.logical
    lost = {shard.name for shard in home.shards_on(victim.name)}
    with topology_of(others) as topology:
        topology.ensure(logical)  # as who watches does; 3.10 does not tell, its ports do
        victim.driver.ctl("eval", "rabbit_maintenance:drain().")
        try:
            wait_until(lambda: topology.ensure(logical).shard_map != home)  # the API is told later
            during = topology.ensure(logical).shard_map
            assert {shard.name for shard in during.shards if not shard.available} == lost
            keys = [next(keys_of(home, shard.name)) for shard in home.shards]
            with ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher:
                for key in keys:
                    publisher.publish(key, b"x")
                assert publisher.flush(PATIENCE).stored == len(keys)
        finally:
            victim.driver.ctl("eval", "rabbit_maintenance:revive().")
        wait_until(lambda: all(s.available for s in topology.ensure(logical).shard_map.shards))
        assert [shard.name for shard in topology.ensure(logical).shard_map.shards] == [
            shard.name for shard in home.shards
        ]
