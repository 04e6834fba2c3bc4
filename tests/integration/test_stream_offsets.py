"""Stored offsets, on a real cluster of the newest and of the oldest version."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sharding.errors import InvalidInput
from sharding.stream import ConsumerOptions, StreamEnvironment, StreamNotFound
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.streams import environment_of, publish, read_all, stream_in, super_stream_in

pytestmark = pytest.mark.cluster

JOE = ConsumerOptions(name="joe", offset="first", **patient.READER)


@pytest.fixture(scope="module")
def environment(nodes: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(nodes, **patient.STREAMS) as opened:
        yield opened


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def test_named_consumer_goes_on_after_what_it_stored(environment: StreamEnvironment) -> None:
    with stream_in(environment) as stream:
        publish(environment, stream, numbers(0, 1000))
        with environment.consumer(stream, JOE) as consumer:
            for message in consumer.messages(timeout=PATIENCE):
                if message.offset == 321:
                    break
            consumer.store_offset(timeout=PATIENCE)
        assert environment.stored_offset("joe", stream) == 321
        assert environment.stored_offset("someone else", stream) is None
        with environment.consumer(stream, JOE) as consumer:
            # The stored offset took the place of one message, so bodies tell, not offsets.
            assert next(consumer.messages(timeout=PATIENCE)).body == b"322"


def test_stored_offset_can_be_read_as_soon_as_the_call_returns(
    environment: StreamEnvironment,
) -> None:
    with stream_in(environment) as stream:
        publish(environment, stream, numbers(0, 100))
        with environment.consumer(stream, JOE) as consumer:
            for offset in range(50):
                consumer.store_offset(stream, offset, PATIENCE)
                assert environment.stored_offset("joe", stream) == offset


def test_offset_is_stored_without_a_consumer_also_backwards(environment: StreamEnvironment) -> None:
    with stream_in(environment) as stream:
        publish(environment, stream, numbers(0, 100))
        for offset in (70, 20):
            environment.store_offset("joe", stream, offset)
            assert environment.stored_offset("joe", stream) == offset
        with environment.consumer(stream, JOE) as consumer:
            assert next(consumer.messages(timeout=PATIENCE)).body == b"21"
        with pytest.raises(StreamNotFound):
            environment.store_offset("joe", f"no-{stream}", 1)
        for name, offset in (("", 1), ("n" * 256, 1), ("joe", -1)):
            with pytest.raises(InvalidInput):
                environment.store_offset(name, stream, offset)


def test_offsets_are_stored_automatically_by_count(environment: StreamEnvironment) -> None:
    with stream_in(environment) as stream:
        publish(environment, stream, numbers(0, 1000))
        with environment.consumer(stream, JOE, store_every_messages=100) as consumer:
            messages = consumer.messages(timeout=PATIENCE)
            for _ in range(251):
                next(messages)
            wait_until(lambda: environment.stored_offset("joe", stream) == 199)


def test_offsets_are_stored_automatically_by_time_while_waiting_for_more(
    environment: StreamEnvironment,
) -> None:
    with stream_in(environment) as stream:
        publish(environment, stream, numbers(0, 100))
        with environment.consumer(stream, JOE, store_every_seconds=0.2) as consumer:
            read: list[int] = []

            def read_on() -> None:
                read.extend(batch.num_rows for batch in consumer.batches())

            waiting = threading.Thread(target=read_on)
            waiting.start()
            wait_until(lambda: environment.stored_offset("joe", stream) == 99)
            assert waiting.is_alive()
        waiting.join(PATIENCE)
        assert sum(read) == 100


def test_offsets_of_every_partition_are_stored_at_close(environment: StreamEnvironment) -> None:
    with super_stream_in(environment) as invoices:
        with environment.producer(invoices) as producer:
            producer.send_many(numbers(0, 600), [f"key-{n}" for n in range(600)])
            producer.flush(timeout=PATIENCE).raise_for_failures()
        with environment.consumer(invoices, JOE, store_every_messages=10**9) as consumer:
            found = read_all(consumer, 600)
            assert list(consumer.batches(timeout=0)) == []  # it comes back for more: all is done
            consumer.close(2 * PATIENCE)  # half of it is for the offsets
        for stream in environment.partitions(invoices):
            assert environment.stored_offset("joe", stream) == len(found[stream]) - 1
        with environment.consumer(invoices, JOE) as consumer:
            assert list(consumer.batches(timeout=0.3)) == []


def test_offsets_need_a_name_and_a_stream(environment: StreamEnvironment) -> None:
    with super_stream_in(environment) as invoices:
        with (
            environment.consumer(invoices) as consumer,
            pytest.raises(InvalidInput, match="name"),
        ):
            consumer.store_offset()
        with environment.consumer(invoices, JOE) as consumer:
            with pytest.raises(InvalidInput, match="stream"):
                consumer.store_offset(offset=5)
            with pytest.raises(InvalidInput, match="stream"):
                consumer.store_offset("another one", 5)
