"""Wrapped channels where states change in the middle: found by an attack, each one seen failing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import aio_pika
import pika
import pytest
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from interceptors import (
    AioShardedChannel,
    AsyncShardedChannel,
    AsyncShardedConnection,
    ShardedChannel,
)
from sharding import InvalidInput, Policy, ShardMap, Topology, Unreachable
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.conformance.callers import CALLERS, Publication
from tests.support import patient
from tests.support.other_views import View, WithAnOldMap
from tests.support.sharded import connection_to, drain, fresh_queue, raw_channel, topology_of

pytestmark = pytest.mark.cluster


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[BlockingConnection]:
    with connection_to(cluster.nodes[0]) as opened:
        yield opened


@pytest.fixture
def images(topology: Topology) -> Iterator[ShardMap]:
    logical = fresh_queue()
    topology.set_policy(Policy.exactly(logical, 2, name=logical))
    yield topology.ensure(logical).shard_map
    topology.forget(logical)
    topology.clear_policy(logical)


def pump_until(connection: BlockingConnection, condition: Callable[[], object]) -> None:
    def pumped() -> object:
        connection.process_data_events(0.02)
        return condition()

    wait_until(pumped)


def names(shard_map: ShardMap) -> list[str]:
    return [shard.name for shard in shard_map.shards]


class ReadsLater(WithAnOldMap):
    """It reads the log when the test says so."""

    def __init__(self, topology: Topology, logical: str) -> None:
        super().__init__(topology, logical)
        self.asked: list[Future[None]] = []
        self.futures.refresh = self._ask

    def _ask(self) -> Future[None]:
        self.asked.append(Future())
        return self.asked[-1]

    def read(self) -> None:
        self.refresh()
        for future in self.asked:
            future.set_result(None)


def test_what_came_back_is_not_sent_into_confirms_that_began_meanwhile(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    view: Any = ReadsLater(topology, images.logical)
    channel = ShardedChannel(connection.channel(), view, confirm_timeout=PATIENCE)
    channel.basic_publish(images.logical, "user-1", b"came back")
    pump_until(connection, lambda: view.asked)
    channel.confirm_delivery()
    view.read()
    # Were it sent, its confirm would be taken for that of the first of these.
    for number in range(3):
        channel.basic_publish(images.logical, "user-1", b"%d" % number)
    stored = [body for _, _, body in drain(cluster.nodes[0], names(images))]
    assert stored == [b"0", b"1", b"2"]
    assert channel.counters["confirmed"] == 3


def test_what_came_back_is_not_sent_while_confirms_begin(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    """The broker counts from the request on, and not from when the application has the answer."""
    view: Any = ReadsLater(topology, images.logical)
    channel = ShardedChannel(connection.channel(), view, confirm_timeout=PATIENCE)
    channel.basic_publish(images.logical, "user-1", b"came back")
    pump_until(connection, lambda: view.asked)
    wait = channel._confirms.wait_until

    def read_and_wait(condition: Callable[[], bool]) -> None:
        view.read()
        wait(condition)

    channel._confirms.wait_until = read_and_wait  # type: ignore[method-assign]
    channel.confirm_delivery()
    channel._confirms.wait_until = wait  # type: ignore[method-assign]
    for number in range(3):
        channel.basic_publish(images.logical, "user-1", b"%d" % number)
    stored = [body for _, _, body in drain(cluster.nodes[0], names(images))]
    assert stored == [b"0", b"1", b"2"]
    assert channel.counters["confirmed"] == 3


def test_what_came_back_is_not_sent_into_a_transaction(
    topology: Topology,
    connection: BlockingConnection,
    images: ShardMap,
    caplog: pytest.LogCaptureFixture,
) -> None:
    view: Any = WithAnOldMap(topology, images.logical)
    channel = ShardedChannel(connection.channel(), view)
    channel.tx_select()
    channel.basic_publish(images.logical, "user-1", b"lost")
    channel.tx_commit()
    pump_until(connection, lambda: "it is not stored" in caplog.text)


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_what_came_back_is_not_sent_into_a_transaction_that_began_meanwhile(
    cluster: Cluster,
    topology: Topology,
    images: ShardMap,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrapper: Any = {"blocking": ShardedChannel, "async": AsyncShardedChannel}[kind]
    view = ReadsLater(topology, images.logical)
    url = cluster.nodes[0].endpoint.amqp_url
    with CALLERS[kind](url, lambda raw: wrapper(raw, view)) as caller:
        caller.publish(Publication(images.logical, "user-1", "came back"))
        assert caller.wait_for(lambda: view.asked)
        caller.begin_transaction()
        view.read()
        assert caller.wait_for(lambda: "it is not stored" in caplog.text)


def test_nothing_is_lost_when_a_consumer_moves_and_its_callback_raises(
    cluster: Cluster,
    topology: Topology,
    connection: BlockingConnection,
    images: ShardMap,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = [shard.name for shard in images.shards_on(cluster.nodes[0].name)]
    moves: list[str] = []

    def always_the_other(mine: str, *_: Any) -> str | None:
        moves.append(mine)
        return None if len(moves) > 5 else here[1 - here.index(mine)]

    monkeypatch.setattr("interceptors.calls.better_shard", always_the_other)
    seen: list[bytes] = []

    def raising(_: Any, __: Any, ___: Any, body: bytes) -> None:
        seen.append(body)
        raise ValueError(body)

    plain: Any = connection.channel()
    ShardedChannel(plain, topology).basic_consume(images.logical, raising, auto_ack=True)
    sent = raised = 0

    def pump() -> None:
        nonlocal raised
        for _ in range(20):  # each raises at the first message that waits
            try:
                connection.process_data_events(0)
            except ValueError:
                raised += 1

    with raw_channel(cluster.nodes[0]) as raw:

        def moved_enough() -> bool:
            nonlocal sent
            for _ in range(10):
                sent += 1
                raw.basic_publish("", here[sent % 2], b"%d" % sent)
            pump()
            return len(moves) > 5

        wait_until(moved_enough)

        def accounted_for() -> bool:
            pump()
            left = topology.look_at(here).values()
            # After an exception pika dispatches what waits when the next frame comes.
            in_hand = len(seen) + len(plain._pending_events)
            return in_hand + sum(each.messages for each in left if each) == sent

        wait_until(accounted_for, explain=lambda: f"{sent} sent, {len(seen)} seen")
    assert raised == len(seen)
    assert len(set(seen)) == len(seen)


def test_a_tag_that_is_used_again_belongs_to_the_new_consumer(
    cluster: Cluster,
    topology: Topology,
    connection: BlockingConnection,
    images: ShardMap,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = [shard.name for shard in images.shards_on(cluster.nodes[0].name)]
    asked: list[str] = []

    def always_the_other(mine: str, *_: Any) -> str:
        asked.append(mine)
        return here[1 - here.index(mine)]

    monkeypatch.setattr("interceptors.calls.better_shard", always_the_other)
    channel = ShardedChannel(connection.channel(), topology)
    counted = topology.counters["map_changes"]
    plain = channel.queue_declare("", exclusive=True).method.queue
    channel.basic_consume(images.logical, lambda *_: None, consumer_tag="mine")
    channel.basic_cancel("mine")
    channel.basic_consume(plain, lambda *_: None, consumer_tag="mine")
    other = ShardedChannel(connection.channel(), topology)
    other.basic_consume(images.logical, lambda *_: None)
    # That one is looked after five times: so the first would have been too.
    pump_until(connection, lambda: len(asked) >= 5)
    assert channel.queue_declare(plain, passive=True).method.consumer_count == 1
    assert topology.counters["map_changes"] == counted


@pytest.mark.parametrize("cancel", ["basic_cancel", "stop_consuming"])
def test_what_is_cancelled_while_its_shard_is_gone_does_not_come_back(
    cluster: Cluster,
    topology: Topology,
    connection: BlockingConnection,
    images: ShardMap,
    cancel: str,
) -> None:
    channel = ShardedChannel(connection.channel(), topology)
    channel.basic_consume_all(images.logical, lambda *_: None, auto_ack=True)
    [wish] = channel._everywhere
    tags = wish.tags
    lost = images.shards[3].name
    with raw_channel(cluster.nodes[0]) as raw:
        raw.queue_delete(lost)
    pump_until(connection, lambda: len(channel.consumer_tags) == 5)
    getattr(channel, cancel)(tags[lost])
    topology.ensure(images.logical)
    with connection_to(cluster.nodes[0]) as another:
        everywhere = ShardedChannel(another.channel(), topology)
        everywhere.basic_consume_all(images.logical, lambda *_: None, auto_ack=True)
        # Another client has it back by now; this one was told of the change at the same time.
        pump_until(another, lambda: len(everywhere.consumer_tags) == 6)
        # This one looks every second as long as something is missing.
        connection.sleep(2.5)
        assert tags[lost] not in channel.consumer_tags
        assert topology.consumer_counts(names(images))[lost] == 1


def test_a_channel_that_is_refused_while_it_opens_is_closed(cluster: Cluster) -> None:
    gone = topology_of(cluster)
    gone.close()
    closed: list[Exception] = []
    ended = threading.Event()

    def on_channel(channel: Any) -> None:
        channel.add_on_close_callback(lambda _, why: closed.append(why))
        channel.basic_consume("images", lambda *_: None)

    class NeverReady(View):
        is_ready = False

    view: Any = NeverReady(gone)

    def on_close(raw: Any, _: Any) -> None:
        raw.ioloop.stop()
        ended.set()

    raw = pika.SelectConnection(
        patient.parameters(cluster.nodes[0].endpoint.amqp_url),
        on_open_callback=lambda raw: AsyncShardedConnection(raw, view).channel(None, on_channel),
        on_close_callback=on_close,
    )
    thread = threading.Thread(target=raw.ioloop.start, daemon=True)
    thread.start()
    try:
        wait_until(lambda: closed)
    finally:
        raw.ioloop.add_callback_threadsafe(raw.close)
        assert ended.wait(PATIENCE)
        thread.join(PATIENCE)
        raw.ioloop.close()
    assert isinstance(closed[0], ChannelClosedByBroker)
    assert "the topology is closed" in closed[0].reply_text


def test_consumers_that_are_cancelled_at_once_are_answered(
    cluster: Cluster, topology: Topology, images: ShardMap
) -> None:
    cancelled: list[str] = []
    tags: list[str] = []
    ended = threading.Event()

    def on_channel(channel: Any) -> None:
        tags.extend(channel.basic_consume_all(images.logical, lambda *_: None))
        for tag in tags:
            channel.basic_cancel(tag, lambda frame: cancelled.append(frame.method.consumer_tag))

    def on_close(raw: Any, _: Any) -> None:
        raw.ioloop.stop()
        ended.set()

    raw = pika.SelectConnection(
        patient.parameters(cluster.nodes[0].endpoint.amqp_url),
        on_open_callback=lambda raw: AsyncShardedConnection(raw, topology).channel(
            None, on_channel
        ),
        on_close_callback=on_close,
    )
    thread = threading.Thread(target=raw.ioloop.start, daemon=True)
    thread.start()
    try:
        wait_until(lambda: len(cancelled) == 6)
    finally:
        raw.ioloop.add_callback_threadsafe(raw.close)
        assert ended.wait(PATIENCE)
        thread.join(PATIENCE)
        raw.ioloop.close()
    assert set(cancelled) <= set(tags)  # pika tells all who wait of each answer that comes


@pytest.mark.parametrize("connect", [aio_pika.connect, aio_pika.connect_robust])
def test_a_channel_that_was_opened_again_keeps_its_consumers(
    cluster: Cluster, topology: Topology, images: ShardMap, connect: Any
) -> None:
    async def ignore(_: Any) -> None: ...

    async def play() -> None:
        async with await connect(cluster.nodes[0].endpoint.amqp_url) as connection:
            channel = AioShardedChannel(await connection.channel(), topology)
            await channel.consume_all(images.logical, ignore)
            await channel.close()
            await channel.reopen()
            assert len(await channel.consume_all(images.logical, ignore)) == 6
            policy = Policy.exactly(images.logical, 3, name=images.logical)
            await asyncio.to_thread(topology.set_policy, policy)
            grown = (await asyncio.to_thread(topology.ensure, images.logical)).shard_map
            async with asyncio.timeout(PATIENCE):
                counts: dict[str, int | None] = {}
                while set(counts.values()) != {1}:  # on each of the nine, and not twice
                    await asyncio.sleep(0.1)
                    counts = await asyncio.to_thread(topology.consumer_counts, names(grown))
            assert len(counts) == 9

    asyncio.run(play())


def test_a_robust_consumer_whose_shard_has_left_goes_to_another(
    cluster: Cluster, topology: Topology, images: ShardMap
) -> None:
    """Found by an attack: it waited for its shard for ever, without a word."""
    here = [shard.name for shard in images.shards_on(cluster.nodes[0].name)]

    def leave(gone: str) -> None:
        left = tuple(shard for shard in images.shards if shard.name != gone)
        topology.change(
            lambda state: state.with_map(replace(state.maps[images.logical], shards=left))
        )
        with raw_channel(cluster.nodes[1]) as raw:
            raw.queue_delete(gone)

    async def play() -> None:
        connected = await aio_pika.connect_robust(cluster.nodes[0].endpoint.amqp_url)
        async with connected as connection, asyncio.timeout(PATIENCE):
            channel = AioShardedChannel(await connection.channel(), topology)
            queue = await channel.declare_queue(images.logical, durable=True)
            seen: asyncio.Queue[Any] = asyncio.Queue()
            await queue.consume(seen.put)
            counts = await asyncio.to_thread(topology.consumer_counts, here)
            gone, other = sorted(here, key=lambda shard: -(counts[shard] or 0))
            await asyncio.to_thread(leave, gone)
            with raw_channel(cluster.nodes[1]) as raw:
                raw.basic_publish("", other, b"found")
            message = await seen.get()
            assert message.body == b"found"
            await message.ack()

    asyncio.run(play())


def test_messages_of_a_key_keep_their_order_from_the_first_one_on(
    cluster: Cluster, images: ShardMap
) -> None:
    """They wait for the map, and those that come when it is there must not overtake them."""

    async def play() -> None:
        url = cluster.nodes[0].endpoint.amqp_url
        with topology_of(cluster) as new:
            async with await aio_pika.connect(url) as connection:
                channel = AioShardedChannel(await connection.channel(), new)
                exchange = await channel.get_exchange(images.logical, ensure=False)
                sending = []
                for number in range(300):
                    message = aio_pika.Message(b"%d" % number)
                    sending.append(asyncio.create_task(exchange.publish(message, "user-1")))
                    await asyncio.sleep(0.001 if number % 3 else 0)
                await asyncio.gather(*sending)

    asyncio.run(play())
    stored = [int(body) for _, _, body in drain(cluster.nodes[0], names(images))]
    assert stored == list(range(300))


class FailsOnce(View):
    """It can't count consumers, the first time."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self._failed = False
        self.futures.consumer_counts = self._counts

    def _counts(self, shards: Any) -> Future[Any]:
        if self._failed:
            return self._topology.futures.consumer_counts(shards)
        self._failed = True
        failed: Future[Any] = Future()
        failed.set_exception(Unreachable("not now"))
        return failed


def test_a_wish_that_failed_leaves_no_consumers_behind(
    cluster: Cluster, topology: Topology, images: ShardMap
) -> None:
    async def ignore(_: Any) -> None: ...

    async def play() -> None:
        url = cluster.nodes[0].endpoint.amqp_url
        async with await aio_pika.connect(url) as connection:
            view: Any = FailsOnce(topology)
            channel = AioShardedChannel(await connection.channel(), view)
            with pytest.raises(Unreachable, match="not now"):
                await channel.consume_all(images.logical, ignore)
            assert len(await channel.consume_all(images.logical, ignore)) == 6
            counts = await asyncio.to_thread(topology.consumer_counts, names(images))
            assert set(counts.values()) == {1}
            await channel.close()

    asyncio.run(play())


FAT: dict[str, Any] = {"baggage": "x" * 131_000}
"""Fits into a frame, but not beside the name of a shard."""


def test_properties_that_do_not_fit_are_refused_and_the_connection_lives(
    topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    channel = ShardedChannel(connection.channel(), topology, confirm_timeout=PATIENCE)
    channel.confirm_delivery()
    with pytest.raises(InvalidInput, match="AMQP has one frame for them"):
        channel.basic_publish(images.logical, "k", b"x", pika.BasicProperties(headers=FAT))
    channel.basic_publish(images.logical, "k", b"x")
    assert channel.counters["confirmed"] == 1


def test_the_frames_that_the_connection_agreed_on_count(
    cluster: Cluster, topology: Topology, images: ShardMap
) -> None:
    """Found by an attack: with small frames the broker ended the connection (501)."""
    parameters = patient.parameters(cluster.nodes[0].endpoint.amqp_url)
    parameters.frame_max = 8_192  # 4.1 and later take no less
    fits_alone = pika.BasicProperties(headers={"baggage": "x" * 8_126})
    with pika.BlockingConnection(parameters) as connection:
        channel = ShardedChannel(connection.channel(), topology, confirm_timeout=PATIENCE)
        channel.confirm_delivery()
        with pytest.raises(InvalidInput, match="AMQP has one frame for them"):
            channel.basic_publish(images.logical, "k", b"x", fits_alone)
        channel.basic_publish(images.logical, "k", b"x" * 10_000)
        assert channel.counters["confirmed"] == 1


def test_the_same_in_aio_pika(cluster: Cluster, topology: Topology, images: ShardMap) -> None:
    async def publish() -> None:
        connection = await aio_pika.connect(cluster.nodes[0].endpoint.amqp_url)
        async with connection:
            channel = AioShardedChannel(await connection.channel(), topology)
            exchange = await channel.get_exchange(images.logical)
            with pytest.raises(InvalidInput, match="AMQP has one frame for them"):
                await exchange.publish(aio_pika.Message(b"x", headers=FAT), "k")
            await exchange.publish(aio_pika.Message(b"x", headers={"a": 1}), "k")

    asyncio.run(publish())
