"""Consumers on a real cluster, of the newest and of the oldest version."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from sharding.stream import (
    Broker,
    Consumer,
    ConsumerOptions,
    DataLost,
    Ends,
    NodeNotReached,
    StreamEnvironment,
    StreamNotFound,
)
from sharding.stream.errors import NotSupported
from sharding.stream.protocol.commands import Metadata, Subscribe, Unsubscribe
from sharding.stream.protocol.constants import FIRST, NEXT, OffsetSpec
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.stream_recorder import Recorder
from tests.support.streams import (
    environment_of,
    leader_node,
    publish,
    read_all,
    stream_address,
    stream_in,
    super_stream_in,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def environment(nodes: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(nodes, **patient.STREAMS) as opened:
        yield opened


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def test_super_stream_is_read_whole_once_and_in_order_per_partition(
    environment: StreamEnvironment,
) -> None:
    with super_stream_in(environment) as invoices:
        with environment.producer(invoices) as producer:
            producer.send_many(numbers(0, 30_000), [f"customer-{n % 97}" for n in range(30_000)])
            producer.flush(timeout=PATIENCE).raise_for_failures()
        with environment.consumer(invoices, offset="first", **patient.READER) as consumer:
            found = read_all(consumer, 30_000)
        assert set(found) == set(environment.partitions(invoices))
        for bodies in found.values():
            values = [int(body) for body in bodies]
            assert values == sorted(set(values))


def test_consumers_begin_where_they_are_told(environment: StreamEnvironment) -> None:
    with stream_in(environment) as stream:
        publish(environment, stream, numbers(0, 1000))
        between = datetime.now(UTC)
        wait_until(lambda: datetime.now(UTC).timestamp() > between.timestamp() + 0.01)
        publish(environment, stream, numbers(1000, 1500))
        for offset, expected in (("first", 0), (321, 321), (between, 1000)):
            with environment.consumer(stream, offset=offset, **patient.READER) as consumer:
                message = next(consumer.messages(timeout=PATIENCE))
                assert (message.body, message.offset) == (b"%d" % expected, expected)
        with environment.consumer(stream, offset="last", **patient.READER) as consumer:
            batch = next(consumer.batches(timeout=PATIENCE))
            assert batch.column("body")[-1].as_py() == b"1499"
        with environment.consumer(stream, offset="next", **patient.READER) as consumer:
            publish(environment, stream, [b"new"])
            assert next(consumer.messages(timeout=PATIENCE)).body == b"new"


def test_silence_ends_the_iteration(environment: StreamEnvironment) -> None:
    with (
        stream_in(environment) as stream,
        environment.consumer(stream, **patient.READER) as consumer,
    ):
        assert list(consumer.batches(timeout=0.1)) == []
        assert list(consumer.messages(timeout=0.1)) == []


def test_consumers_are_spread_over_replicas_and_not_put_on_the_leader(
    environment: StreamEnvironment, nodes: Cluster
) -> None:
    with stream_in(environment) as stream, ExitStack() as open_ones:
        leader = Broker(*stream_address(leader_node(nodes, environment, stream)))
        # Twelve throws of a coin may fall on one side; not with this seed.
        environment._access.rng.seed(1)
        consumers = [
            open_ones.enter_context(environment.consumer(stream, **patient.READER))
            for _ in range(12)
        ]
        used = {consumer.nodes[stream] for consumer in consumers}
        assert leader not in used
        assert len(used) == 2


def test_own_host_is_preferred(nodes: Cluster) -> None:
    with environment_of(nodes, **patient.STREAMS) as environment, stream_in(environment) as stream:
        for replica in environment.route(stream).replicas:
            with environment_of(
                nodes, own_hosts=frozenset({replica.host}), **patient.STREAMS
            ) as at_home:
                for _ in range(3):
                    with at_home.consumer(stream, **patient.READER) as consumer:
                        assert consumer.nodes[stream] == replica


def test_replica_can_be_insisted_on(environment: StreamEnvironment) -> None:
    with stream_in(environment, initial_cluster_size=1) as stream:
        with environment.consumer(stream, **patient.READER) as consumer:
            assert consumer.nodes[stream] == environment.route(stream).leader
        with pytest.raises(Exception, match="require_replica"):
            environment.consumer(stream, require_replica=True, subscribe_timeout=0.5)


def test_deleted_stream_ends_its_consumers(environment: StreamEnvironment) -> None:
    with stream_in(environment) as stream:
        publish(environment, stream, numbers(0, 10))
        with environment.consumer(stream, offset="first", **patient.READER) as consumer:
            read_all(consumer, 10)
            environment.delete_stream(stream)
            with pytest.raises(StreamNotFound):
                next(consumer.batches(timeout=PATIENCE))


def test_closed_consumer_ends_the_iteration_of_another_thread(
    environment: StreamEnvironment,
) -> None:
    with stream_in(environment) as stream:
        consumer = environment.consumer(stream, **patient.READER)
        iterating = threading.Thread(target=lambda: list(consumer.batches()))
        iterating.start()
        consumer.close()
        iterating.join(PATIENCE)  # it ends at once, or never
        assert not iterating.is_alive()


def publish_chunks(environment: StreamEnvironment, stream: str, first: int, end: int) -> None:
    """A hundred messages at a time in one entry, which no broker divides, each confirmed before
    the next: so in a chunk of their own."""
    with environment.producer(stream, sub_entry_messages=100) as producer:
        for start in range(first, end, 100):
            producer.send_many(numbers(start, start + 100))
            producer.flush(timeout=PATIENCE).raise_for_failures()


def held_chunks(consumer: Consumer, stream: str, at_least: int) -> int:
    """How many chunks wait here, once they are so many and all that was asked for has come.

    A broker answers what a connection sends in order. So a chunk for credit that was given before
    comes before the answer to a question that was asked after it.
    """
    subscription = consumer._subscriptions[stream]
    wait_until(
        lambda: subscription.lane.waiting >= at_least, explain=lambda: repr(subscription.lane)
    )
    subscription.connection(time.monotonic() + 30).call(Metadata((stream,)))
    return subscription.lane.waiting


def test_slow_consumer_holds_as_many_chunks_as_it_gave_credit_for_and_gets_everything(
    environment: StreamEnvironment,
) -> None:
    # A stream with one member, where all that is confirmed can be delivered at once.
    with stream_in(environment, initial_cluster_size=1) as stream:
        publish_chunks(environment, stream, 0, 5_000)
        with environment.consumer(stream, offset="first", credits=2, **patient.READER) as consumer:
            assert held_chunks(consumer, stream, 2) == 2
            batch = next(consumer.batches(timeout=PATIENCE))
            assert consumer.counters["chunks"] == 2
            assert held_chunks(consumer, stream, 2) == 2, "those that took the place of the taken"
            rest = read_all(consumer, 5_000 - batch.num_rows)[stream]
            assert batch.column("body").to_pylist() + rest == numbers(0, 5_000)


def test_credit_that_the_broker_keeps_back_does_not_stall_a_slow_consumer(
    environment: StreamEnvironment,
) -> None:
    with (
        stream_in(environment) as stream,
        environment.consumer(stream, offset="first", credits=2, **patient.READER) as consumer,
    ):
        publish_chunks(environment, stream, 0, 100)
        assert held_chunks(consumer, stream, 1) == 1
        # From 3.12 on a broker that came to the stream's end begins again only when it has more
        # than half of the first credit: with one of two left, it waits for us to take the chunk.
        publish_chunks(environment, stream, 100, 5_000)
        assert held_chunks(consumer, stream, 1) <= 2
        assert read_all(consumer, 5_000)[stream] == numbers(0, 5_000)


def test_offsets_of_a_stream(environment: StreamEnvironment) -> None:
    with stream_in(environment) as stream:
        assert environment.offsets(stream) is None
        publish(environment, stream, numbers(0, 100))
        ends = environment.offsets(stream)
        assert isinstance(ends, Ends)
        assert (ends.first, ends.last) == (0, 99)
        with environment.consumer(
            stream, ConsumerOptions(offset="first", name="joe"), **patient.READER
        ) as consumer:
            read_all(consumer, 100)
            consumer.store_offset()
        assert environment.offsets(stream) == ends, "a stored offset is no message"


def rows_of(environment: StreamEnvironment, stream: str, first: int, end: int) -> list[bytes]:
    batches = list(environment.read_range(stream, first, end, timeout=PATIENCE))
    return pa.Table.from_batches(batches).column("body").to_pylist() if batches else []


def test_range_holds_exactly_its_rows_whatever_lies_at_its_end(
    environment: StreamEnvironment,
) -> None:
    with stream_in(environment) as stream:
        assert rows_of(environment, stream, 0, 100) == []
        publish(environment, stream, numbers(0, 1000))
        assert rows_of(environment, stream, 0, 1000) == numbers(0, 1000)
        assert rows_of(environment, stream, 17, 601) == numbers(17, 601)
        assert rows_of(environment, stream, 990, 5000) == numbers(990, 1000)
        with environment.consumer(
            stream, ConsumerOptions(offset="first", name="joe"), **patient.READER
        ) as consumer:
            for _ in range(3):  # each makes an offset that never is a message
                consumer.store_offset(stream, 5)
        assert rows_of(environment, stream, 0, 1002) == numbers(0, 1000)
        assert rows_of(environment, stream, 1000, 1003) == []
        publish(environment, stream, numbers(1000, 1100))
        after = environment.offsets(stream)
        assert after is not None
        assert after.last > 1099
        assert rows_of(environment, stream, 0, 1001) == numbers(0, 1000)
        assert rows_of(environment, stream, 990, after.last + 1) == numbers(990, 1100)


def test_messages_lost_to_retention_are_reported(environment: StreamEnvironment) -> None:
    kept = {"max_length_bytes": 300_000, "max_segment_bytes": 100_000}
    with stream_in(environment, **kept) as stream:
        bodies = [b"x" * 1000 for _ in range(100)]
        for _ in range(20):
            publish(environment, stream, bodies)
        wait_until(lambda: begins_late(environment, stream))
        with pytest.raises(DataLost) as caught:
            rows_of(environment, stream, 0, 2000)
        assert caught.value.asked == 0
        assert caught.value.found > 0
        with environment.consumer(stream, offset=0, **patient.READER) as consumer:
            with pytest.raises(DataLost) as caught:
                next(consumer.batches(timeout=PATIENCE))
            assert next(consumer.messages(timeout=PATIENCE)).offset == caught.value.found
        with environment.consumer(
            stream, offset=0, on_data_loss="skip", **patient.READER
        ) as consumer:
            # Each replica deletes on its own, so they need not begin alike.
            assert next(consumer.messages(timeout=PATIENCE)).offset


def begins_late(environment: StreamEnvironment, stream: str) -> bool:
    ends = environment.offsets(stream)
    return ends is not None and ends.first > 0


def test_balancer_that_reaches_one_node_only_fails_a_consumer_in_bounded_time(
    nodes: Cluster, environment: StreamEnvironment
) -> None:
    with stream_in(environment) as stream:
        leader = leader_node(nodes, environment, stream)
        balancer = nodes.balancer([leader])
        try:
            with (
                StreamEnvironment(
                    balancer.endpoint.stream_url, load_balancer=True, tries_per_node=2
                ) as through,
                pytest.raises(NodeNotReached, match=leader.endpoint.address),
            ):
                through.consumer(stream, require_replica=True)
        finally:
            balancer.stop()


GROUP = ConsumerOptions(offset="first", name="group", single_active=True)


def has_single_active(environment: StreamEnvironment) -> bool:
    return (environment._locator.server_version or (0,)) >= (3, 11)


def active_in(consumers: list[Consumer], stream: str) -> list[Consumer]:
    return [consumer for consumer in consumers if stream in consumer.active]


def test_single_active_consumers_share_a_super_stream_and_take_over(
    environment: StreamEnvironment,
) -> None:
    with super_stream_in(environment) as invoices, ExitStack() as open_ones:
        streams = environment.partitions(invoices)

        def member() -> Consumer:
            return open_ones.enter_context(environment.consumer(invoices, GROUP, **patient.READER))

        if not has_single_active(environment):
            with pytest.raises(NotSupported, match=r"3\.11"):
                member()
            return
        members = [member() for _ in range(3)]
        wait_until(
            lambda: sorted(len(each.active) for each in members) == [1, 1, 1],
            explain=lambda: str([each.active for each in members]),
        )
        for stream in streams:
            publish(environment, stream, numbers(0, 100))
        for each in members:
            (own,) = each.active
            assert read_all(each, 100) == {own: numbers(0, 100)}
            each.store_offset()
        leaving = members.pop()
        (left,) = leaving.active
        for stream in streams:
            publish(environment, stream, numbers(100, 150))
        leaving.close()
        wait_until(lambda: len(active_in(members, left)) == 1)
        heirs = active_in(members, left)
        found = read_all(heirs[0], 50 * len(heirs[0].active))
        assert found[left] == numbers(100, 150), "it goes on after what was stored"


def test_broker_makes_nobody_active_before_the_one_that_steps_down_has_answered(
    environment: StreamEnvironment,
) -> None:
    if not has_single_active(environment):
        pytest.skip("single active consumers came with RabbitMQ 3.11")
    with super_stream_in(environment, 2) as invoices:
        stream = environment.partitions(invoices)[1]  # of two in line it is the second one's
        handler = Recorder()
        access = environment._access
        leader = access.routes.leader(stream, PATIENCE)
        client, number = access.pool.subscriber(
            [leader], stream, handler, access.clock() + PATIENCE
        )
        properties = GROUP.subscription_properties(invoices)
        client.call(Subscribe(number, stream, FIRST, 1, properties))
        assert handler.wait_for(1) == [("activity", True)]
        handler.answer = later = Future[OffsetSpec]()
        with environment.consumer(invoices, GROUP, **patient.READER) as second:
            assert handler.wait_for(2)[-1] == ("activity", False)
            time.sleep(0.5)  # time in which the broker must do nothing
            assert stream not in second.active
            later.set_result(NEXT)
            wait_until(lambda: stream in second.active)
        client.call(Unsubscribe(number))
        client.detach_subscriber(number)
        access.pool.release(client)


def test_filters_leave_out_chunks(environment: StreamEnvironment) -> None:
    with stream_in(environment) as stream:
        if not has_single_active(environment):
            with pytest.raises(NotSupported, match=r"3\.13"):
                environment.consumer(stream, filter_values=("be",), **patient.READER)
            return
        with environment.producer(stream, filtering=True, linger=0) as producer:
            for country in ("be", "de", "be", "fr"):
                for _ in range(100):
                    producer.send(country.encode(), filter_value=country)
                producer.flush(timeout=PATIENCE).raise_for_failures()
            producer.send(b"none")
            producer.flush(timeout=PATIENCE).raise_for_failures()
            producer.send(b"end", filter_value="be")
            producer.flush(timeout=PATIENCE).raise_for_failures()
        wanted = ConsumerOptions(filter_values=("be",), offset="first")
        with environment.consumer(stream, wanted, **patient.READER) as consumer:
            bodies = (message.body for message in consumer.messages(timeout=PATIENCE))
            found = list(itertools.takewhile(lambda body: body != b"end", bodies))
        assert found.count(b"be") == 200
        assert b"none" not in found
        assert len(found) < 401, "chunks without the value were not sent"
        with environment.consumer(
            stream, wanted, match_unfiltered=True, **patient.READER
        ) as consumer:
            assert any(message.body == b"none" for message in consumer.messages(timeout=PATIENCE))
