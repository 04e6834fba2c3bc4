"""The publisher for volume, on real brokers: what it reports is what consumers find."""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

import pika
import pytest

from sharding import (
    InvalidInput,
    Node,
    Policy,
    Shard,
    ShardMap,
    ShardName,
    ShardUnavailable,
)
from sharding.outcomes import NotStored, Outcome, Report, Result
from sharding.publishing.publisher import PublisherClosed, ShardedPublisher, WindowFull
from tests.cluster import Cluster, wait_until
from tests.cluster import Node as ClusterNode
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.clocks import Clock, TimedPublisher
from tests.support.slow_network import SlowNetwork

pytestmark = pytest.mark.cluster


@dataclass
class FixedRouting:
    """A map made by hand, and what was said about its shards."""

    map: ShardMap
    parameters: dict[str, list[pika.ConnectionParameters]]
    away: set[str] = field(default_factory=set)
    suspects: list[str] = field(default_factory=list)

    def shard_map(self, logical: str) -> ShardMap | None:
        return self.map if logical == self.map.logical else None

    def connection_parameters(self, node: str) -> Sequence[pika.ConnectionParameters]:
        return self.parameters.get(node, [])

    def unavailable(self, shard: str) -> bool:
        return shard in self.away

    def suspect(self, shard: str) -> None:
        self.suspects.append(shard)

    def refresh(self, timeout: float) -> None:
        raise AssertionError(f"the publisher leaves waiting {timeout} s to others")


def declare(cluster: Cluster, *, per_node: int = 1) -> FixedRouting:
    """A logical queue of its own for a test, with its shards on every node."""
    logical = f"images-{secrets.token_hex(4)}"
    shards = []
    for node in cluster:
        with connect(node) as connection:
            channel = connection.channel()
            channel.exchange_declare(logical, "direct", durable=True)
            for index in range(per_node):
                name = str(ShardName(logical, node.name, index))
                channel.queue_declare(name, durable=True)
                channel.queue_bind(name, logical, name)
                shards.append(Shard(name, node.name))
    return FixedRouting(
        ShardMap(
            logical,
            1,
            tuple(shards),
            tuple(Node(node.name) for node in cluster),
            Policy("p", f"^{logical}$", shards_per_node=per_node),
        ),
        {node.name: [parameters_for(node)] for node in cluster},
    )


def parameters_for(
    node: ClusterNode, *, password: str = "guest", vhost: str | None = None
) -> pika.ConnectionParameters:
    endpoint = node.endpoint
    credentials = pika.PlainCredentials(endpoint.user, password)
    return pika.ConnectionParameters(
        endpoint.address, endpoint.ports["amqp"], vhost or endpoint.vhost, credentials
    )


def connect(node: ClusterNode) -> pika.BlockingConnection:
    return pika.BlockingConnection(patient.parameters(node.endpoint.amqp_url))


Delivery = tuple[Any, pika.BasicProperties, bytes]


def drain(node: ClusterNode, queue: str) -> list[Delivery]:
    with connect(node) as connection:
        channel = connection.channel()
        found = iter(lambda: channel.basic_get(queue, auto_ack=True), (None, None, None))
        return [delivery for delivery in found if delivery[2] is not None]


def bodies(cluster: Cluster, routing: FixedRouting) -> dict[str, list[bytes]]:
    """What each shard holds, in order."""
    node = cluster.a_running_node()
    return {s.name: [body for _, _, body in drain(node, s.name)] for s in routing.map.shards}


def keys_of(routing: FixedRouting, shard: str) -> Iterator[str]:
    every = (f"user-{number}" for number in count())
    return (key for key in every if routing.map.shard_of(key).name == shard)


def shard_on(routing: FixedRouting, node: ClusterNode) -> str:
    return routing.map.shards_on(node.name)[0].name


def failures(report: Report) -> dict[int, Outcome]:
    return {result.number: result.outcome for result in report.not_stored}


def publisher_of(routing: FixedRouting, **options: Any) -> ShardedPublisher:
    """Where nothing is broken, no deadline ends."""
    chosen: dict[str, Any] = {"confirm_timeout": PATIENCE} | options
    return ShardedPublisher(routing, routing.map.logical, **chosen)


class Published:
    """Publishes numbered bodies and remembers which number went where."""

    def __init__(self, publisher: ShardedPublisher) -> None:
        self._publisher = publisher
        self.by_key: dict[str, list[int]] = defaultdict(list)

    def __call__(self, key: str) -> int:
        expected = sum(map(len, self.by_key.values()))
        number = self._publisher.publish(key, b"%d" % expected)
        assert number == expected
        self.by_key[key].append(number)
        return number


# Service as usual.


@pytest.mark.parametrize("through", ["exchange", "default"])
def test_every_message_is_stored_in_its_shard_in_the_order_of_its_key(
    cluster: Cluster, through: Any
) -> None:
    routing = declare(cluster, per_node=2)
    with publisher_of(routing, window=100, through=through) as publisher:
        publish = Published(publisher)
        for number in range(3_000):
            publish(f"user-{number % 50}")
        report = publisher.flush(PATIENCE)
    assert report == Report(stored=3_000)
    found = bodies(cluster, routing)
    for key, numbers in publish.by_key.items():
        mine = set(numbers)
        there = [int(body) for body in found[routing.map.shard_of(key).name] if int(body) in mine]
        assert there == numbers
    assert sum(map(len, found.values())) == 3_000
    assert all(found.values())
    assert routing.suspects == []


def test_threads_keep_the_order_of_their_own_messages(cluster: Cluster) -> None:
    routing = declare(cluster)
    with publisher_of(routing, window=50) as publisher:

        def work(name: str) -> None:
            for number in range(300):
                publisher.publish(name, f"{name} {number}".encode())

        threads = [threading.Thread(target=work, args=(f"user-{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert publisher.flush(PATIENCE).stored == 1_200
    found = [body.decode().split() for shard in bodies(cluster, routing).values() for body in shard]
    for n in range(4):
        assert [int(v) for name, v in found if name == f"user-{n}"] == list(range(300))


def test_delivery_shows_what_was_published_and_nothing_of_warren(cluster: Cluster) -> None:
    routing = declare(cluster)
    shard = routing.map.shards[0].name
    key = next(keys_of(routing, shard))
    headers: dict[str, Any] = {"mine": 7, "deep": {"a": [1, 2]}}
    properties = pika.BasicProperties(
        headers=headers, message_id="m-1", content_type="text/plain", priority=3
    )
    with publisher_of(routing) as publisher:
        publisher.publish(key, b"body", properties)
        publisher.publish(key, b"plain")
        assert publisher.flush(PATIENCE).stored == 2
    assert properties.headers is headers
    assert headers == {"mine": 7, "deep": {"a": [1, 2]}}
    (method, seen, body), (_, plain, _) = drain(cluster.nodes[0], shard)
    assert (method.exchange, method.routing_key, body) == (routing.map.logical, key, b"body")
    assert seen.headers == {"mine": 7, "deep": {"a": [1, 2]}}
    assert (seen.message_id, seen.content_type, seen.priority) == ("m-1", "text/plain", 3)
    assert seen.delivery_mode is None
    assert plain.delivery_mode == 2
    assert not plain.headers


def test_default_exchange_is_the_cheaper_way_and_leaves_properties_alone(cluster: Cluster) -> None:
    routing = declare(cluster)
    shard = routing.map.shards[1].name
    with publisher_of(routing, through="default") as publisher:
        publisher.publish(next(keys_of(routing, shard)), b"x", pika.BasicProperties(type="t"))
        publisher.flush(PATIENCE)
    [(method, properties, _)] = drain(cluster.nodes[0], shard)
    assert (method.exchange, method.routing_key) == ("", shard)
    assert (properties.type, properties.headers) == ("t", None)


@pytest.mark.parametrize("key", ["ключ", "ключ".encode(), b"\xff\x00\xfe", bytearray(b"ab"), ""])
def test_key_travels_as_the_bytes_that_were_hashed(cluster: Cluster, key: Any) -> None:
    routing = declare(cluster)
    with publisher_of(routing) as publisher:
        publisher.publish(key, bytearray(b"x"))
        assert publisher.flush(PATIENCE).stored == 1
    [(method, _, _)] = drain(cluster.nodes[0], routing.map.shard_of(key).name)
    seen = method.routing_key
    wire = key.encode() if isinstance(key, str) else bytes(key)
    assert (seen.encode() if isinstance(seen, str) else seen) == wire


def test_each_result_is_called_back_in_order_of_its_shard(cluster: Cluster) -> None:
    routing = declare(cluster)
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        if result.number == 3:
            raise RuntimeError("a callback that fails must not end the publisher")
        if result.number == 5:
            sys.exit("nor must one that exits")

    with publisher_of(routing, on_result=note) as publisher:
        for number in range(10):
            publisher.publish(f"user-{number}", b"x")
        publisher.flush(PATIENCE)
    assert {(r.number, r.outcome, r.key) for r in results} == {
        (number, Outcome.STORED, f"user-{number}") for number in range(10)
    }


def test_large_bodies_pass_in_pieces_and_within_the_window_of_bytes(cluster: Cluster) -> None:
    routing = declare(cluster)
    large = secrets.token_bytes(700_000)
    settled: list[Result] = []
    with publisher_of(routing, window_bytes=1_000_000, on_result=settled.append) as publisher:
        for number in range(5):
            publisher.publish("user-1", large)  # waits for the one before: two do not fit
            assert len(settled) >= number
        publisher.publish("user-1", b"")
        assert publisher.flush(PATIENCE).stored == 6
    found = [body for _, _, body in drain(cluster.nodes[0], routing.map.shard_of("user-1").name)]
    assert found == [large] * 5 + [b""]


def test_nothing_is_left_behind_and_a_closed_publisher_says_so(cluster: Cluster) -> None:
    routing = declare(cluster)
    with publisher_of(routing) as publisher:
        publisher.publish("user-1", b"x")
    assert not publisher._thread.is_alive()
    assert publisher.close() == Report()
    with pytest.raises(PublisherClosed):
        publisher.publish("user-1", b"x")
    assert "closed" in repr(publisher)


# What is refused at once.


def test_what_can_not_be_published_is_refused_before_anything_is_queued(cluster: Cluster) -> None:
    routing = declare(cluster)
    shard = routing.map.shards[0].name
    odd: Any = {"a": object()}
    with pytest.raises(InvalidInput, match="warren policy set"):
        ShardedPublisher(routing, "plain")
    with publisher_of(routing, max_message_bytes=10) as publisher:
        for key, body, properties, match in [
            ("k" * 256, b"", None, "255 bytes"),
            (shard, b"", None, "name of a shard"),
            (7, b"", None, "key"),
            ("k", "text", None, "must be bytes"),
            ("k", b"12345678901", None, "max_message_bytes"),
            ("k", b"", pika.BasicProperties(headers=odd), "AMQP can express"),
            ("k", b"", pika.BasicProperties(headers={"BCC": "x"}), "must not be set"),
            ("k", b"", pika.BasicProperties(headers={"CC": ["x"]}), "must not be set"),
            ("k", b"", pika.BasicProperties(headers={"fat": "x" * 131_000}), "131052 bytes"),
        ]:
            with pytest.raises(InvalidInput, match=match):
                publisher.publish(key, body, properties)  # type: ignore[arg-type]
        routing.away.add(shard)
        with pytest.raises(ShardUnavailable):
            publisher.publish(next(keys_of(routing, shard)), b"")
        assert publisher.flush(PATIENCE) == Report()


def test_properties_too_large_for_the_frames_agreed_on_are_refused_alone(cluster: Cluster) -> None:
    routing = declare(cluster)
    for known in routing.parameters.values():
        known[0].frame_max = 8192  # 4.1 and later take no less
    with publisher_of(routing) as publisher:
        for number in range(100):
            fat = pika.BasicProperties(headers={"fat": "x" * 9_000}) if number == 50 else None
            publisher.publish(f"k{number}", b"x", fat)
        report = publisher.flush(PATIENCE)
    assert failures(report) == {50: Outcome.REFUSED}
    assert "at most 8172 bytes" in report.not_stored[0].reason
    assert report.stored == 99


def test_wrong_credentials_refuse_quickly_and_show_no_secret(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    routing = declare(cluster)
    node = cluster.nodes[0]
    routing.parameters[node.name] = [parameters_for(node, password="s3cr3t-word")]
    with publisher_of(routing, confirm_timeout=4 * PATIENCE) as publisher:
        publisher.publish(next(keys_of(routing, shard_on(routing, cluster.nodes[0]))), b"x")
        publisher.publish(next(keys_of(routing, shard_on(routing, cluster.nodes[1]))), b"x")
        report = publisher.flush(PATIENCE)
        assert failures(report) == {0: Outcome.REFUSED}
        assert report.stored == 1
        assert "ACCESS_REFUSED" in report.not_stored[0].reason
        shown = f"{publisher!r} {report} {report!r} {caplog.text}"
    assert "s3cr3t" not in shown


@pytest.mark.parametrize("vhost", ["no-such-vhost", None])
def test_missing_vhost_or_exchange_refuses_quickly(cluster: Cluster, vhost: str | None) -> None:
    routing = declare(cluster)
    node = cluster.nodes[0]
    routing.parameters[node.name] = [parameters_for(node, vhost=vhost)]
    with connect(cluster.nodes[0]) as connection:
        connection.channel().exchange_delete(routing.map.logical)
    with publisher_of(routing, confirm_timeout=4 * PATIENCE) as publisher:
        publisher.publish(next(keys_of(routing, shard_on(routing, cluster.nodes[0]))), b"x")
        report = publisher.flush(PATIENCE)
    assert failures(report) == {0: Outcome.REFUSED}


def test_addresses_are_tried_in_order_until_one_answers(cluster: Cluster) -> None:
    routing = declare(cluster)
    node = cluster.nodes[0]
    dead = pika.ConnectionParameters("127.0.0.1", 1)
    unresolved = pika.ConnectionParameters("no-such-host.invalid", 5672)
    routing.parameters[node.name] = [unresolved, dead, *routing.parameters[node.name]]
    with publisher_of(routing) as publisher:
        publisher.publish(next(keys_of(routing, shard_on(routing, node))), b"x")
        assert publisher.flush(PATIENCE).stored == 1


def test_block_that_ends_without_flush_tells_what_is_not_stored(cluster: Cluster) -> None:
    routing = declare(cluster)
    routing.parameters.clear()
    with (
        pytest.raises(NotStored, match="1 refused") as caught,
        publisher_of(routing, confirm_timeout=0.3) as publisher,
    ):
        publisher.publish("user-1", b"x")
    assert "no address" in caught.value.report.not_stored[0].reason


# Unroutable.


@pytest.mark.parametrize("through", ["exchange", "default"])
def test_exactly_the_messages_of_a_missing_shard_are_unroutable(
    cluster: Cluster, through: Any
) -> None:
    routing = declare(cluster, per_node=2)
    missing = routing.map.shards[0].name
    with connect(cluster.nodes[0]) as connection:
        connection.channel().queue_delete(missing)
    with publisher_of(routing, through=through) as publisher:
        lost = set()
        for number in range(5_000):
            key = f"user-{number}"
            # All bodies alike: only the key and the order tell the messages apart.
            publisher.publish(key, b"same", pika.BasicProperties(headers={"n": number % 3}))
            if routing.map.shard_of(key).name == missing:
                lost.add(number)
        report = publisher.flush(PATIENCE)
    assert failures(report) == dict.fromkeys(lost, Outcome.UNROUTABLE)
    assert report.stored == 5_000 - len(lost)
    assert set(routing.suspects) == {missing}


def test_stored_and_unroutable_are_told_apart_while_the_shard_vanishes_under_load(
    cluster: Cluster,
) -> None:
    routing = declare(cluster)
    shard = routing.map.shards[0].name
    keys = list(islice(keys_of(routing, shard), 20))
    with (
        connect(cluster.nodes[0]) as connection,
        publisher_of(routing, window=500) as publisher,
    ):
        channel = connection.channel()
        for number in range(10_000):
            publisher.publish(keys[number % 20], b"%d" % number)
            if number == 3_000:
                channel.queue_unbind(shard, routing.map.logical, shard)
            if number == 6_000:
                channel.queue_bind(shard, routing.map.logical, shard)
        report = publisher.flush(PATIENCE)
    unroutable = failures(report)
    assert 0 < len(unroutable) < 10_000
    assert set(unroutable.values()) == {Outcome.UNROUTABLE}
    found = [int(body) for _, _, body in drain(cluster.nodes[0], shard)]
    assert found == [number for number in range(10_000) if number not in unroutable]


# Faults.


def test_after_kill_9_the_report_is_what_consumers_find(harmed: Cluster) -> None:
    routing = declare(harmed)
    victim = harmed.nodes[1]
    results: list[Result] = []
    with ShardedPublisher(
        routing, routing.map.logical, window=500, confirm_timeout=2, on_result=results.append
    ) as publisher:
        publish = Published(publisher)
        killer = threading.Thread(target=victim.kill)
        for number in count():
            publish(f"user-{number % 100}")
            if number == 2_000:
                killer.start()
            # Go on until the loss has been seen, and for a while after it.
            if number > 4_000 and not killer.is_alive() and len(routing.suspects) > 0:
                break
        killer.join()
        publish(next(keys_of(routing, shard_on(routing, victim))))
        report = publisher.flush()  # by their deadlines: nobody brings the node back
    assert report.pending == 0
    total = sum(map(len, publish.by_key.values()))
    assert report.stored + report.refused + report.unknown == total
    assert report.unroutable == 0
    assert report.omitted == 0
    assert shard_on(routing, victim) in routing.suspects
    outcomes = failures(report)
    assert Outcome.REFUSED in outcomes.values()
    assert sorted(result.number for result in results) == list(range(total))

    victim.restart()
    found = {int(body) for shard in bodies(harmed, routing).values() for body in shard}
    stored = set(range(total)) - outcomes.keys()
    assert stored <= found
    assert not found & {n for n, outcome in outcomes.items() if outcome is Outcome.REFUSED}


def test_what_was_not_sent_waits_for_the_node_and_keeps_its_order(harmed: Cluster) -> None:
    routing = declare(harmed)
    victim = harmed.nodes[2]
    keys = list(islice(keys_of(routing, shard_on(routing, victim)), 5))
    with ShardedPublisher(routing, routing.map.logical, confirm_timeout=200) as publisher:
        for number in range(100):
            publisher.publish(keys[number % 5], b"%d" % number)
        assert publisher.flush().stored == 100
        victim.kill()
        wait_until(lambda: not publisher._io_thread._links[victim.name].ready)
        for number in range(100, 300):
            publisher.publish(keys[number % 5], b"%d" % number)
        assert publisher.flush(timeout=0.2).pending == 200
        victim.restart()
        report = publisher.flush(timeout=PATIENCE)
    assert report == Report(stored=200)
    assert [int(b) for b in bodies(harmed, routing)[shard_on(routing, victim)]] == list(range(300))


def test_what_a_connection_that_was_given_up_had_on_its_way_is_unknown_and_may_come_later(
    cluster: Cluster,
) -> None:
    routing = declare(cluster)
    node = cluster.nodes[0]
    shard = shard_on(routing, node)
    key = next(keys_of(routing, shard))
    clock = Clock()
    with SlowNetwork(node.endpoint.address, node.endpoint.ports["amqp"]) as network:
        for parameters in routing.parameters[node.name]:
            parameters.host, parameters.port = network.host, network.port
        with TimedPublisher(clock, routing, routing.map.logical, confirm_timeout=1) as publisher:
            publisher.publish(key, b"in time")
            assert publisher.flush() == Report(stored=1)
            network.hold()
            publisher.publish(key, b"held back")
            wait_until(lambda: network.is_holding)
            clock.pass_by(1)
            assert failures(publisher.flush()) == {1: Outcome.UNKNOWN}
            publisher.publish(key, b"over the next connection")
            assert publisher.flush(PATIENCE) == Report(stored=1)
        network.let_go()
        found: list[bytes] = []

        def has_arrived() -> bool:
            found.extend(body for _, _, body in drain(node, shard))
            return len(found) == 3

        wait_until(has_arrived, explain=lambda: str(found))
    assert found == [b"in time", b"over the next connection", b"held back"]


def test_publish_to_a_dead_shard_through_a_living_node_is_not_stored_and_suspect(
    harmed: Cluster, chosen_version: str
) -> None:
    """The map says that the shard is reached through a node that it does not live on."""
    routing = declare(harmed)
    home, gate = harmed.nodes[1], harmed.nodes[0]
    shard = shard_on(routing, home)
    moved = [replace(s, node=gate.name) if s.name == shard else s for s in routing.map.shards]
    routing.map = replace(routing.map, shards=tuple(moved))
    key = next(keys_of(routing, shard))
    with ShardedPublisher(routing, routing.map.logical, confirm_timeout=PATIENCE) as publisher:
        publisher.publish(key, b"before")
        assert publisher.flush().stored == 1
        home.kill()
        publisher.publish(key, b"after")
        report = publisher.flush(timeout=PATIENCE)
    # 4.0 nacks. 3.10 takes queues on dead nodes out of the routes as soon as it knows of the death.
    outcomes = (
        {Outcome.UNKNOWN, Outcome.UNROUTABLE} if chosen_version == "3.10" else {Outcome.UNKNOWN}
    )
    assert failures(report).keys() == {1}
    assert failures(report)[1] in outcomes
    assert routing.suspects == [shard]


def test_frozen_node_lets_deadlines_fire_and_close_end(harmed: Cluster) -> None:
    routing = declare(harmed)
    victim = harmed.nodes[0]
    sick = list(islice(keys_of(routing, shard_on(routing, victim)), 2))
    well = next(keys_of(routing, shard_on(routing, harmed.nodes[1])))
    clock = Clock()
    publisher = TimedPublisher(clock, routing, routing.map.logical, confirm_timeout=1.5)
    publisher.publish(sick[0], b"connected")
    assert publisher.flush().stored == 1
    victim.freeze()
    try:
        publisher.publish(sick[0], b"sent")
        clock.pass_by(1.4)
        assert publisher.flush(timeout=0.3).pending == 1
        clock.pass_by(0.1)
        assert failures(publisher.flush()) == {1: Outcome.UNKNOWN}
        # The connection that owes a confirm gets no more: what comes now is refused, not unknown.
        publisher.publish(sick[1], b"not sent")
        publisher.publish(well, b"elsewhere")
        wait_until(lambda: publisher.counters["stored"] == 2)  # with the first one
        clock.pass_by(1.5)
        report = publisher.flush()
        assert failures(report) == {2: Outcome.REFUSED}
        assert report.stored == 1
        publisher.publish(sick[0], b"at the end")
        given_up = publisher.close(timeout=0.8)
        publisher._thread.join(30)
        assert not publisher._thread.is_alive()  # and the node still hangs
        in_the_end = publisher.close()  # what a busy machine did not settle in the first's time
        assert len(given_up.not_stored + in_the_end.not_stored) == 1
    finally:
        publisher.close(timeout=1)
        victim.thaw()


def test_thawed_node_is_used_again(harmed: Cluster) -> None:
    routing = declare(harmed)
    victim = harmed.nodes[0]
    key = next(keys_of(routing, shard_on(routing, victim)))
    clock = Clock()
    with TimedPublisher(clock, routing, routing.map.logical, confirm_timeout=3) as publisher:
        publisher.publish(key, b"before")
        assert publisher.flush() == Report(stored=1)
        victim.freeze()
        try:
            publisher.publish(key, b"during")
            clock.pass_by(3)
            assert failures(publisher.flush()) == {1: Outcome.UNKNOWN}
        finally:
            victim.thaw()
        harmed.wait_until_whole()
        publisher.publish(key, b"after")
        assert publisher.flush(timeout=60).stored == 1


def test_window_holds_publishers_back_and_says_so(harmed: Cluster) -> None:
    routing = declare(harmed)
    victim = harmed.nodes[0]
    key = next(keys_of(routing, shard_on(routing, victim)))
    clock = Clock()
    victim.freeze()
    try:
        with (
            TimedPublisher(
                clock, routing, routing.map.logical, window=10, confirm_timeout=2
            ) as publisher,
            ThreadPoolExecutor(1) as other,
        ):
            for _ in range(10):
                publisher.publish(key, b"x")
            with pytest.raises(WindowFull, match="10 of 10 messages"):
                publisher.publish(key, b"x", timeout=0.2)
            eleventh = other.submit(publisher.publish, key, b"x")
            wait_until(lambda: publisher._waiters)
            clock.pass_by(2)
            assert eleventh.result(30) == 10  # room comes with the deadlines
            clock.pass_by(2)
            assert publisher.flush().refused == 11
    finally:
        victim.thaw()


def test_blocked_connection_sends_nothing_more_until_the_alarm_ends(harmed: Cluster) -> None:
    routing = declare(harmed)
    node = harmed.nodes[0]
    key = next(keys_of(routing, shard_on(routing, node)))
    clock = Clock()
    with TimedPublisher(clock, routing, routing.map.logical, confirm_timeout=1.5) as publisher:
        publisher.publish(key, b"before")
        assert publisher.flush(PATIENCE).stored == 1
        link = publisher._io_thread._links[node.name]
        node.driver.ctl("set_vm_memory_high_watermark", "0.0001")
        try:
            # The broker tells a connection when it publishes into the alarm, or has before.
            publisher.publish(key, b"into the alarm")
            wait_until(lambda: link.blocked)
            publisher.publish(key, b"not sent")
            clock.pass_by(1.5)
            report = publisher.flush(PATIENCE)
            assert failures(report)[2] is Outcome.REFUSED
            assert "alarm" in {each.number: each.reason for each in report.not_stored}[2]
        finally:
            node.driver.ctl("set_vm_memory_high_watermark", "0.4")
        publisher.publish(key, b"after")
        assert publisher.flush(PATIENCE).stored == 1
    found = bodies(harmed, routing)[shard_on(routing, node)]
    assert b"not sent" not in found
    assert found[0] == b"before"
    assert found[-1] == b"after"


def test_map_that_changes_moves_what_waits_in_order_and_leaves_the_rest(harmed: Cluster) -> None:
    routing = declare(harmed)
    whole, victim = routing.map, harmed.nodes[1]
    gone = shard_on(routing, victim)
    keys = list(islice(keys_of(routing, gone), 5))
    stays = next(keys_of(routing, whole.shards[0].name))
    with ShardedPublisher(routing, routing.map.logical, confirm_timeout=60) as publisher:
        publish = Published(publisher)
        publish(stays)
        assert publisher.flush() == Report(stored=1)
        victim.kill()
        for number in range(50):
            publish(keys[number % 5])
        assert publisher.flush(timeout=0.2).pending == 50
        routing.map = replace(
            whole, epoch=2, shards=tuple(shard for shard in whole.shards if shard.name != gone)
        )
        # Nobody publishes: the publisher's harmed tick sees the new map.
        assert publisher.flush(PATIENCE) == Report(stored=50)
        for number in range(50):
            publish(keys[number % 5])
        publish(stays)
        assert publisher.flush(PATIENCE) == Report(stored=51)
    found = bodies(harmed, routing)
    for key, numbers in publish.by_key.items():
        mine = set(numbers)
        there = [int(b) for b in found[routing.map.shard_of(key).name] if int(b) in mine]
        assert there == numbers


def test_map_of_a_log_that_was_made_again_counts_although_its_epoch_is_lower(
    cluster: Cluster,
) -> None:
    """Found by an audit: what belongs to a shard that the old map did not have went to another one,
    by the old map, for as long as the publisher lived."""
    routing = declare(cluster, per_node=2)
    whole = routing.map
    half = tuple(shard for shard in whole.shards if shard.name.endswith(" - 0"))
    routing.map = replace(whole, epoch=12, shards=half)
    with ShardedPublisher(routing, whole.logical, confirm_timeout=PATIENCE) as publisher:
        publisher.publish("before", b"before")
        assert publisher.flush(PATIENCE) == Report(stored=1)
        routing.map = whole
        keys = [f"key-{number}" for number in range(100)]
        for key in keys:
            publisher.publish(key, key.encode())
        assert publisher.flush(PATIENCE) == Report(stored=100)
    for shard, found in bodies(cluster, routing).items():
        mine = [key.encode() for key in keys if whole.shard_of(key).name == shard]
        assert [body for body in found if body != b"before"] == mine


def test_publisher_that_was_idle_goes_by_the_exchange_of_the_newest_map(cluster: Cluster) -> None:
    """Found by an attack: the first messages after the plugin's exchange was removed went to the
    exchange of the map before, and were unknown when that was gone as well."""
    routing = declare(cluster)
    logical = routing.map.logical
    between = f"warren: {logical}"
    with connect(cluster.nodes[0]) as connection:
        channel = connection.channel()
        channel.exchange_declare(between, "direct", durable=True)
        for shard in routing.map.shards:
            channel.queue_bind(shard.name, between, shard.name)
    after = replace(routing.map, epoch=2)
    routing.map = replace(routing.map, exchange=between)
    with ShardedPublisher(routing, logical, confirm_timeout=PATIENCE) as publisher:
        keys = [next(keys_of(routing, shard.name)) for shard in routing.map.shards]
        for key in keys:
            publisher.publish(key, b"before")
        assert publisher.flush(PATIENCE) == Report(stored=3)
        wait_until(lambda: not publisher._io_thread._ticking)
        routing.map = after
        with connect(cluster.nodes[0]) as connection:
            connection.channel().exchange_delete(between)
        for key in keys:
            publisher.publish(key, b"after")
        assert publisher.flush(PATIENCE) == Report(stored=3)
