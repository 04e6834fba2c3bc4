"""Producers on a real cluster, of the newest and of the oldest version."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from sharding.errors import InvalidInput, LocalError
from sharding.maps.slots import murmur3
from sharding.stream import (
    Compression,
    Producer,
    ProducerOptions,
    Properties,
    PublishersBlocked,
    StreamEnvironment,
    StreamNotFound,
    Unroutable,
)
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.support import patient
from tests.support.streams import environment_of, leader_node, read_all, stream_in, super_stream_in

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def environment(nodes: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(nodes, **patient.STREAMS) as opened:
        yield opened


@pytest.fixture
def stream(environment: StreamEnvironment) -> Iterator[str]:
    with stream_in(environment) as name:
        yield name


def stored(environment: StreamEnvironment, stream: str, count: int) -> list[bytes]:
    """All bodies of a stream that must hold exactly `count`."""
    with environment.consumer(stream, offset="first", **patient.READER) as consumer:
        found = read_all(consumer, count)
        assert next(consumer.messages(timeout=0.3), None) is None, "more than was sent"
    return found.get(stream, [])


def test_messages_are_stored_in_order_whatever_their_size(
    environment: StreamEnvironment, stream: str
) -> None:
    bodies = [bytes([n % 256]) * size for n in range(40) for size in (0, 1, 255, 256, 70_000)]
    with environment.producer(stream) as producer:
        for body in bodies[:100]:
            producer.send(body)
        producer.send_many(bodies[100:])
        assert producer.flush(PATIENCE).stored == 200
    assert stored(environment, stream, 200) == bodies


def test_a_message_as_large_as_a_frame_allows_is_stored_and_a_larger_one_refused(
    environment: StreamEnvironment, stream: str
) -> None:
    with environment.producer(stream) as producer:
        largest = 1024 * 1024 - 13 - 14 - 8
        producer.send(b"x" * largest)
        with pytest.raises(InvalidInput, match=f"{largest} bytes at most; raise frame_max"):
            producer.send(b"x" * (largest + 1))
        assert producer.flush(PATIENCE).stored == 1
    assert list(map(len, stored(environment, stream, 1))) == [largest]


def test_a_named_producer_goes_on_and_repeats_nothing(
    environment: StreamEnvironment, stream: str
) -> None:
    options = ProducerOptions(name="billing")
    with environment.producer(stream, options) as first:
        first.send_many([b"%d" % n for n in range(1_000)])
        first.flush(PATIENCE).raise_for_failures()
        assert first.last_publishing_ids == {stream: 1_000}
    with environment.producer(stream, options) as second:
        assert second.last_publishing_ids == {stream: 1_000}
        second.send_many([b"%d" % n for n in range(1_000)], publishing_ids=range(1, 1_001))
        second.send(b"new")
        assert second.flush(PATIENCE).stored == 1_001
    assert stored(environment, stream, 1_001) == [b"%d" % n for n in range(1_000)] + [b"new"]


def test_a_name_has_ids_of_its_own_on_each_partition(environment: StreamEnvironment) -> None:
    options = ProducerOptions(name="billing")
    with super_stream_in(environment) as invoices:
        keys = [f"customer-{n}" for n in range(500)]
        expected = {
            stream: sum(murmur3(key) % 3 == n for key in keys)
            for n, stream in enumerate(environment.partitions(invoices))
        }
        for _ in range(2):
            with environment.producer(invoices, options) as producer:
                before = dict(producer.last_publishing_ids)
                producer.send_many([b""] * 500, keys)
                assert producer.flush(PATIENCE).stored == 500
                for stream, count in expected.items():
                    assert producer.last_publishing_ids[stream] == before[stream] + count


@pytest.mark.parametrize("codec", list(Compression))
def test_sub_entry_batches_are_read_back_with_every_codec(
    environment: StreamEnvironment, stream: str, codec: Compression
) -> None:
    bodies = [b"%06d" % n * 20 for n in range(2_345)]
    options = ProducerOptions(name="p", sub_entry_messages=100, compression=codec)
    with environment.producer(stream, options) as producer:
        producer.send_many(bodies)
        assert producer.flush(PATIENCE).stored == 2_345
        assert producer.last_publishing_ids == {stream: 2_345}
    with environment.producer(stream, options) as again:
        assert again.last_publishing_ids == {stream: 2_345}
    assert stored(environment, stream, 2_345) == bodies


def test_filter_values_where_the_broker_can_and_a_clear_error_where_not(
    environment: StreamEnvironment, stream: str, any_version: str
) -> None:
    options = ProducerOptions(filtering=True)
    if any_version == "3.10":
        with pytest.raises(LocalError, match=r"filter values need RabbitMQ 3\.13"):
            environment.producer(stream, options)
        return
    with environment.producer(stream, options) as producer:
        for country in ("de", "fr", None):
            producer.send_many([b"%a" % country] * 100, filter_values=[country] * 100)
            producer.flush(PATIENCE).raise_for_failures()
        producer.send(b"end", filter_value="fr")
        producer.flush(PATIENCE).raise_for_failures()
    found = set[bytes]()
    with environment.consumer(
        stream, offset="first", filter_values=("fr",), **patient.READER
    ) as consumer:
        for message in consumer.messages(timeout=PATIENCE):
            if message.body == b"end":
                break
            found.add(message.body)
        else:
            pytest.fail("the end was not read")
    assert b"'fr'" in found
    assert b"'de'" not in found


def test_key_and_properties_are_read_back(environment: StreamEnvironment, stream: str) -> None:
    with environment.producer(stream) as producer:
        producer.send(b"1", key="customer-7")
        producer.send(
            b"2",
            key="ключ",
            properties=Properties(message_id="m-1"),
            application_properties={"n": 1},
        )
        producer.send(b"3")
        producer.flush(PATIENCE).raise_for_failures()
    with environment.consumer(stream, offset="first", **patient.READER) as consumer:
        messages = consumer.messages(timeout=PATIENCE)
        first, second, third = (next(messages) for _ in range(3))
    assert [first.key, second.key, third.key] == ["customer-7", "ключ", None]
    assert second.properties is not None
    assert second.properties.message_id == "m-1"
    assert second.application_properties == {"n": 1}


def test_the_broker_routes_keys_by_its_bindings(environment: StreamEnvironment) -> None:
    with (
        super_stream_in(environment) as invoices,
        environment.producer(invoices, partitioning="broker") as producer,
    ):
        # Super streams made with a number of partitions are bound under those numbers.
        producer.send_many([b"0", b"1", b"2", b"2"], ["0", "1", "2", "2"])
        with pytest.raises(Unroutable):
            producer.send(b"", key="nowhere")
        assert producer.flush(PATIENCE).stored == 4
        for n, stream in enumerate(environment.partitions(invoices)):
            assert set(stored(environment, stream, 2 if n == 2 else 1)) == {b"%d" % n}


def test_producers_of_streams_on_one_node_share_a_connection_and_end_alone(
    nodes: Cluster, environment: StreamEnvironment, stream: str
) -> None:
    leader = leader_node(nodes, environment, stream)
    first = environment.producer(stream)
    second = environment.producer(stream)
    publishings = [producer._writers[0]._publishing for producer in (first, second)]
    clients = [publishing._client for publishing in publishings if publishing]
    assert clients[0] is clients[1]
    assert clients[0].node == (leader.endpoint.address, leader.endpoint.ports["stream"])
    first.send(b"1")
    assert first.close().stored == 1
    second.send(b"2")
    assert second.close().stored == 1
    assert not clients[0].closed


@pytest.mark.twin(
    "integration/test_stream_producers.py::test_a_producer_goes_on_when_the_streams_leader_is_elected_anew",
    on="3.10",
)
def test_a_producer_goes_on_when_the_streams_leader_is_elected_anew(
    nodes: Cluster, environment: StreamEnvironment, stream: str
) -> None:
    ended = threading.Event()
    sent = 0
    with environment.producer(stream, ProducerOptions(name="p")) as producer:

        def send() -> None:
            nonlocal sent
            while not ended.is_set():
                # As long as elections may take.
                producer.send_many([b"%d" % n for n in range(sent, sent + 500)], timeout=90)
                sent += 500
                # Something should be under way at every moment, but the brokers share two cores.
                ended.wait(0.02)

        sending = threading.Thread(target=send)
        sending.start()
        try:
            for _ in range(3):
                before = producer.counters["recoveries"]  # one kill may take several
                kill_leader_process(nodes, environment, stream)
                wait_until(partial(has_recovered_since, producer, before))
        finally:
            ended.set()
            sending.join()
        report = producer.flush(PATIENCE)
        report.raise_for_failures()
        assert report.stored == sent
    assert stored(environment, stream, sent) == [b"%d" % n for n in range(sent)]


def has_recovered_since(producer: Producer, before: float) -> bool:
    return producer.counters["recoveries"] > before


def kill_leader_process(nodes: Cluster, environment: StreamEnvironment, stream: str) -> None:
    """Not the node, only the process that leads one stream there: the others elect a leader."""
    node = leader_node(nodes, environment, stream)
    names = f'<<"{nodes.vhost}">>, <<"{stream}">>'
    killed = node.driver.ask_cluster(
        f"begin At = '{node.name}',"
        f" {{ok, Leader}} = rpc:call(At, rabbit_stream_manager, lookup_leader, [{names}]),"
        " rpc:call(At, erlang, exit, [Leader, kill]) end"
    )
    assert killed.strip() == "true"


@pytest.mark.twin(
    "integration/test_stream_producers.py::test_a_producer_whose_stream_is_deleted_fails", on="3.10"
)
def test_a_producer_whose_stream_is_deleted_fails(
    environment: StreamEnvironment, stream: str
) -> None:
    producer = environment.producer(stream)
    producer.send(b"x")
    producer.flush(PATIENCE).raise_for_failures()
    environment.delete_stream(stream)

    def fails() -> bool:
        try:
            producer.send(b"y")
        except StreamNotFound:
            return True
        return False

    wait_until(fails)
    report = producer.close()
    assert report.stored + report.refused + report.unknown > 0
    assert report.pending == 0


def test_there_is_no_producer_to_a_stream_that_does_not_exist(
    environment: StreamEnvironment,
) -> None:
    with pytest.raises(StreamNotFound):
        environment.producer("no-such-stream")


def test_many_threads_may_use_one_producer(environment: StreamEnvironment) -> None:
    with super_stream_in(environment) as invoices:
        with environment.producer(invoices, ProducerOptions(name="p")) as producer:

            def run(thread: int) -> None:
                for n in range(2_000):
                    producer.send(b"%d %d" % (thread, n), key=f"key-{n % 50}")

            threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert producer.flush(PATIENCE).stored == 8_000
        with environment.consumer(invoices, offset="first", **patient.READER) as consumer:
            found = read_all(consumer, 8_000)
        for bodies in found.values():
            for number in range(4):
                mine = [int(n) for t, n in map(bytes.split, bodies) if int(t) == number]
                assert mine == sorted(set(mine))


@pytest.mark.twin("unit/stream/test_producer.py::test_an_alarm_of_any_length_ends_no_producer")
def test_a_producer_outlives_a_disk_alarm_of_any_length(harmed: Cluster) -> None:
    options = ProducerOptions(name="p", confirm_timeout=1, recovery_timeout=15)
    with environment_of(harmed, **patient.STREAMS) as environment, stream_in(environment) as stream:
        # At another node new connections are not told of an alarm that is on already (4.0.5).
        node = leader_node(harmed, environment, stream)
        producer = environment.producer(stream, options)
        producer.send(b"before")
        assert producer.flush(PATIENCE).stored == 1
        reconnecting = producer._writers[0].reconnecting
        node.driver.ctl("set_disk_free_limit", "1000000GB")
        try:

            def has_waited_longer_than_its_time() -> bool:
                producer.send(b"into the alarm")
                outage = reconnecting.outage
                waited = 0.0 if outage is None else outage.deadline - outage.since
                return waited > 2 * options.recovery_timeout

            wait_until(has_waited_longer_than_its_time, 2 * PATIENCE)
            with pytest.raises(PublishersBlocked, match="disk alarm"):
                environment.producer(stream, open_timeout=PATIENCE)
            producer.send(b"last")
        finally:
            node.driver.ctl("set_disk_free_limit", "50MB")
        report = producer.close(PATIENCE)
        assert report.all_stored
        found = stored(environment, stream, report.stored + 1)
    assert found == [b"before", *[b"into the alarm"] * (report.stored - 1), b"last"]


LEFT_OPEN = """
import sys
from sharding.stream import StreamEnvironment
from tests.support import patient
producer = StreamEnvironment(sys.argv[1], **patient.STREAMS).producer(sys.argv[2])
producer.send(b"x")
print(producer.flush(60).stored)
"""


def test_a_producer_left_open_does_not_keep_the_process_alive(nodes: Cluster, stream: str) -> None:
    arguments = [sys.executable, "-c", LEFT_OPEN, nodes.nodes[0].endpoint.stream_url, stream]
    ended = subprocess.run(
        arguments, cwd=PROJECT, capture_output=True, text=True, timeout=2 * PATIENCE, check=True
    )
    assert ended.stdout == "1\n"
