"""One message that can't be handled, or not even be stored as a dead letter, holds up no others for
good (07, 07b, 08, s06)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pika
import pytest

from sharding.groups import Retry, StreamConsumerGroup
from sharding.groups.handling.delivery import Delivery
from sharding.stream import Message, StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.sharded import raw_channel
from tests.support.streams import environment_of, stream_in

pytestmark = pytest.mark.cluster

LARGE = 2 * 1024 * 1024
ONCE = Retry(attempts=1)


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster, **patient.STREAMS) as opened:
        if opened.server_version < (3, 11):
            pytest.skip("consumer groups need RabbitMQ 3.11")
        yield opened


@pytest.fixture
def stream(environment: StreamEnvironment) -> Iterator[str]:
    with stream_in(environment) as made:
        yield made
        for other in (f"{made}.dead", f"warren.group.{made}"):
            environment.delete_stream(other, missing_ok=True)


def test_every_dead_letter_is_stored_without_what_does_not_fit(
    cluster: Cluster, environment: StreamEnvironment, stream: str
) -> None:
    with raw_channel(cluster.nodes[0]) as channel:
        channel.confirm_delivery()
        large = b'"bad' + b" " * LARGE + b'"'  # over AMQP a stream takes more than a frame
        channel.basic_publish("", stream, large, pika.BasicProperties(delivery_mode=2))
    with environment.producer(stream) as producer:
        producer.send(b'"\\ud800"', key="k0")
        producer.send_many([b'"bad %d"' % n for n in range(20)], [f"b{n}" for n in range(20)])
        producer.send_many([b'"good"'] * 500, [f"g{n}" for n in range(500)])
        producer.flush(PATIENCE).raise_for_failures()
    ends = environment.offsets(stream)
    assert ends is not None

    def handle(delivery: Delivery) -> None:
        text = json.loads(delivery.body)
        if text != "good":
            raise ValueError(f"unknown customer {text}")

    options = patient.stream_group(retry=ONCE, parallelism=4, settle_time=0.1)
    with StreamConsumerGroup(environment, stream, handle, group="g", options=options) as group:
        wait_until(
            lambda: environment.stored_offset("g", stream) == ends.last,
            explain=lambda: f"{group.counters}",
        )
        counters = dict(group.counters)
    assert (counters["dead"], counters["dead_lettered"]) == (22, 22)
    with environment.consumer(f"{stream}.dead", offset="first", **patient.READER) as consumer:
        messages = consumer.messages(PATIENCE)
        letters = {
            message.application_properties["x-warren-offset"]: message
            for message in (next(messages) for _ in range(22))
        }
    assert set(letters) == set(range(22))
    cut = letters[0]
    assert cut.body == b""
    left_out = str(cut.application_properties["x-warren-left-out"])
    assert left_out.startswith("body: ")
    assert str(LARGE)[:4] in left_out
    assert letters[1].body == b'"\\ud800"'
    assert r"\ud800" in str(letters[1].application_properties["x-warren-error"])
    assert all("x-warren-left-out" not in letter.application_properties
               for offset, letter in letters.items() if offset)  # fmt: skip


def test_poison_without_dead_letters_bounds_what_is_handled_behind_it(
    environment: StreamEnvironment, stream: str
) -> None:
    with environment.producer(stream) as producer:
        producer.send(b"poison", key="p")
        producer.send_many([b"good"] * 2000, [f"g{n}" for n in range(2000)])
        producer.flush(PATIENCE).raise_for_failures()
    cured = threading.Event()

    def handle(delivery: Delivery) -> None:
        if delivery.body == b"poison" and not cured.is_set():
            raise ValueError("not yet")

    options = patient.stream_group(
        retry=Retry(attempts=1, max_delay=0.1), dead_letter=None, prefetch=50, max_ahead=300,
        settle_time=0.1,
    )  # fmt: skip
    with StreamConsumerGroup(environment, stream, handle, group="g", options=options) as group:
        wait_until(lambda: group.counters["held_back"] == 1 and group.counters["in_hand"] == 1)
        assert 250 <= group.counters["handled"] < 300
        assert environment.stored_offset("g", stream) is None
        cured.set()
        wait_until(lambda: group.counters["handled"] == 2001)
    assert environment.stored_offset("g", stream) == 2000


def test_letter_of_anything_fits_and_says_what_it_lacks() -> None:
    from datetime import UTC, datetime

    from sharding.groups.handling.delivery import Dead, Why
    from sharding.groups.streams.dead_letters import letter_of
    from sharding.stream.messages.message import decode_message

    odd = Message(
        b"x" * 900,
        "k" * 400,
        None,
        {"fine": 1, "unwritable": object()},  # type: ignore[dict-item]  # a handler wrote into it
        {"n" * 300: 1},
        offset=7,
    )
    delivery = Delivery(odd.body, odd.key or "", "s", odd.application_properties, odd, offset=7)
    dead = Dead(Why.FAILED, "ValueError: \ud800", 5, lambda: None)
    letter = letter_of(delivery, dead, datetime.now(UTC), "g", 1_000)
    assert len(letter.encoded) <= 1_000
    told = decode_message(letter.encoded).application_properties
    assert told["x-warren-offset"] == 7
    said = str(told["x-warren-left-out"])
    assert "application properties: " in said
    assert "body: 908 bytes" in said
