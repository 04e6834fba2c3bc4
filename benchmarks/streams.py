"""What the stream client takes and gives against rstream and against frames that cost nothing.

Run it with `python -m benchmarks.streams`. It starts a cluster of its own. Publishing is to one
stream's leader, every message confirmed; reading is from one of its replicas, from the first
message on. All ways take turns in one run.

* `send_many` and `send`: the producer as it is by default, many messages in one call and one by
  one, an entry for each message;
* shared entries: `send_many` with `sub_entry_messages=250`;
* pre-encoded: Publish frames made beforehand, written to a bare socket, with the same window and
  messages per frame;
* rstream: `send_batch` of raw bytes and of AMQP messages, the same number in a batch;
* Arrow: record batches with the messages' bodies;
* skipping: the same bytes read from a bare socket, and nothing done with them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import rstream

from benchmarks.bare_stream import BareStream, publish_frames
from benchmarks.rounds import Ratio, alternate, print_ratio
from sharding.stream import Compression, StreamArguments, StreamEnvironment
from sharding.stream.options import ProducerOptions
from sharding.stream.protocol.constants import Broker
from tests.cluster import Cluster, wait_until

MESSAGES = 600_000
READ = 3_000_000
ROUNDS = 7
BATCH = ProducerOptions().batch_messages
WINDOW = ProducerOptions().max_unconfirmed
EQUAL = [b"x" * 100] * MESSAGES
_SIZES = random.Random(1)
MIXED = [b"x" * _SIZES.randrange(50, 151) for _ in range(MESSAGES)]
SCRATCH = "published"
MANY, ONE_BY_ONE = "`send_many`, all confirmed", "`send`, one by one, all confirmed"
SHARED = "`send_many` with shared entries"
ZSTD = "`send_many` with shared entries and zstd"
FRAMES = "frames encoded beforehand on a bare socket"
RSTREAM_RAW, RSTREAM_AMQP = "rstream `send_batch`, raw bytes", "rstream `send_batch`, AMQP messages"
RSTREAM_READ = "rstream's consumer, raw bytes"


def main() -> list[Ratio]:
    logging.getLogger("rstream").setLevel(logging.ERROR)
    with (
        Cluster.start(nodes=3) as cluster,
        StreamEnvironment(*(node.endpoint.stream_url for node in cluster)) as environment,
    ):
        return publishing(environment) + reading(environment)


def publishing(environment: StreamEnvironment) -> list[Ratio]:
    kept = StreamArguments(max_length_bytes=200_000_000, max_segment_bytes=50_000_000)
    environment.create_stream(SCRATCH, kept)
    leader = placed(environment, SCRATCH)[0]
    frames = publish_frames(EQUAL, BATCH)
    ways: dict[str, Callable[[], float]] = {
        MANY: lambda: produce(environment),
        SHARED: lambda: produce(environment, sub_entry_messages=250),
        ONE_BY_ONE: lambda: produce(environment, one_by_one=True),
        FRAMES: lambda: bare_publish(leader, frames),
        RSTREAM_RAW: lambda: asyncio.run(rstream_publish(leader, encoded=False)),
        RSTREAM_AMQP: lambda: asyncio.run(rstream_publish(leader, encoded=True)),
        ZSTD: lambda: produce(environment, sub_entry_messages=250, compression=Compression.ZSTD),
    }
    speeds = alternate(ways, ROUNDS)
    return [
        print_ratio(speeds, MANY, RSTREAM_RAW),
        print_ratio(speeds, MANY, RSTREAM_AMQP),
        print_ratio(speeds, MANY, FRAMES, 0.85),
        print_ratio(speeds, ONE_BY_ONE, FRAMES, 0.6),
        print_ratio(speeds, SHARED, RSTREAM_RAW, 2),
        print_ratio(speeds, SHARED, RSTREAM_AMQP, 4),
        print_ratio(speeds, ZSTD, MANY),
    ]


def reading(environment: StreamEnvironment) -> list[Ratio]:
    ways: dict[str, Callable[[], float]] = {}
    for name, bodies in (("equal", EQUAL), ("mixed", MIXED)):
        environment.create_stream(name)
        replica = placed(environment, name)[1]
        with environment.producer(name) as producer:
            for _ in range(READ // MESSAGES):
                producer.send_many(bodies)
            producer.flush(timeout=120).raise_for_failures()
        ways[f"reading to Arrow, {name} sizes"] = partial(to_arrow, environment, name)
        ways[f"reading frames and skipping them, {name} sizes"] = partial(skip, replica, name)
    replica = placed(environment, "equal")[1]
    ways[RSTREAM_READ] = lambda: asyncio.run(rstream_consume(replica, "equal"))
    speeds = alternate(ways, ROUNDS)
    equal, skipped_equal, mixed, skipped_mixed, _ = ways
    return [
        print_ratio(speeds, equal, RSTREAM_READ, 5),
        print_ratio(speeds, mixed, skipped_mixed, 0.28),
        print_ratio(speeds, equal, skipped_equal, 0.45),
    ]


def placed(environment: StreamEnvironment, stream: str) -> tuple[Broker, Broker]:
    """The leader and a replica of a new stream, once the cluster tells of both."""
    wait_until(lambda: len(environment.route(stream).replicas) == 2, 20)
    route = environment.route(stream)
    assert route.leader is not None
    return route.leader, route.replicas[0]


def produce(environment: StreamEnvironment, one_by_one: bool = False, **options: Any) -> float:
    with environment.producer(SCRATCH, **options) as producer:
        began = perf_counter()
        if one_by_one:
            for body in EQUAL:
                producer.send(body)
        else:
            producer.send_many(EQUAL)
        report = producer.flush(timeout=120)
        took = perf_counter() - began
    assert report.stored == MESSAGES, report
    return MESSAGES / took


def bare_publish(leader: Broker, frames: list[tuple[bytes, int]]) -> float:
    connection = BareStream(leader, SCRATCH)
    began = perf_counter()
    connection.publish(frames, WINDOW)
    took = perf_counter() - began
    connection.close()
    return MESSAGES / took


async def rstream_publish(leader: Broker, encoded: bool) -> float:
    done = asyncio.Event()
    left = MESSAGES

    def on_confirm(status: rstream.ConfirmationStatus) -> None:
        nonlocal left
        assert status.is_confirmed
        left -= 1
        if not left:
            done.set()

    batches: list[list[Any]] = [EQUAL[n : n + BATCH] for n in range(0, MESSAGES, BATCH)]
    async with rstream.Producer(*leader, username="guest", password="guest") as producer:
        began = perf_counter()
        for batch in batches:
            if encoded:
                batch = [rstream.AMQPMessage(body=body) for body in batch]
            await producer.send_batch(SCRATCH, batch, on_publish_confirm=on_confirm)
        await asyncio.wait_for(done.wait(), 120)
        return MESSAGES / (perf_counter() - began)


def to_arrow(environment: StreamEnvironment, stream: str) -> float:
    rows = 0
    began = perf_counter()
    with environment.consumer(stream, offset="first") as consumer:
        for batch in consumer:
            rows += batch.num_rows
            if rows >= READ:
                break
        took = perf_counter() - began
    return READ / took


def skip(replica: Broker, stream: str) -> float:
    began = perf_counter()
    connection = BareStream(replica, stream)
    connection.skip(READ)
    took = perf_counter() - began
    connection.close()
    return READ / took


async def rstream_consume(replica: Broker, stream: str) -> float:
    wanted = READ // 10  # it is slow enough to be measured with fewer
    seen = 0
    done = asyncio.Event()

    def on_message(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == wanted:
            done.set()

    consumer = rstream.Consumer(*replica, username="guest", password="guest")
    await consumer.start()
    began = perf_counter()
    await consumer.subscribe(
        stream,
        on_message,
        decoder=bytes,
        offset_specification=rstream.ConsumerOffsetSpecification(rstream.OffsetType.FIRST, None),
    )
    await asyncio.wait_for(done.wait(), 120)
    took = perf_counter() - began
    await consumer.close()
    return wanted / took


if __name__ == "__main__":
    main()
