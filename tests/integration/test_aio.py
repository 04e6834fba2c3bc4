"""`AioShardedChannel` on aio-pika's plain and robust channels: what an application sees of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import aio_pika
import aiormq.abc
import pytest
from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractQueue
from aio_pika.exceptions import (
    ChannelInvalidStateError,
    ChannelPreconditionFailed,
    DeliveryError,
    PublishError,
)

from interceptors.aio import AioShardedChannel
from interceptors.aio_objects import _came_back
from sharding import Policy, ShardUnavailable
from sharding.cluster.management import NoAnswer
from sharding.cluster.topology import Topology
from sharding.errors import OutcomeUnknown
from sharding.maps.shard_map import Shard, ShardMap
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE
from tests.conftest import OLDEST_VERSION
from tests.support.sharded import topology_of

pytestmark = pytest.mark.cluster

both_kinds = pytest.mark.parametrize("kind", ["plain", "robust"])
KEYS = [f"user-{number}" for number in range(20)]


@pytest.fixture
def logical(cluster: Cluster, topology: Topology) -> Iterator[str]:
    """A logical queue of this test alone, with two shards on each node."""
    name = f"images-{secrets.token_hex(4)}"
    shard(topology, name, 2)
    yield name
    remove(cluster, topology, name)


def shard(topology: Topology, name: str, per_node: int) -> ShardMap:
    topology.set_policy(Policy(f"exchange {name}", f"^{name}$", per_node))
    return topology.ensure(name).shard_map


def remove(cluster: Cluster, topology: Topology, name: str) -> None:
    management = cluster.a_running_node().management
    topology.forget(name)
    topology.clear_policy(f"exchange {name}")
    for queue in management.get("queues", cluster.vhost, timeout=PATIENCE):
        if queue["name"].startswith(f"sharding: {name} - "):
            management.call("DELETE", "queues", cluster.vhost, queue["name"], timeout=PATIENCE)
    try:
        management.call("DELETE", "exchanges", cluster.vhost, name, timeout=PATIENCE)
    except NoAnswer as error:
        if error.status != 404:
            raise


def connected(node: Node, kind: str, **options: Any) -> Awaitable[Any]:
    url = node.endpoint.amqp_url
    if kind == "plain":
        return aio_pika.connect(url, timeout=PATIENCE, **options)
    return aio_pika.connect_robust(url, timeout=PATIENCE, reconnect_interval=0.2, **options)


@asynccontextmanager
async def opened(
    node: Node, kind: str, topology: Topology, **options: Any
) -> AsyncIterator[AioShardedChannel]:
    connection = await connected(node, kind)
    async with connection:
        yield await AioShardedChannel(connection.channel(**options), topology)


async def until(condition: Callable[[], Any], explain: Any = "") -> None:
    """Return when the condition, awaited if need be, holds."""
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                held = condition()
                if await held if asyncio.iscoroutine(held) else held:
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {PATIENCE:g} s: {explain}") from None


def local_shards(topology: Topology, logical: str, node: Node) -> list[str]:
    shard_map = topology.shard_map(logical)
    assert shard_map is not None
    return sorted(each.name for each in shard_map.shards_on(node.name))


async def counted(topology: Topology, shards: list[str]) -> list[int | None]:
    return list((await asyncio.to_thread(topology.consumer_counts, shards)).values())


async def take(channel: AioShardedChannel, shard: str) -> list[Any]:
    """All messages in one shard, by its own name."""
    queue = await channel.get_queue(shard, ensure=False)
    taken = []
    while (message := await queue.get(no_ack=True, fail=False, timeout=PATIENCE)) is not None:
        taken.append(message)
    return taken


def key_of(shard_map: ShardMap, name: str) -> str:
    return next(key for key in map(str, range(10_000)) if shard_map.shard_of(key).name == name)


async def ignore(_: Any) -> None: ...


# Publishing and consuming


@both_kinds
def test_message_is_delivered_as_it_was_sent(
    cluster: Cluster, topology: Topology, kind: str
) -> None:
    name = f"images-{secrets.token_hex(4)}"

    async def play() -> None:
        async with opened(cluster.nodes[0], kind, topology) as channel:
            exchange = await channel.declare_exchange(
                name,
                aio_pika.ExchangeType.X_MODULUS_HASH,
                durable=True,
                arguments={"x-shards-per-node": 2},
            )
            message = aio_pika.Message(b"a picture", headers={"h": "v"}, content_type="image/png")
            before = message.info()
            for key in KEYS:
                confirmed = await exchange.publish(message, key)
                assert isinstance(confirmed, aiormq.spec.Basic.Ack)
            assert message.info() == before

            received: asyncio.Queue[Any] = asyncio.Queue()
            await channel.consume_all(name, received.put)
            for _ in KEYS:
                each = await asyncio.wait_for(received.get(), PATIENCE)
                assert (each.exchange, each.headers, each.body) == (name, {"h": "v"}, b"a picture")
                assert each.content_type == "image/png"
                await each.ack()
            assert received.empty()

    try:
        asyncio.run(play())
    finally:
        remove(cluster, topology, name)


@both_kinds
def test_key_goes_to_the_shard_that_explain_names(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    async def play() -> None:
        async with opened(cluster.nodes[1], kind, topology) as channel:
            exchange = await channel.get_exchange(logical)
            for key in KEYS:
                await exchange.publish(aio_pika.Message(key.encode()), key)
            found = {}
            shard_map = topology.shard_map(logical)
            assert shard_map is not None
            for each in shard_map.shards:
                for message in await take(channel, each.name):
                    assert (message.exchange, message.headers) == (logical, {})
                    found[message.routing_key] = each.name
            routes = {key: channel.explain(logical, key) for key in KEYS}
            assert found == {key: route.shard for key, route in routes.items() if route}
            assert channel.explain("amq.direct", "user-1") is None

    asyncio.run(play())


def test_transaction_is_sharded_too(cluster: Cluster, topology: Topology, logical: str) -> None:
    async def play() -> None:
        node = cluster.nodes[0]
        async with opened(node, "plain", topology, publisher_confirms=False) as channel:
            exchange = await channel.get_exchange(logical, ensure=False)
            key = key_of(
                topology.state.maps[logical], wanted := local_shards(topology, logical, node)[0]
            )
            async with channel.transaction():
                await exchange.publish(aio_pika.Message(b"kept"), key)
            transaction = channel.transaction()
            await transaction.select()
            await exchange.publish(aio_pika.Message(b"rolled back"), key)
            await transaction.rollback()
            assert [each.body for each in await take(channel, wanted)] == [b"kept"]

    asyncio.run(play())


@both_kinds
def test_other_names_pass_through(cluster: Cluster, topology: Topology, kind: str) -> None:
    async def play() -> None:
        async with opened(cluster.nodes[0], kind, topology) as channel:
            queue = await channel.declare_queue(f"plain-{secrets.token_hex(4)}", auto_delete=True)
            exchange = await channel.get_exchange("amq.direct")
            await queue.bind(exchange, "k")
            await exchange.publish(aio_pika.Message(b"1"), "k")
            await channel.default_exchange.publish(aio_pika.Message(b"2"), queue.name)
            assert [(await queue.get(no_ack=True, timeout=PATIENCE)).body for _ in range(2)] == [
                b"1",
                b"2",
            ]
            await queue.unbind(exchange, "k")
            assert (await queue.purge()).message_count == 0
            unnamed = await channel.declare_queue(exclusive=True)
            assert unnamed.name
            await channel.queue_delete(queue.name)

    asyncio.run(play())


@both_kinds
def test_wrapped_objects_are_what_aio_pika_has(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    async def play() -> None:
        connection = await connected(cluster.nodes[0], kind)
        async with connection:
            async with AioShardedChannel(connection.channel(), topology) as channel:
                queue = await channel.get_queue(logical)
                exchange = await channel.get_exchange(logical)
                assert isinstance(channel, AbstractChannel)
                assert isinstance(queue, AbstractQueue)
                assert isinstance(exchange, AbstractExchange)
                assert isinstance(channel, aio_pika.RobustChannel) == (kind == "robust")
                assert queue.channel is channel
                assert exchange.channel is channel
                assert repr(channel).startswith("<AioShardedChannel of <aio_pika.")
                other = await channel.declare_exchange(f"{logical}-copy", "fanout")
                await other.bind(exchange, "k")
                await other.delete()
            assert channel.is_closed

    asyncio.run(play())


@both_kinds
def test_the_same_object_is_handed_out_where_aio_pika_does(
    cluster: Cluster, topology: Topology, kind: str
) -> None:
    async def play() -> None:
        async with opened(cluster.nodes[0], kind, topology) as channel:
            name = f"plain-{secrets.token_hex(4)}"
            queue = await channel.declare_queue(name, auto_delete=True)
            exchange = await channel.declare_exchange(name, auto_delete=True)
            assert (await channel.get_queue(name) is queue) == (kind == "robust")
            assert (await channel.get_exchange(name) is exchange) == (kind == "robust")
            default = channel.default_exchange
            assert channel.default_exchange is default

    asyncio.run(play())


def test_what_is_set_on_a_wrapped_channel_reaches_aio_pika(
    cluster: Cluster, topology: Topology
) -> None:
    async def play() -> None:
        async with await connected(cluster.nodes[0], "robust") as connection:
            inner = connection.channel()
            channel = await AioShardedChannel(inner, topology)
            channel.RESTORE_RETRY_DELAY = 7
            assert inner.RESTORE_RETRY_DELAY == 7
            channel.declare_queue = ignore  # type: ignore[method-assign, assignment]
            assert inner.declare_queue != ignore, "what Warren intercepts is its own"

    asyncio.run(play())


# Where consumers go


@both_kinds
def test_consumers_go_to_the_local_shard_with_the_fewest(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    async def play() -> None:
        node = cluster.nodes[2]
        shards = local_shards(topology, logical, node)
        async with opened(node, kind, topology) as channel:
            queue = await channel.get_queue(logical, ensure=False)
            for number, expected in enumerate([[1, 0], [1, 1], [2, 1]]):
                assert await queue.consume(ignore, consumer_tag=f"c-{number}") == f"c-{number}"
                assert await counted(topology, shards) == expected
            # Not the one of the other shard: where counts differ by two, a consumer moves.
            await queue.cancel("c-2")
            assert await counted(topology, shards) == [1, 1]

    asyncio.run(play())


def test_consumer_of_any_shard_may_go_to_another_node(
    cluster: Cluster, topology: Topology, logical: str
) -> None:
    async def play() -> None:
        connection = await connected(cluster.nodes[0], "plain")
        async with connection:
            channel = AioShardedChannel(await connection.channel(), topology, placement="any")
            queue = await channel.get_queue(logical, ensure=False)
            for _ in range(6):
                await queue.consume(ignore)
            shard_map = topology.shard_map(logical)
            assert shard_map is not None
            names = [each.name for each in shard_map.shards]
            assert await counted(topology, names) == [1] * 6

    asyncio.run(play())


@both_kinds
def test_declaring_answers_with_the_first_local_shard(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    async def play() -> None:
        node = cluster.nodes[1]
        first = local_shards(topology, logical, node)[0]
        async with opened(node, kind, topology) as channel:
            await channel.default_exchange.publish(aio_pika.Message(b"1"), first)
            for queue in (
                await channel.declare_queue(logical, durable=True),
                await channel.get_queue(logical),
            ):
                assert queue.name == first
                assert queue.declaration_result.queue == first
                assert queue.declaration_result.message_count == 1
                assert queue.declaration_result.consumer_count == 0
            with pytest.raises(ChannelPreconditionFailed, match="inequivalent arg 'durable'"):
                await channel.declare_queue(logical)

    asyncio.run(play())


@both_kinds
def test_iterator_reads_one_shard_and_gives_back_the_rest(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    async def play() -> None:
        node = cluster.nodes[0]
        first = local_shards(topology, logical, node)[0]
        async with opened(node, kind, topology) as channel:
            for number in range(5):
                await channel.default_exchange.publish(aio_pika.Message(b"%d" % number), first)
            queue = await channel.declare_queue(logical, durable=True)
            seen = []
            async with queue.iterator(timeout=PATIENCE) as messages:
                async for message in messages:
                    seen.append(message.body)
                    await message.ack()
                    if len(seen) == 2:
                        break
            assert seen == [b"0", b"1"]
            assert await counted(topology, [first]) == [0]
            assert [each.body for each in await take(channel, first)] == [b"2", b"3", b"4"]

    asyncio.run(play())


@both_kinds
def test_get_reads_the_local_shard_with_the_fewest_consumers(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    async def play() -> None:
        node = cluster.nodes[0]
        first, second = local_shards(topology, logical, node)
        async with opened(node, kind, topology) as channel:
            queue = await channel.get_queue(logical)
            assert await queue.get(fail=False, timeout=PATIENCE) is None
            with pytest.raises(aio_pika.exceptions.QueueEmpty):
                await queue.get(timeout=PATIENCE)
            await queue.consume(ignore)
            await channel.default_exchange.publish(aio_pika.Message(b"second"), second)
            message = await queue.get(timeout=PATIENCE)
            assert message.body == b"second"
            await message.ack()
            assert await counted(topology, [first, second]) == [1, 0]

    asyncio.run(play())


def test_consume_all_also_reads_shards_of_later_maps(
    cluster: Cluster, topology: Topology, logical: str
) -> None:
    async def play() -> None:
        async with opened(cluster.nodes[0], "plain", topology) as channel:
            received: asyncio.Queue[Any] = asyncio.Queue()
            tags = await channel.consume_all(logical, received.put, no_ack=True)
            assert len(tags) == 6
            shard_map = await asyncio.to_thread(shard, topology, logical, 3)
            new = [each.name for each in shard_map.shards if each.name.endswith(" - 2")]
            assert len(new) == 3

            async def all_are_read() -> bool:
                return await counted(topology, new) == [1, 1, 1]

            await until(all_are_read)
            for name in new:
                await channel.default_exchange.publish(aio_pika.Message(name.encode()), name)
            bodies = {(await asyncio.wait_for(received.get(), PATIENCE)).body.decode() for _ in new}
            assert bodies == set(new)

    asyncio.run(play())


@both_kinds
def test_herd_spreads_evenly_and_loses_nothing(
    cluster: Cluster, topology: Topology, kind: str
) -> None:
    """Eight clients that know nothing of each other consume at the same moment from four shards."""
    name = f"images-{secrets.token_hex(4)}"
    node = cluster.nodes[0]
    shard(topology, name, 4)
    strangers = [topology_of(cluster) for _ in range(8)]

    async def play() -> None:
        received: list[bytes] = []
        sent: list[bytes] = []

        async def on_message(message: Any) -> None:
            received.append(message.body)

        shards = local_shards(topology, name, node)
        connections = [await connected(node, kind) for _ in strangers]
        try:
            channels = [
                AioShardedChannel(await connection.channel(), stranger)
                for connection, stranger in zip(connections, strangers, strict=True)
            ]
            queues = [await channel.declare_queue(name, durable=True) for channel in channels]
            tags = await asyncio.gather(*(queue.consume(on_message, True) for queue in queues))
            crowd = await counted(topology, shards)

            async def is_even() -> bool:
                for shard_name in shards:
                    sent.append(b"%d" % len(sent))
                    await channels[0].default_exchange.publish(
                        aio_pika.Message(sent[-1]), shard_name
                    )
                return await counted(topology, shards) == [2, 2, 2, 2]

            await until(is_even, crowd)
            await until(lambda: len(received) == len(sent), (len(received), len(sent)))
            assert sorted(received) == sorted(sent)
            # The tags are the ones given out, wherever the consumer has gone.
            for queue, tag in zip(queues, tags, strict=True):
                await queue.cancel(tag)
            assert await counted(topology, shards) == [0, 0, 0, 0]
        finally:
            await asyncio.gather(*(connection.close() for connection in connections))

    try:
        asyncio.run(play())
    finally:
        for stranger in strangers:
            stranger.close()
        remove(cluster, topology, name)


# What can't be done


REFUSED: dict[str, Callable[[Any, Any, str], Awaitable[Any]]] = {
    "bind": lambda _, queue, __: queue.bind("amq.direct", "k"),
    "unbind": lambda _, queue, __: queue.unbind("amq.direct", "k"),
    "purge": lambda _, queue, __: queue.purge(),
    "delete": lambda _, queue, __: queue.delete(),
    "delete by the channel": lambda channel, _, name: channel.queue_delete(name),
}


@both_kinds
@pytest.mark.parametrize("call", REFUSED)
def test_refusal_is_the_plugins(
    cluster: Cluster, topology: Topology, logical: str, kind: str, call: str
) -> None:
    async def play() -> None:
        node = cluster.nodes[0]
        async with opened(node, kind, topology) as channel:
            closed: list[tuple[Any, Any]] = []
            channel.close_callbacks.add(lambda *seen: closed.append(seen))
            received: asyncio.Queue[Any] = asyncio.Queue()
            queue = await channel.declare_queue(logical, durable=True)
            await queue.consume(received.put, consumer_tag="c")
            with pytest.raises(ChannelPreconditionFailed) as refused:
                await REFUSED[call](channel, queue, logical)
            verb = call.split()[0]
            text = f'PRECONDITION_FAILED - Can\'t {verb} sharded queue: <<"{logical}">>'
            assert refused.value.args == (text,)
            await until(lambda: closed)
            assert [(seen is channel, reason.args) for seen, reason in closed] == [(True, (text,))]
            connection = channel._connection
            assert not connection.is_closed
            again = AioShardedChannel(await connection.channel(), topology)
            first = local_shards(topology, logical, node)[0]
            await again.default_exchange.publish(aio_pika.Message(b"still there"), first)
            if kind == "plain":
                assert channel.is_closed
                with pytest.raises(ChannelInvalidStateError):
                    await queue.get()
            else:
                # The robust channel opens again, and its declared queue's consumer is back.
                message = await asyncio.wait_for(received.get(), PATIENCE)
                assert (message.body, message.consumer_tag) == (b"still there", "c")
                await message.ack()
                assert not channel.is_closed
            assert await counted(topology, [first]) == [0 if kind == "plain" else 1]

    asyncio.run(play())


def test_refusal_in_a_transaction_is_the_plugins(
    cluster: Cluster, topology: Topology, logical: str
) -> None:
    async def play() -> None:
        async with opened(cluster.nodes[0], "plain", topology, publisher_confirms=False) as channel:
            queue = await channel.get_queue(logical)
            await channel.transaction().select()
            with pytest.raises(ChannelPreconditionFailed, match="Can't purge sharded queue"):
                await queue.purge()

    asyncio.run(play())


def test_node_without_a_shard_is_refused_as_the_plugin_does(
    cluster: Cluster, topology: Topology, logical: str
) -> None:
    async def play() -> None:
        connection = await connected(cluster.nodes[0], "plain")
        async with connection:
            channel = AioShardedChannel(await connection.channel(), topology, node="rabbit@none")
            queue = await channel.get_queue(logical, ensure=False)
            with pytest.raises(ChannelPreconditionFailed) as refused:
                await queue.consume(ignore)
            assert refused.value.args[0].endswith(
                f'Error finding sharded queue for: <<"{logical}">>'
            )

    asyncio.run(play())


# What comes back


@both_kinds
def test_what_was_never_sent_is_not_counted(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    async def scenario() -> None:
        async with opened(cluster.nodes[0], kind, topology) as channel:
            sharded = await channel.get_exchange(logical)
            plain = await channel.get_exchange("amq.direct", ensure=False)
            for exchange in (sharded, plain):
                await exchange.publish(aio_pika.Message(b"x"), "user-1", mandatory=False)
                odd: Any = {"can't be encoded": object()}
                with pytest.raises((TypeError, ValueError)):
                    await exchange.publish(aio_pika.Message(b"x", headers=odd), "user-1")
            await channel.close()
            for exchange in (sharded, plain):
                with pytest.raises(ChannelInvalidStateError):
                    await exchange.publish(aio_pika.Message(b"x"), "user-1")
        counters = {name: count for name, count in channel.counters.items() if count}
        assert counters == {"published": 2, "confirmed": 2}

    asyncio.run(scenario())


@both_kinds
def test_message_comes_back_to_who_asked_for_it_only(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    async def play() -> None:
        async with opened(cluster.nodes[0], kind, topology) as channel:
            returned: list[tuple[Any, Any]] = []
            channel.return_callbacks.add(lambda *seen: returned.append(seen))
            exchange = await channel.get_exchange(logical)
            route = channel.explain(logical, "user-1")
            assert route is not None
            await channel.queue_delete(route.shard)
            message = aio_pika.Message(b"lost", headers={"h": "v"})
            result = await exchange.publish(message, "user-1", mandatory=True)
            assert isinstance(result, aiormq.abc.DeliveredMessage)
            [(sender, seen)] = returned
            assert sender is channel
            assert (seen.exchange, seen.routing_key, seen.body) == (logical, "user-1", b"lost")
            assert seen.headers == {"h": "v"}
            # It is known to be away by then, so nothing is sent.
            await until(lambda: topology.unavailable(route.shard))
            with pytest.raises(ShardUnavailable, match="away"):
                await exchange.publish(message, "user-1")
            await until_available(topology, logical, route.shard)
            await channel.queue_delete(route.shard)
            with pytest.raises(ShardUnavailable, match="not bound"):
                await exchange.publish(message, "user-1", mandatory=False)
            assert len(returned) == 1

    asyncio.run(play())


async def until_available(topology: Topology, logical: str, name: str) -> None:
    await asyncio.to_thread(topology.ensure, logical)
    await until(lambda: not topology.unavailable(name))


def test_return_is_raised_where_the_channel_says_so(
    cluster: Cluster, topology: Topology, logical: str
) -> None:
    async def play() -> None:
        async with opened(cluster.nodes[0], "plain", topology, on_return_raises=True) as channel:
            exchange = await channel.get_exchange(logical)
            route = channel.explain(logical, "user-1")
            assert route is not None
            await channel.queue_delete(route.shard)
            with pytest.raises(PublishError):
                await exchange.publish(aio_pika.Message(b"lost"), "user-1")
            await until_available(topology, logical, route.shard)
            await channel.queue_delete(route.shard)
            with pytest.raises(ShardUnavailable, match="not bound"):
                await exchange.publish(aio_pika.Message(b"lost"), "user-1", mandatory=False)

    asyncio.run(play())


def test_message_sent_by_an_old_map_is_sent_again_by_the_new_one(
    cluster: Cluster, topology: Topology, logical: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = topology.shard_map(logical)
    assert current is not None
    gone = tuple(Shard(f"{each.name}00", each.node) for each in current.shards)
    old = ShardMap(logical, 1, gone, current.nodes, current.policy)
    refreshed: list[bool] = []

    def map_in_memory(name: str) -> ShardMap | None:
        return (current if refreshed else old) if name == logical else None

    monkeypatch.setattr(topology, "shard_map", map_in_memory)

    def refresh() -> Future[None]:
        refreshed.append(True)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(topology.futures, "refresh", refresh)

    async def play() -> None:
        async with opened(cluster.nodes[0], "plain", topology) as channel:
            exchange = await channel.get_exchange(logical)
            result = await exchange.publish(aio_pika.Message(b"x"), "user-1", mandatory=False)
            assert isinstance(result, aiormq.spec.Basic.Ack)
            [message] = await take(channel, current.shard_of("user-1").name)
            assert (message.body, message.routing_key) == (b"x", "user-1")

    asyncio.run(play())
    assert refreshed == [True]


@both_kinds
def test_unequal_declaration_is_refused_and_changes_nothing(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    before = topology.state

    async def play() -> None:
        async with opened(cluster.nodes[0], kind, topology) as channel:
            with pytest.raises(ChannelPreconditionFailed, match="inequivalent arg 'durable'"):
                await channel.declare_exchange(
                    logical, "x-modulus-hash", arguments={"x-shards-per-node": 3}
                )

    asyncio.run(play())
    assert topology.state == before


@both_kinds
def test_deleted_exchange_leaves_its_queues(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    async def play() -> None:
        node = cluster.nodes[0]
        shards = local_shards(topology, logical, node)
        async with opened(node, kind, topology) as channel:
            exchange = await channel.get_exchange(logical)
            with pytest.raises(ChannelPreconditionFailed, match="in use"):
                await exchange.delete(if_unused=True)
            assert channel.explain(logical, "user-1") is not None
        async with opened(node, kind, topology) as channel:
            await channel.default_exchange.publish(aio_pika.Message(b"kept"), shards[0])
            if kind == "plain":
                await channel.exchange_delete(logical)
            else:
                await (await channel.get_exchange(logical)).delete()
            assert channel.explain(logical, "user-1") is None
            assert [each.body for each in await take(channel, shards[0])] == [b"kept"]

    asyncio.run(play())


# Losing the connection


def test_robust_consumer_is_back_on_its_shard_after_a_reconnect(
    cluster: Cluster, topology: Topology, logical: str
) -> None:
    name = f"aio {secrets.token_hex(4)}"

    async def play() -> None:
        node = cluster.nodes[0]
        shards = local_shards(topology, logical, node)
        connection = await connected(node, "robust", client_properties={"connection_name": name})
        async with connection:
            channel = AioShardedChannel(await connection.channel(), topology)
            await channel.set_qos(prefetch_count=10)
            queue = await channel.declare_queue(logical, durable=True)
            received: asyncio.Queue[Any] = asyncio.Queue()
            for tag in ("c-0", "c-1"):
                await queue.consume(received.put, consumer_tag=tag)
            assert await counted(topology, shards) == [1, 1]
            reconnected = asyncio.Event()
            connection.reconnect_callbacks.add(lambda *_: reconnected.set())
            await asyncio.to_thread(kill_connection, node, name)
            await asyncio.wait_for(reconnected.wait(), PATIENCE)

            async def both_are_back() -> bool:
                return await counted(topology, shards) == [1, 1]

            await until(both_are_back)
            for shard_name, tag in zip(shards, ("c-0", "c-1"), strict=True):
                await channel.default_exchange.publish(aio_pika.Message(b"x"), shard_name)
                message = await asyncio.wait_for(received.get(), PATIENCE)
                assert (message.routing_key, message.consumer_tag) == (shard_name, tag)
                await message.ack()
            # Nothing was declared under the logical name, and the exchange still shards.
            queues = await asyncio.to_thread(node.management.get, "queues", node.endpoint.vhost)
            assert logical not in {each["name"] for each in queues}
            exchange = await channel.get_exchange(logical)
            assert await exchange.publish(aio_pika.Message(b"y"), "user-1")
            await queue.cancel("c-0")
            assert await counted(topology, shards) == [0, 1]

    asyncio.run(play())


def kill_connection(node: Node, name: str) -> None:
    found: list[str] = []

    def is_listed() -> bool:
        # The management API shows a new connection after some seconds.
        found[:] = [
            each["name"]
            for each in node.management.get("connections", timeout=PATIENCE)
            if each.get("client_properties", {}).get("connection_name") == name
        ]
        return bool(found)

    wait_until(is_listed)
    node.management.call("DELETE", "connections", found[0], timeout=PATIENCE)


# Harm


@pytest.fixture
def harmed_topology(harmed: Cluster) -> Iterator[Topology]:
    # With the defaults, under which a node that is silent is away.
    with topology_of(harmed) as unhurried:
        shard(unhurried, "images", 1)
    with topology_of(harmed, options=None) as running:
        running.wait_until_ready(PATIENCE)
        yield running


def key_on(topology: Topology, node: Node) -> tuple[str, str]:
    """A key whose shard is on that node, and the shard."""
    shard_map = topology.shard_map("images")
    assert shard_map is not None
    name = shard_map.shards_on(node.name)[0].name
    return key_of(shard_map, name), name


@both_kinds
def test_node_behind_a_balancer_is_recognised(
    cluster: Cluster, topology: Topology, logical: str, kind: str
) -> None:
    connect = aio_pika.connect if kind == "plain" else aio_pika.connect_robust
    balancer = cluster.balancer()

    async def play() -> None:
        seen: set[str] = set()
        for _ in range(30):
            connection = await connect(balancer.endpoint.amqp_url, timeout=PATIENCE)
            async with connection:
                channel = AioShardedChannel(await connection.channel(), topology)
                # A queue without a policy lives on the node that it was declared through.
                own = await channel.declare_queue(exclusive=True)
                management = cluster.nodes[0].management
                found = await asyncio.to_thread(management.get, "queues", cluster.vhost, own.name)
                queue = await channel.get_queue(logical)
                assert queue.name == f"sharding: {logical} - {found['node']} - 0"
                seen.add(found["node"])
            if len(seen) == len(cluster.nodes):
                return
        raise AssertionError(f"the balancer only led to {seen}")

    asyncio.run(play())


@pytest.mark.parametrize(
    "kind",
    [
        "robust",
        pytest.param(
            "plain",
            marks=pytest.mark.twin(
                "integration/test_aio.py::test_every_wait_for_a_frozen_node_ends"
            ),
        ),
    ],
)
def test_every_wait_for_a_frozen_node_ends(
    harmed: Cluster, harmed_topology: Topology, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node we are connected to hangs; then the node of the key's shard."""
    here, there = harmed.nodes[0], harmed.nodes[1]

    async def play(frozen: Node) -> None:
        key, name = key_on(harmed_topology, frozen)
        connection = await connected(here, kind)
        async with connection:
            channel = AioShardedChannel(
                await connection.channel(), harmed_topology, confirm_timeout=2
            )
            exchange = await channel.get_exchange("images")
            seen: list[Exception | None] = []

            async def publish() -> Exception | None:
                try:
                    await exchange.publish(aio_pika.Message(b"x"), key)
                except (OutcomeUnknown, ShardUnavailable) as error:
                    seen.append(error)
                else:
                    seen.append(None)
                return seen[-1]

            async def is_stored() -> bool:
                return await publish() is None

            async def is_unknown() -> bool:
                return isinstance(await publish(), OutcomeUnknown)

            async def is_refused() -> bool:
                return isinstance(await publish(), ShardUnavailable)

            await until(is_stored)
            frozen.freeze()
            try:
                # As if the watch of the nodes had not noticed yet. A stopped process may answer
                # for a moment.
                with monkeypatch.context() as unnoticed:
                    unnoticed.setattr(harmed_topology, "unavailable", lambda _: False)
                    await until(is_unknown)
                assert "within 2 s (confirm_timeout)" in str(seen[-1])
                # Soon it is known to be away, and the next one is told without being sent.
                await until(is_refused)
                assert "away" in str(seen[-1])
                # The node is still frozen, and nobody has given up the connection to it.
                await asyncio.wait_for(channel.close(), PATIENCE)
                assert not connection.is_closed
            finally:
                frozen.thaw()
                await asyncio.to_thread(harmed.wait_until_whole)
        await until(lambda: not harmed_topology.unavailable(name))

    asyncio.run(play(there))
    asyncio.run(play(here))


@pytest.mark.parametrize(
    "kind",
    [
        "robust",
        pytest.param(
            "plain",
            marks=pytest.mark.twin(
                "integration/test_aio.py::test_nack_is_raised_and_the_shard_suspected"
            ),
        ),
    ],
)
def test_nack_is_raised_and_the_shard_suspected(
    harmed: Cluster,
    harmed_topology: Topology,
    kind: str,
    chosen_version: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = harmed.nodes[0], harmed.nodes[1]
    key, name = key_on(harmed_topology, there)
    # As soon as 3.10 knows that a node is dead, it has no route to its queues, and gives back what
    # asked for that; before, it nacks (both seen).
    ways = {"nacked", "given back"} if chosen_version == OLDEST_VERSION else {"nacked"}

    async def told(exchange: Any, key: str) -> str:
        try:
            found = await exchange.publish(aio_pika.Message(b"x"), key)
        except PublishError:
            return "returned"
        except DeliveryError:
            return "nacked"
        return "given back" if _came_back(found) else "stored"

    async def play() -> None:
        async with opened(here, kind, harmed_topology) as channel:
            exchange = await channel.get_exchange("images")
            await asyncio.to_thread(there.kill)
            # As if the watch of the nodes had not noticed yet.
            with monkeypatch.context() as unnoticed:
                unnoticed.setattr(harmed_topology, "unavailable", lambda _: False)
                assert await told(exchange, key) in ways
            await until(lambda: harmed_topology.unavailable(name))
            with pytest.raises(ShardUnavailable, match="away"):
                await exchange.publish(aio_pika.Message(b"x"), key)
            other, _ = key_on(harmed_topology, here)
            assert await exchange.publish(aio_pika.Message(b"x"), other)

    try:
        asyncio.run(play())
    finally:
        there.restart()
    wait_until(lambda: not harmed_topology.unavailable(name))


def test_robust_channel_goes_on_at_another_node_and_its_consumer_returns_with_the_shard(
    harmed: Cluster, harmed_topology: Topology
) -> None:
    balancer = harmed.balancer()

    async def play() -> None:
        connection = await aio_pika.connect_robust(
            balancer.endpoint.amqp_url, timeout=PATIENCE, reconnect_interval=0.2
        )
        async with connection:
            channel = AioShardedChannel(await connection.channel(), harmed_topology)
            queue = await channel.declare_queue("images", durable=True)
            received: asyncio.Queue[Any] = asyncio.Queue()
            await queue.consume(received.put, no_ack=True, consumer_tag="c")
            [lost] = [node for node in harmed if queue.name.endswith(f"{node.name} - 0")]
            reconnected = asyncio.Event()
            connection.reconnect_callbacks.add(lambda *_: reconnected.set())
            await asyncio.to_thread(lost.kill)
            try:
                await asyncio.wait_for(reconnected.wait(), PATIENCE)
                # Nobody waits for the node that is down: here is another one, with its own shard.
                assert (await channel.get_queue("images")).name != queue.name
            finally:
                await asyncio.to_thread(lost.restart)

            async def is_back() -> bool:
                return await counted(harmed_topology, [queue.name]) == [1]

            await until(is_back)
            await channel.default_exchange.publish(aio_pika.Message(b"back"), queue.name)

            async def came() -> bool:
                message = await received.get()
                return (message.body, message.consumer_tag) == (b"back", "c")

            await until(came)

    try:
        asyncio.run(play())
    finally:
        harmed.wait_until_whole()
    wait_until(lambda: not any(map(harmed_topology.unavailable, shards_of(harmed_topology))))


def shards_of(topology: Topology) -> list[str]:
    shard_map = topology.shard_map("images")
    assert shard_map is not None
    return [each.name for each in shard_map.shards]


def test_consume_all_reads_a_shard_again_when_its_node_is_back(
    harmed: Cluster, harmed_topology: Topology
) -> None:
    here, there = harmed.nodes[0], harmed.nodes[2]
    _, name = key_on(harmed_topology, there)

    async def play() -> None:
        async with opened(here, "plain", harmed_topology) as channel:
            received: asyncio.Queue[Any] = asyncio.Queue()
            await channel.consume_all("images", received.put, no_ack=True)
            await asyncio.to_thread(there.kill)
            await asyncio.to_thread(there.restart)

            async def is_read() -> bool:
                return await counted(harmed_topology, [name]) == [1]

            await until(is_read)
            assert not channel.is_closed
            await channel.default_exchange.publish(aio_pika.Message(b"again"), name)

            async def came() -> bool:
                return bool((await received.get()).body == b"again")

            await until(came)

    try:
        asyncio.run(play())
    finally:
        harmed.wait_until_whole()
