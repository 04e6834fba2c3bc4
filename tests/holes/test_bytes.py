"""Whatever a broker can deliver is handled, retried and dead-lettered with its own bytes; what does
not fit into a frame is refused, or stored all the same."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aio_pika
import pika
import pytest

from interceptors import AioShardedChannel, ShardedPublisher
from sharding import InvalidInput, ShardMap, Topology
from sharding.groups import Delivery, Retry
from sharding.maps.naming import SHARDS_KEY
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.groups import KINDS, handler_of, running_group
from tests.support.raw_amqp import Raw, RawConnection, short, sized
from tests.support.sharded import keys_of, make_sharded, publish_all, topology_of

pytestmark = pytest.mark.cluster

ONCE = Retry(attempts=1)
PERSISTENT = b"\x02"
MILLISECONDS = b"T" + struct.pack(">Q", 1_700_000_000_000)


@pytest.fixture(scope="module")
def topology(nodes: Cluster) -> Iterator[Topology]:
    with topology_of(nodes) as running:
        yield running


def addressed(shard: str, *fields: bytes, correlation_id: bytes | None = None) -> bytes:
    """Encoded properties: persistent, with these headers, and the way to one shard in BCC."""
    way = b"".join(b"S" + sized(each.encode()) for each in (SHARDS_KEY, shard))
    headers = sized(short(b"BCC") + b"A" + sized(way) + b"".join(fields))
    if correlation_id is None:
        return b"\x30\x00" + headers + PERSISTENT
    return b"\x34\x00" + headers + PERSISTENT + short(correlation_id)


def publish_raw(node: Node, shard_map: ShardMap, *messages: Raw) -> None:
    with RawConnection(node.endpoint.amqp_url) as connection:
        for message in messages:
            connection.publish(shard_map.exchange, message)
        connection.wait_for_confirms()


def dead_letters(node: Node, logical: str) -> dict[bytes, bytes]:
    """Body → properties as they are on the wire, read by no client library."""
    with RawConnection(node.endpoint.amqp_url) as connection:
        letters = connection.take_all(f"{logical}.dead")
    found = {letter.body: letter.properties for letter in letters}
    assert len(found) == len(letters)
    return found


def refuse(_: Delivery) -> None:
    raise ValueError("no")


# What a handler says and writes


def unknown_customer(_: Delivery) -> None:
    customer = json.loads(rb'"Ann \ud83d"')  # half an emoji, which a producer may send
    raise ValueError(f"unknown customer {customer}")


def traced(delivery: Delivery) -> None:
    headers: Any = delivery.headers
    headers["span"] = object()
    raise ValueError("no")


@KINDS
@pytest.mark.parametrize("fail", [unknown_customer, traced])
def test_a_dead_letter_can_be_stored_whatever_its_handler_says_and_writes(
    nodes: Cluster, topology: Topology, fail: Callable[[Delivery], None], kind: str
) -> None:
    """q03. The text of the error, or what the handler had put into the headers, could not be
    encoded: the dead letter was tried again for ever, and its key waited for good."""
    logical = make_sharded(topology).logical
    handled: list[bytes] = []

    def handle(delivery: Delivery) -> None:
        if delivery.body == b"bad":
            fail(delivery)
        handled.append(delivery.body)

    with ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher:
        publisher.publish("key", b"bad", pika.BasicProperties(delivery_mode=2, headers={"a": 1}))
        publisher.publish("key", b"next")
    options = patient.group(retry=Retry(attempts=2, first_delay=0.01))
    with running_group(kind, topology, logical, handler_of(kind, handle), options) as group:
        wait_until(lambda: handled == [b"next"], explain=lambda: str(group.counters))
    assert group.counters["dead_letter_failures"] == 0
    [(body, properties)] = dead_letters(nodes.nodes[0], logical).items()
    assert body == b"bad"
    assert short(b"a") in properties
    assert b"span" not in properties


# What a message carries


def test_a_message_that_python_has_no_value_for_is_handled_and_disturbs_no_other(
    nodes: Cluster, topology: Topology
) -> None:
    """q04. A time in milliseconds is beyond the year 9999: pika ended the connection that it came
    on, again and again, and with it every shard of that node; it went from worker to worker, and
    never became a dead letter."""
    shard_map = make_sharded(topology, shards_per_node=2)
    here = [shard.name for shard in shard_map.shards_on(shard_map.shards[0].node)]
    bad, other = (next(keys_of(shard_map, name)) for name in here)
    handled: list[bytes] = []

    def handle(delivery: Delivery) -> None:
        handled.append(delivery.body)

    properties = addressed(here[0], short(b"when") + MILLISECONDS)
    publish_raw(nodes.nodes[0], shard_map, Raw(bad.encode(), properties, b"bad"))
    with running_group("threads", topology, shard_map.logical, handle, patient.group()) as group:
        wait_until(lambda: handled == [b"bad"], explain=lambda: str(group.counters))
        messages = [(f"user-{n}", b"%d" % n) for n in range(200)]
        publish_all(topology, shard_map.logical, [*messages, (other, b"other")])
        wait_until(lambda: len(handled) == 202, explain=lambda: str(group.counters))
    assert {*handled} == {b"bad", b"other", *(body for _, body in messages)}
    assert (group.counters["lost"], group.counters["redelivered"]) == (0, 0)


@KINDS
def test_a_float_is_one_for_the_handler_and_in_the_dead_letter(
    nodes: Cluster, topology: Topology, kind: str
) -> None:
    """q05. pika reads doubles as whole numbers: of 19.99 the handler saw 19, and so did whoever
    read the dead letter. (The program sent its float by aio-pika, which has no doubles.)"""
    shard_map = make_sharded(topology)
    price = short(b"price") + b"d" + struct.pack(">d", 19.99)
    count = short(b"count") + b"I" + struct.pack(">i", 3)
    properties = addressed(shard_map.shards[0].name, price, count)
    publish_raw(nodes.nodes[0], shard_map, Raw(b"k", properties, b"x"))
    seen: list[object] = []

    def handle(delivery: Delivery) -> None:
        seen.append(dict(delivery.headers))
        raise ValueError

    handler, options = handler_of(kind, handle), patient.group(retry=ONCE)
    with running_group(kind, topology, shard_map.logical, handler, options) as group:
        wait_until(lambda: group.counters["dead_lettered"])
    assert seen == [{"price": 19.99, "count": 3}]
    [letter] = dead_letters(nodes.nodes[0], shard_map.logical).values()
    assert price in letter
    assert count in letter


FIELDS = {
    "bool": b"t\x01",
    "int8": b"b\xfb",
    "uint8": b"B\xff",
    "int16": b"s" + struct.pack(">h", -5),
    "uint16": b"u\xff\xff",
    "int32": b"I" + struct.pack(">i", -7),
    "uint32": b"i\xff\xff\xff\xff",
    "int64": b"l" + struct.pack(">q", -(2**63)),
    "float": b"f" + struct.pack(">f", 0.5),
    "double": b"d" + struct.pack(">d", 19.99),
    "decimal": b"D\x02" + struct.pack(">i", 12345),
    "big decimal": b"D\x00" + struct.pack(">i", 2**31 - 1),
    "text": b"S" + sized("é".encode()),
    "text that is not UTF-8": b"S" + sized(b"\xff\xfe"),
    "bytes": b"x" + sized(b"\x00\xff"),
    "array": b"A" + sized(b"t\x01" + b"I" + struct.pack(">i", 1)),
    "table": b"F" + sized(short(b"a") + b"t\x00"),
    "time": b"T" + struct.pack(">Q", 1_700_000_000),
    "void": b"V",
    "time 0": b"T" + struct.pack(">Q", 0),
    "empty array": b"A" + sized(b""),
    "empty table": b"F" + sized(b""),
    # These three ended connections.
    "time in milliseconds": MILLISECONDS,
    "name that is not UTF-8": b"t\x01",
    "binary correlation id": b"V",
}
"""One header of each type that RabbitMQ takes, as clients in other languages send them."""
BINARY_ID = b"\xff\xfe\x00\x01"


@KINDS
def test_a_header_of_each_type_is_in_the_dead_letter_to_the_byte(
    nodes: Cluster, topology: Topology, kind: str
) -> None:
    """q29. Some were decoded by no client library, others could not be encoded again: keys waited
    for good, connections ended again and again, and values were others in the dead letter."""
    shard_map = make_sharded(topology)
    shard = shard_map.shards[0].name

    def header(name: str) -> bytes:
        return short(b"\xff\xfe" if "name" in name else b"given") + FIELDS[name]

    def message(name: str) -> Raw:
        id_ = BINARY_ID if "correlation" in name else None
        properties = addressed(shard, header(name), correlation_id=id_)
        return Raw(f"key {name}".encode(), properties, name.encode())

    publish_raw(nodes.nodes[0], shard_map, *map(message, FIELDS))
    handler, options = handler_of(kind, refuse), patient.group(retry=ONCE)
    with running_group(kind, topology, shard_map.logical, handler, options) as group:
        wait_until(
            lambda: group.counters["dead_lettered"] == len(FIELDS),
            explain=lambda: str(group.counters),
        )
    assert group.counters["lost"] == 0
    letters = dead_letters(nodes.nodes[0], shard_map.logical)
    changed = [name for name in FIELDS if header(name) not in letters[name.encode()]]
    assert changed == []
    assert letters[b"binary correlation id"].endswith(PERSISTENT + short(BINARY_ID))


# What fills a frame


def test_headers_that_fit_into_no_frame_are_refused_and_disturb_no_other_message(
    topology: Topology,
) -> None:
    """12. With the shard's name beside them they were larger than a frame: the broker ended the
    connection, and of all that was in flight the outcome was unknown."""
    logical = make_sharded(topology).logical
    fat = pika.BasicProperties(headers={"baggage": "x" * 131_000})
    with ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher:
        for number in range(1_500):
            publisher.publish(f"k{number}", b"x" * 2_000)
            if number == 700:
                with pytest.raises(InvalidInput, match="one frame"):
                    publisher.publish("k", b"", fat)
        report = publisher.flush(PATIENCE)
    assert (report.stored, report.unknown, report.all_stored) == (1_500, 0, True)


def test_headers_of_every_size_near_a_frame_s_are_stored_or_refused_by_aio_channels(
    nodes: Cluster, topology: Topology
) -> None:
    """aiormq adds a message id; where that did not fit, the broker ended the connection."""
    logical = make_sharded(topology).logical
    refused: list[int] = []

    async def publish(sizes: Sequence[int]) -> None:
        async with await aio_pika.connect(nodes.nodes[0].endpoint.amqp_url) as connection:
            channel = AioShardedChannel(await connection.channel(), topology)
            exchange = await channel.get_exchange(logical)
            for size in sizes:
                fat = aio_pika.Message(b"", headers={"baggage": "x" * size})
                try:
                    await exchange.publish(fat, "k", timeout=PATIENCE)
                except InvalidInput:
                    refused.append(size)

    sizes = range(130_850, 131_060, 7)
    asyncio.run(publish(sizes))
    assert refused == [size for size in sizes if size >= refused[0]]
    assert sizes[0] < refused[0] < sizes[-1]


@KINDS
def test_a_dead_letter_for_which_a_frame_has_no_room_holds_up_no_other(
    nodes: Cluster, topology: Topology, kind: str
) -> None:
    """12b. The message just fitted into a frame, its dead letter did not: it ended the connection
    of all dead letters, again and again."""
    logical = make_sharded(topology).logical
    fat = pika.BasicProperties(headers={"baggage": "x" * 130_900}, delivery_mode=2)
    with ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher:
        publisher.publish("k", b"fat", fat)
        for number in range(20):
            publisher.publish(f"o{number}", b"bad %d" % number)
        for number in range(500):
            publisher.publish(f"g{number}", b"good")

    def handle(delivery: Delivery) -> None:
        if delivery.body != b"good":
            raise ValueError("never")

    handler, options = handler_of(kind, handle), patient.group(retry=ONCE)
    with running_group(kind, topology, logical, handler, options) as group:
        wait_until(
            lambda: (group.counters["dead_lettered"], group.counters["handled"]) == (21, 500),
            explain=lambda: str(group.counters),
        )
    assert group.counters["dead_letter_failures"] == 0
    letters = dead_letters(nodes.nodes[0], logical)
    assert {*letters} == {b"fat", *(b"bad %d" % number for number in range(20))}
    assert b"x" * 130_900 in letters[b"fat"]
