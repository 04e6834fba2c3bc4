"""A stream deleted and made again under a reader is noticed, and nothing of it skipped (21)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import pytest

from sharding.errors import Unreachable
from sharding.groups import StreamConsumerGroup
from sharding.groups.handling.delivery import Delivery
from sharding.groups.streams import partition
from sharding.groups.streams.partition import GroupOffsets
from sharding.stream import Consumer, StreamEnvironment, StreamNotFound, StreamReplaced
from sharding.stream.consumer import activity, starting, subscription
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.streams import await_replicas, environment_of, publish, stream_in

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster, **patient.STREAMS) as opened:
        yield opened


def numbers(prefix: bytes, count: int) -> list[bytes]:
    return [b"%s %d" % (prefix, number) for number in range(count)]


def make_anew(environment: StreamEnvironment, stream: str) -> None:
    environment.delete_stream(stream)
    environment.create_stream(stream)
    await_replicas(environment, stream)


@pytest.mark.parametrize("length", [0, 500, 1500])
@pytest.mark.parametrize("offset", ["first", "next"])
def test_consumer_says_that_it_is_another_stream(
    environment: StreamEnvironment, offset: str, length: int
) -> None:
    if length < 1000 and environment.server_version < (3, 11):
        pytest.skip("3.10 does not say how long a log is: it is noticed when recovery_timeout ends")
    with stream_in(environment) as stream:
        publish(environment, stream, numbers(b"old", 1000))
        found: list[bytes] = []
        failures: list[Exception] = []
        # "next" stands at offset 1000 and has read nothing.
        consumer = environment.consumer(stream, offset=offset, **patient.READER)

        def read() -> None:
            try:
                found.extend(message.body for message in consumer.messages())
            except Exception as error:
                failures.append(error)

        with consumer:
            reading = threading.Thread(target=read)
            reading.start()
            if offset == "first":
                wait_until(lambda: consumer.positions.get(stream) == 1000)
            make_anew(environment, stream)
            if length:
                publish(environment, stream, numbers(b"new", length))
            reading.join(PATIENCE)
            assert not reading.is_alive(), "it waits without a word"
        assert isinstance(failures[0], StreamReplaced | StreamNotFound)
        assert found == (numbers(b"old", 1000) if offset == "first" else [])


def test_stream_that_is_made_anew_while_a_consumer_comes_back_is_another_one(
    environment: StreamEnvironment, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is lost, it finds the stream to be the same one, and then that is replaced."""
    compare = starting.check_same
    compared = threading.Event()

    def compare_and_replace(*arguments: Any) -> None:
        compare(*arguments)
        if not compared.is_set():
            compared.set()
            make_anew(environment, stream)
            publish(environment, stream, numbers(b"new", 1500))

    with stream_in(environment) as stream, environment_of(cluster, **patient.STREAMS) as reading:
        publish(environment, stream, numbers(b"old", 1000))
        found: list[bytes] = []
        with reading.consumer(stream, offset="first", **patient.READER) as consumer:
            messages = consumer.messages(timeout=PATIENCE)
            found += [next(messages).body for _ in range(1000)]
            monkeypatch.setattr(subscription, "check_same", compare_and_replace)
            lose_connection(consumer, stream)
            with pytest.raises((StreamReplaced, StreamNotFound)):
                found += [message.body for message in messages]
        assert compared.is_set()
        assert found == numbers(b"old", 1000)


def lose_connection(consumer: Consumer, stream: str) -> None:
    client = consumer._subscriptions[stream].connection(time.monotonic() + PATIENCE)
    client._transport.shut_down()


def test_group_begins_the_new_stream_at_its_beginning(environment: StreamEnvironment) -> None:
    if environment.server_version < (3, 11):
        pytest.skip("consumer groups need RabbitMQ 3.11")
    with stream_in(environment) as stream:
        publish(environment, stream, numbers(b"old", 1000))
        handled: list[bytes] = []
        lock = threading.Lock()

        def handle(delivery: Delivery) -> None:
            with lock:
                handled.append(delivery.body)

        options = patient.stream_group(settle_time=0.1)
        with StreamConsumerGroup(environment, stream, handle, group="g", options=options):
            wait_until(lambda: len(handled) >= 1000)
            make_anew(environment, stream)
            publish(environment, stream, numbers(b"new", 1500))
            wait_until(lambda: len(set(handled)) >= 2500, explain=lambda: f"{len(handled)}")
        assert [body for body in handled if body.startswith(b"new")] == numbers(b"new", 1500)
        environment.delete_stream(f"warren.group.{stream}", missing_ok=True)


def test_group_goes_on_though_the_turn_of_the_old_stream_can_not_be_begun(
    environment: StreamEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker gives the turn at the subscription that finds another stream; who was to begin it
    tried for good to ask over the connection that was given up with it."""
    if environment.server_version < (3, 11):
        pytest.skip("consumer groups need RabbitMQ 3.11")
    is_anew, late = threading.Event(), list[GroupOffsets]()
    position = GroupOffsets.position

    def held_up(offsets: GroupOffsets, *known: Any) -> int | None:
        if is_anew.is_set():
            late.append(offsets)
            if offsets is late[0]:
                raise Unreachable("closed by this side")
        return position(offsets, *known)

    monkeypatch.setattr(GroupOffsets, "position", held_up)
    with stream_in(environment) as stream:
        publish(environment, stream, numbers(b"old", 10))
        handled: list[bytes] = []
        options = patient.stream_group(settle_time=0.1)
        with StreamConsumerGroup(
            environment,
            stream,
            lambda delivery: handled.append(delivery.body),
            group="g",
            options=options,
        ):
            wait_until(lambda: len(handled) >= 10)
            check_same = starting.check_same

            def compare(*arguments: Any) -> None:
                wait_until(lambda: late)  # the turn has come
                check_same(*arguments)

            monkeypatch.setattr(subscription, "check_same", compare)
            is_anew.set()
            make_anew(environment, stream)
            publish(environment, stream, numbers(b"new", 20))
            wait_until(lambda: len(handled) >= 30, explain=lambda: f"{len(handled)}")
        assert late, "no turn came"
        assert handled[10:] == numbers(b"new", 20)
        environment.delete_stream(f"warren.group.{stream}", missing_ok=True)


@pytest.mark.parametrize("reader", ["group", "consumer"])
def test_chunk_of_the_new_stream_is_no_witness_of_the_old_one(
    environment: StreamEnvironment, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """The turn comes at a subscription whose check of the stream could not be made: what the new
    stream has at the old place was taken for the witness, and the next check found it there."""
    if environment.server_version < (3, 11):
        pytest.skip("single active consumers need RabbitMQ 3.11")
    place = partition if reader == "group" else activity
    is_anew, turn_was_looked_up = threading.Event(), threading.Event()
    look_up, check_same = place.witness_before, starting.check_same
    recover = subscription.Subscription._recover

    def recover_when_anew(reading: subscription.Subscription) -> None:
        # Who comes back before that is told that there is no such stream.
        assert is_anew.wait(PATIENCE)
        recover(reading)

    def look_up_when_anew(*arguments: Any) -> Any:
        assert is_anew.wait(PATIENCE)
        try:
            return look_up(*arguments)
        finally:
            turn_was_looked_up.set()

    def fail_once(*arguments: Any) -> None:
        if not turn_was_looked_up.is_set():
            assert turn_was_looked_up.wait(PATIENCE)
            raise Unreachable("the leader does not deliver it yet")
        check_same(*arguments)

    with stream_in(environment) as stream:
        publish(environment, stream, numbers(b"old", 1000))
        handled: list[bytes] = []
        failures: list[Exception] = []

        def consume(consumer: Consumer) -> None:
            try:
                handled.extend(message.body for message in consumer.messages())
            except Exception as error:
                failures.append(error)

        options = patient.stream_group(settle_time=0.1)
        with ExitStack() as stack:
            if reader == "group":
                handle = lambda delivery: handled.append(delivery.body)  # noqa: E731
                group = StreamConsumerGroup(environment, stream, handle, group="g", options=options)
                stack.enter_context(group)
            else:
                consumer = environment.consumer(
                    stream, name="g", single_active=True, offset="first", **patient.READER
                )
                stack.enter_context(consumer)
                threading.Thread(target=consume, args=(consumer,), daemon=True).start()
            wait_until(lambda: len(handled) >= 1000)
            monkeypatch.setattr(place, "witness_before", look_up_when_anew)
            monkeypatch.setattr(subscription, "check_same", fail_once)
            monkeypatch.setattr(subscription.Subscription, "_recover", recover_when_anew)
            make_anew(environment, stream)
            publish(environment, stream, numbers(b"new", 1500))
            is_anew.set()
            wait_until(lambda: failures or len(handled) >= 2500, explain=lambda: f"{len(handled)}")
        assert turn_was_looked_up.is_set(), failures
        if reader == "group":
            assert handled[1000:] == numbers(b"new", 1500)
            environment.delete_stream(f"warren.group.{stream}", missing_ok=True)
        else:
            assert handled == numbers(b"old", 1000)
            assert isinstance(failures[0], StreamReplaced)


@pytest.mark.parametrize("offset", ["next", 5])
@pytest.mark.parametrize("begun", [True, False])
def test_group_that_had_begun_reads_all_of_a_stream_made_anew_while_no_worker_was_there(
    environment: StreamEnvironment, begun: bool, offset: Literal["next"] | int
) -> None:
    """Its offsets go with the stream: a worker that came later took the end of the new one for
    "next", or the offset given for one of the new one, and skipped what was in it. A group that had
    not begun is right to do so."""
    if environment.server_version < (3, 11):
        pytest.skip("consumer groups need RabbitMQ 3.11")
    handled: list[bytes] = []
    options = patient.stream_group(settle_time=0.1, offset=offset)
    left_out = 0 if offset == "next" else offset
    old = numbers(b"old", 10)[left_out:]

    def group() -> StreamConsumerGroup:
        return StreamConsumerGroup(
            environment,
            stream,
            lambda delivery: handled.append(delivery.body),
            group="g",
            options=options,
        )

    with stream_in(environment) as stream:
        if begun:
            with group() as first:
                wait_until(lambda: first.counters["taken"] == 1)
                publish(environment, stream, numbers(b"old", 10))
                wait_until(lambda: len(handled) == len(old))
        make_anew(environment, stream)
        new = numbers(b"new", 20)
        publish(environment, stream, new)
        with group() as second:
            wait_until(lambda: second.counters["taken"] == 1)
            publish(environment, stream, [b"the last"])
            wait_until(lambda: handled[-1:] == [b"the last"])
            assert second.counters["losses"] == begun
        if begun:
            assert handled == [*old, *new, b"the last"]
        else:
            assert handled == [*(new[left_out:] if left_out else []), b"the last"]
        environment.delete_stream(f"warren.group.{stream}", missing_ok=True)
