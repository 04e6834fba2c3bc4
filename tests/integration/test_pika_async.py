"""pika's asynchronous channel, wrapped: on pika's own loop and on asyncio's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pika
import pika.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.adapters.select_connection import IOLoop
from pika.exceptions import (
    ChannelClosedByBroker,
    ChannelClosedByClient,
    ChannelWrongStateError,
    DuplicateConsumerTag,
)
from pika.spec import Basic

from interceptors.call_order import CallOrder
from interceptors.callback_publish import Publication, Unconfirmed
from interceptors.pika_callback import AsyncShardedChannel
from sharding import InvalidInput, Policy, Shard, ShardName, ShardUnavailable
from sharding.cluster.topology import Topology
from sharding.maps.naming import shards_exchange
from sharding.maps.shard_map import ShardMap
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.sharded import fresh_queue, raw_channel, shards_in_broker, topology_of

pytestmark = pytest.mark.cluster


class Client:
    """An application: one connection, whose loop runs in a thread, and a wrapped channel."""

    def __init__(self, kind: str, url: str, wrap: Callable[[Any], Any]) -> None:
        self.wrap = wrap
        self.closed: list[tuple[Any, Exception]] = []
        self.messages: list[tuple[Any, Any, pika.BasicProperties, bytes]] = []
        self.returned: list[tuple[Any, Any, pika.BasicProperties, bytes]] = []
        self.verdicts: list[tuple[str, int, bool]] = []
        opened = threading.Event()
        self._ended = threading.Event()
        self._loop: Any
        connect: Any
        if kind == "select":
            self._loop, connect = IOLoop(), pika.SelectConnection
        else:
            self._loop, connect = asyncio.new_event_loop(), AsyncioConnection
        self.connection: Any = connect(
            patient.parameters(url),
            on_open_callback=lambda _: opened.set(),
            on_close_callback=lambda *_: self._end(),
            custom_ioloop=self._loop,
        )
        run = self._loop.start if kind == "select" else self._loop.run_forever
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert opened.wait(PATIENCE)
        self.channel: Any = self.new_channel()

    def new_channel(self) -> Any:
        def wrapped(answer: Callable[[Any], None]) -> Callable[[Any], None]:
            def use(raw: Any) -> None:
                channel = self.wrap(raw)
                channel.add_on_close_callback(lambda *what: self.closed.append(what))
                channel.add_on_return_callback(lambda *what: self.returned.append(what))
                answer(channel)

            return use

        return self.ask(lambda answer: self.connection.channel(on_open_callback=wrapped(answer)))

    def do(self, call: Callable[[], Any]) -> Any:
        """Run `call` on the loop; what it returns or raises."""
        return self.ask(lambda answer: answer(call()))

    def ask(self, start: Callable[[Callable[[Any], None]], Any]) -> Any:
        """Run `start` on the loop; what it hands to the callback that it is given."""
        answers: list[Any] = []
        problems: list[Exception] = []
        answered = threading.Event()

        def answer(value: Any) -> None:
            answers.append(value)
            answered.set()

        def run() -> None:
            try:
                start(answer)
            except Exception as error:
                problems.append(error)
                answered.set()

        self.connection._adapter_add_callback_threadsafe(run)
        assert answered.wait(PATIENCE), self.closed
        if problems:
            raise problems[0]
        return answers[0]

    def on_message(self, *what: Any) -> None:
        self.messages.append(what)

    def consume(self, queue: str, **options: Any) -> str:
        frame = self.ask(
            lambda answer: self.channel.basic_consume(
                queue, self.on_message, callback=answer, **options
            )
        )
        return str(frame.method.consumer_tag)

    def confirm(self) -> None:
        def on_verdict(frame: Any) -> None:
            method = frame.method
            self.verdicts.append((method.NAME, method.delivery_tag, method.multiple))

        self.ask(lambda answer: self.channel.confirm_delivery(on_verdict, answer))

    def publish(self, exchange: str, key: str, body: bytes = b"x", **options: Any) -> None:
        self.do(lambda: self.channel.basic_publish(exchange, key, body, **options))

    def reason(self) -> Any:
        """Why the channel was closed, once it is."""
        wait_until(lambda: self.closed)
        assert len(self.closed) == 1
        channel, why = self.closed[0]
        assert channel is self.channel
        assert self.channel.is_closed
        assert self.connection.is_open
        return why

    def end(self) -> None:
        def close() -> None:
            if self.connection.is_open:
                self.connection.close()

        self.connection._adapter_add_callback_threadsafe(close)
        assert self._ended.wait(PATIENCE)
        self._thread.join(PATIENCE)
        self._loop.close()

    def _end(self) -> None:
        self._ended.set()
        self._loop.stop()


Connect = Callable[..., Client]


@pytest.fixture(scope="module")
def topology(cluster: Cluster) -> Iterator[Topology]:
    with topology_of(cluster) as running:
        running.wait_until_ready(PATIENCE)
        yield running


@pytest.fixture
def queue(cluster: Cluster, topology: Topology) -> Iterator[str]:
    """The name of a logical queue that is not sharded yet."""
    logical = fresh_queue()
    yield logical
    topology.forget(logical)
    for policy in list(topology.state.policies):
        if logical in policy:
            topology.clear_policy(policy)
    with raw_channel(cluster.nodes[0]) as channel:
        for shard in shards_in_broker(cluster, logical):
            channel.queue_delete(shard)
        channel.exchange_delete(logical)


@pytest.fixture
def images(topology: Topology, queue: str) -> str:
    """A logical queue with two shards on each node."""
    return sharded(topology, queue, 2)


def sharded(topology: Topology, logical: str, shards_per_node: int) -> str:
    topology.set_policy(Policy(f"test {logical}", f"^{logical}$", shards_per_node))
    topology.ensure(logical)
    return logical


# The same wrapper on another loop of pika's; `test_connections` keeps that loop in `make test`.
on_asyncio = pytest.mark.twin("integration/test_pika_async.py::test_message_arrives_as_it_was_sent")


@pytest.fixture(params=["select", pytest.param("asyncio", marks=on_asyncio)])
def connect(
    request: pytest.FixtureRequest, cluster: Cluster, topology: Topology
) -> Iterator[Connect]:
    with ExitStack() as clients:

        def new(node: int = 0, url: str | None = None, **options: Any) -> Client:
            where = url or cluster.nodes[node].endpoint.amqp_url
            used = options.pop("topology", topology)
            options.setdefault("confirm_timeout", PATIENCE)
            client = Client(
                request.param, where, lambda raw: AsyncShardedChannel(raw, used, **options)
            )
            clients.callback(client.end)
            return client

        yield new


def local_shards(topology: Topology, node: Node, logical: str) -> list[str]:
    shard_map = topology.shard_map(logical)
    assert shard_map is not None
    return sorted(shard.name for shard in shard_map.shards_on(node.name))


def keys_of(topology: Topology, logical: str, shard: str, count: int) -> list[str]:
    shard_map = topology.shard_map(logical)
    assert shard_map is not None
    keys = (f"key-{number}" for number in range(100_000))
    found = [key for key, _ in zip(_owned(shard_map, shard, keys), range(count), strict=False)]
    assert len(found) == count
    return found


def _owned(shard_map: ShardMap, shard: str, keys: Iterator[str]) -> Iterator[str]:
    return (key for key in keys if shard_map.shard_of(key).name == shard)


def consumers(topology: Topology, shards: list[str]) -> list[int | None]:
    counts = topology.consumer_counts(shards)
    return [counts[shard] for shard in shards]


def messages_in(topology: Topology, shard: str) -> int | None:
    seen = topology.look_at([shard])[shard]
    return seen.messages if seen else None


# Publishing and consuming


def test_message_arrives_as_it_was_sent(connect: Connect, images: str) -> None:
    client = connect()
    client.do(lambda: client.channel.basic_consume_all(images, client.on_message, True))
    properties = pika.BasicProperties(headers={"size": 3}, correlation_id="c", delivery_mode=2)
    for number in range(20):
        client.publish(images, f"user-{number}", str(number).encode(), properties=properties)
    wait_until(lambda: len(client.messages) == 20)
    for channel, method, received, body in client.messages:
        assert channel is client.channel
        assert (method.exchange, method.routing_key) == (images, f"user-{body.decode()}")
        assert received.headers == {"size": 3}
        assert (received.correlation_id, received.delivery_mode) == ("c", 2)
    assert properties.headers == {"size": 3}


def test_message_is_stored_in_the_shard_of_its_key(
    connect: Connect, topology: Topology, images: str
) -> None:
    client = connect()
    route = client.do(lambda: client.channel.explain(images, "user-42"))
    client.publish(images, "user-42")
    wait_until(lambda: messages_in(topology, route.shard) == 1)


def test_what_a_callback_publishes_is_sharded_too(
    connect: Connect, topology: Topology, images: str
) -> None:
    client = connect()
    here, target = local_shards(topology, topology_node(topology, client), images)
    key = keys_of(topology, images, target, 1)[0]
    trigger = keys_of(topology, images, here, 1)[0]

    def publish_on(channel: Any, method: Any, _: Any, body: bytes) -> None:
        channel.basic_publish(images, key, body + b" again")
        channel.basic_ack(method.delivery_tag)

    client.ask(lambda answer: client.channel.basic_consume(images, publish_on, callback=answer))
    client.publish(images, trigger, b"once")
    wait_until(lambda: messages_in(topology, target) == 1)


def topology_node(topology: Topology, client: Client) -> Any:
    host = client.connection.params.host
    return next(
        node for node in topology.nodes() if host in [address.host for address in node.addresses]
    )


def test_consumers_go_to_the_local_shard_with_the_fewest(
    connect: Connect, cluster: Cluster, topology: Topology, images: str
) -> None:
    client = connect(node=1)
    shards = local_shards(topology, cluster.nodes[1], images)
    seen = []
    for _ in range(3):
        client.consume(images)
        seen.append(consumers(topology, shards))
    assert seen == [[1, 0], [1, 1], [2, 1]]


def test_consumers_asked_for_in_one_go_are_placed_one_after_the_other(
    connect: Connect, cluster: Cluster, topology: Topology, images: str
) -> None:
    client = connect(node=1)
    shards = local_shards(topology, cluster.nodes[1], images)
    client.do(lambda: [client.channel.basic_consume(images, client.on_message) for _ in range(3)])
    wait_until(lambda: consumers(topology, shards) == [2, 1])


def test_basic_get_reads_the_local_shard_with_the_fewest_consumers(
    connect: Connect, cluster: Cluster, topology: Topology, images: str
) -> None:
    client = connect(node=2)
    second = local_shards(topology, cluster.nodes[2], images)[1]
    client.consume(images)
    key = keys_of(topology, images, second, 1)[0]
    client.publish(images, key, b"got")
    wait_until(lambda: messages_in(topology, second) == 1)
    channel, method, _, body = client.ask(
        lambda answer: client.channel.basic_get(images, lambda *what: answer(what), True)
    )
    assert channel is client.channel
    assert (method.routing_key, body) == (key, b"got")
    assert client.messages == []


def test_consume_all_covers_every_shard_and_those_that_come_later(
    connect: Connect, topology: Topology, queue: str
) -> None:
    sharded(topology, queue, 1)
    client = connect()
    tags = client.do(lambda: client.channel.basic_consume_all(queue, client.on_message, True))
    assert len(tags) == 3
    sharded(topology, queue, 2)
    shard_map = topology.shard_map(queue)
    assert shard_map is not None
    names = [shard.name for shard in shard_map.shards]
    wait_until(lambda: consumers(topology, names) == [1] * 6)


def test_shard_that_was_gone_for_a_while_is_consumed_again(
    connect: Connect, cluster: Cluster, topology: Topology, queue: str
) -> None:
    sharded(topology, queue, 1)
    client = connect()
    client.do(lambda: client.channel.basic_consume_all(queue, client.on_message, True))
    shard_map = topology.shard_map(queue)
    assert shard_map is not None
    names = [shard.name for shard in shard_map.shards]
    wait_until(lambda: consumers(topology, names) == [1] * 3)
    with raw_channel(cluster.nodes[0]) as raw:
        raw.queue_delete(names[1])
    topology.ensure(queue)
    wait_until(lambda: consumers(topology, names) == [1] * 3)


def start_consuming(client: Client, queue: str) -> str:
    return str(client.do(lambda: client.channel.basic_consume(queue, client.on_message, True)))


def test_no_message_is_lost_while_a_consumer_moves(
    connect: Connect,
    cluster: Cluster,
    topology: Topology,
    images: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With auto_ack the broker forgets what it delivers, also what it delivers while we cancel."""
    shards = local_shards(topology, cluster.nodes[0], images)
    moves: list[str] = []

    def always_the_other(mine: str, *_: Any) -> str | None:
        moves.append(mine)
        if len(moves) > 8:
            return None
        return shards[1] if mine == shards[0] else shards[0]

    monkeypatch.setattr("interceptors.calls.better_shard", always_the_other)
    keys = [keys_of(topology, images, shard, 1)[0] for shard in shards]
    publisher, client = connect(), connect()
    client.consume(images, auto_ack=True)
    sent = 0

    def keep_a_window_full(frame: Any) -> None:
        nonlocal sent
        while len(moves) <= 8 and sent < frame.method.delivery_tag + 50:
            sent += 1
            publisher.channel.basic_publish(images, keys[sent % 2], b"x")

    publisher.ask(lambda answer: publisher.channel.confirm_delivery(keep_a_window_full, answer))
    publisher.do(lambda: keep_a_window_full(pika.frame.Method(1, Basic.Ack(0))))
    wait_until(lambda: len(moves) > 8)

    def accounted_for() -> int:
        left = topology.look_at(shards).values()
        return len(client.messages) + sum(each.messages for each in left if each)

    wait_until(
        lambda: accounted_for() == sent,
        explain=lambda: (
            f"{sent} sent, {len(client.messages)} received, left: {topology.look_at(shards)}"
        ),
    )


def test_exclusive_consumer_stays_where_it_is(
    connect: Connect, images: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(*_: Any) -> None:
        raise AssertionError("looked for a better shard")

    monkeypatch.setattr("interceptors.pika_callback.settle", moved)
    connect().consume(images, exclusive=True)


# Order


def test_cancel_right_after_consume_is_not_overtaken(
    connect: Connect, cluster: Cluster, topology: Topology, images: str
) -> None:
    client = connect()
    happened: list[str] = []

    def consume_and_cancel(answer: Callable[[Any], None]) -> None:
        channel = client.channel
        tag = channel.basic_consume(
            images, client.on_message, callback=lambda _: happened.append("consumed")
        )
        assert tag in channel.consumer_tags
        with pytest.raises(DuplicateConsumerTag):
            channel.basic_consume(images, client.on_message, consumer_tag=tag)
        channel.basic_cancel(tag, callback=lambda _: happened.append("cancelled"))
        channel.basic_qos(prefetch_count=1, callback=answer)

    client.ask(consume_and_cancel)
    assert happened == ["consumed", "cancelled"]
    assert client.channel.consumer_tags == []
    assert consumers(topology, local_shards(topology, cluster.nodes[0], images)) == [0, 0]


def test_close_waits_for_the_calls_before_it(connect: Connect, images: str) -> None:
    client = connect()
    happened: list[str] = []

    def consume_and_close() -> None:
        channel = client.channel
        channel.basic_consume(
            images, client.on_message, callback=lambda _: happened.append("consumed")
        )
        channel.close(0, "enough")
        assert not channel.is_open
        assert channel.is_closing
        with pytest.raises(ChannelWrongStateError, match="closing"):
            channel.basic_publish(images, "key", b"too late")

    client.do(consume_and_close)
    reason = client.reason()
    assert isinstance(reason, ChannelClosedByClient)
    assert reason.reply_text == "enough"
    assert happened == ["consumed"]


def test_publish_behind_a_deferred_call_keeps_its_place(connect: Connect, queue: str) -> None:
    """The exchange does not exist before the deferred declaration is through."""
    client = connect()
    properties = pika.BasicProperties(headers={"n": 1})

    def declare_and_publish(answer: Callable[[Any], None]) -> None:
        client.channel.exchange_declare(
            queue, "x-modulus-hash", durable=True, arguments={"x-shards-per-node": 1}
        )
        for number in range(2000):
            properties.headers = {"n": number}
            client.channel.basic_publish(queue, "key", str(number).encode(), properties)
        client.channel.basic_qos(prefetch_count=10, callback=answer)

    client.ask(declare_and_publish)
    client.do(lambda: client.channel.basic_consume_all(queue, client.on_message, True))
    wait_until(lambda: len(client.messages) == 2000)
    numbers = [int(body) for _, _, _, body in client.messages]
    assert numbers == list(range(2000))
    assert [received.headers for _, _, received, _ in client.messages] == [
        {"n": number} for number in numbers
    ]


def test_refusal_does_not_overtake_what_pika_holds_back(connect: Connect, images: str) -> None:
    client = connect()
    declared: list[str] = []
    names = [fresh_queue() for _ in range(3)]

    def declare_and_bind() -> None:
        for name in names:
            client.channel.queue_declare(
                name,
                exclusive=True,
                callback=lambda frame: declared.append(frame.method.queue),
            )
        client.channel.queue_bind(images, "amq.direct", "key")

    client.do(declare_and_bind)
    assert client.reason().reply_code == 406
    assert declared == names


def test_channel_works_from_a_topology_that_is_not_ready_yet(
    connect: Connect, cluster: Cluster, images: str
) -> None:
    with topology_of(cluster) as early:
        client = connect(topology=early)
        client.do(lambda: client.channel.basic_consume(images, client.on_message, True))
        frame = client.ask(
            lambda answer: client.channel.queue_declare(images, durable=True, callback=answer)
        )
        name = ShardName.parse(frame.method.queue)
        assert name == ShardName(images, cluster.nodes[0].name, 0)


def test_call_that_fails_in_its_turn_is_reported_and_stops_no_other() -> None:
    problems: list[Exception] = []
    happened: list[str] = []
    held: list[Callable[[], None]] = []
    order = CallOrder(problems.append)

    def note(what: str) -> Callable[[Callable[[], None]], None]:
        def step(done: Callable[[], None]) -> None:
            happened.append(what)
            done()

        return step

    def fail(_: Any) -> None:
        raise IndexError

    order.run(held.append)
    for step in (note("first"), fail, note("last")):
        order.run(step)
    assert happened == []
    held[0]()
    assert happened == ["first", "last"]
    assert [type(problem) for problem in problems] == [IndexError]
    assert order.idle


# Refusing


@pytest.mark.parametrize("verb", ["bind", "unbind", "purge", "delete"])
@pytest.mark.parametrize("transaction", [False, True])
def test_call_that_makes_no_sense_closes_the_channel_as_the_plugin_does(
    connect: Connect, cluster: Cluster, images: str, verb: str, transaction: bool
) -> None:
    client = connect()
    arguments = ("amq.direct", "key") if verb in ("bind", "unbind") else ()

    def call() -> None:
        if transaction:
            client.channel.tx_select(callback=lambda _: None)
        getattr(client.channel, f"queue_{verb}")(
            images, *arguments, callback=lambda _: pytest.fail("it answered")
        )

    client.do(call)
    reason = client.reason()
    assert isinstance(reason, ChannelClosedByBroker)
    assert reason.reply_code == 406
    text = f'PRECONDITION_FAILED - Can\'t {verb} sharded queue: <<"{images}">>'
    assert reason.reply_text == text
    with pytest.raises(ChannelWrongStateError):
        client.do(lambda: client.channel.queue_purge(images))
    assert len(shards_in_broker(cluster, images)) == 6
    again = client.new_channel()
    frame = client.ask(lambda answer: again.queue_declare(images, durable=True, callback=answer))
    assert ShardName.parse(frame.method.queue)


def test_same_calls_on_a_plain_queue_pass_through(connect: Connect) -> None:
    client = connect()
    plain = fresh_queue()
    channel = client.channel
    client.ask(lambda answer: channel.queue_declare(plain, exclusive=True, callback=answer))
    client.ask(lambda answer: channel.queue_bind(plain, "amq.direct", plain, callback=answer))
    client.consume(plain, auto_ack=True)
    client.publish("amq.direct", plain, b"plain")
    wait_until(lambda: client.messages)
    assert client.messages[0][0] is channel
    client.ask(lambda answer: channel.queue_unbind(plain, "amq.direct", plain, callback=answer))
    client.ask(lambda answer: channel.queue_purge(plain, callback=answer))
    client.ask(lambda answer: channel.queue_delete(plain, callback=answer))


def test_other_errors_keep_their_reason(connect: Connect) -> None:
    client = connect()
    client.do(lambda: client.channel.queue_purge("nothing of that name", callback=print))
    assert client.reason().reply_code == 404


def test_no_local_shard_is_said_as_the_plugin_says_it(
    connect: Connect, cluster: Cluster, topology: Topology, images: str
) -> None:
    shard_map = topology.shard_map(images)
    assert shard_map is not None
    elsewhere = tuple(shard for shard in shard_map.shards if shard.node != cluster.nodes[0].name)
    urls = [node.endpoint.amqp_url for node in cluster]
    one_node_less = ShardMap(images, 1, elsewhere, shard_map.nodes, shard_map.policy)
    with Topology(*urls, maps=[one_node_less], options=patient.TOPOLOGY) as fixed:
        client = connect(topology=fixed)
        client.do(lambda: client.channel.basic_consume(images, client.on_message))
        reason = client.reason()
        text = f'PRECONDITION_FAILED - Error finding sharded queue for: <<"{images}">>'
        assert (reason.reply_code, reason.reply_text) == (406, text)


# Declaring


def test_queue_declare_answers_with_the_shard_of_the_connected_node(
    connect: Connect, cluster: Cluster, images: str
) -> None:
    client = connect(node=2)
    frame = client.ask(
        lambda answer: client.channel.queue_declare(images, durable=True, callback=answer)
    )
    assert frame.method.queue == str(ShardName(images, cluster.nodes[2].name, 0))


def test_queue_declare_with_other_arguments_is_refused_by_the_broker(
    connect: Connect, images: str
) -> None:
    client = connect()
    client.do(lambda: client.channel.queue_declare(images, durable=False, callback=print))
    reason = client.reason()
    assert reason.reply_code == 406
    assert "inequivalent arg 'durable' for queue 'sharding: " in reason.reply_text


def test_exchange_is_declared_looked_up_and_deleted(
    connect: Connect, cluster: Cluster, topology: Topology, queue: str
) -> None:
    client = connect()
    channel = client.channel
    declared = client.ask(
        lambda answer: channel.exchange_declare(
            queue,
            "x-modulus-hash",
            durable=True,
            arguments={"x-shards-per-node": 1},
            callback=answer,
        )
    )
    assert declared.method.NAME == "Exchange.DeclareOk"
    assert len(shards_in_broker(cluster, queue)) == 3
    client.ask(
        lambda answer: channel.exchange_declare(
            queue, "x-modulus-hash", passive=True, callback=answer
        )
    )
    deleted = client.ask(lambda answer: channel.exchange_delete(queue, callback=answer))
    assert deleted.method.NAME == "Exchange.DeleteOk"
    assert topology.shard_map(queue) is None
    assert len(shards_in_broker(cluster, queue)) == 3
    client.do(
        lambda: channel.exchange_declare(queue, "x-modulus-hash", passive=True, callback=print)
    )
    assert client.reason().reply_code == 404


def test_exchange_without_a_policy_is_refused_at_once(connect: Connect, queue: str) -> None:
    client = connect()
    with pytest.raises(InvalidInput, match="must match a policy"):
        client.do(lambda: client.channel.exchange_declare(queue, "x-modulus-hash"))
    assert client.channel.is_open


def test_topology_that_fails_closes_the_channel_and_says_why(
    connect: Connect, cluster: Cluster, images: str
) -> None:
    gone = topology_of(cluster)
    gone.wait_until_ready(PATIENCE)
    client = connect(topology=gone)
    gone.close()
    client.do(lambda: client.channel.exchange_delete(images, callback=print))
    reason = client.reason()
    assert isinstance(reason, ChannelClosedByBroker)
    assert (reason.reply_code, reason.reply_text) == (
        406,
        "PRECONDITION_FAILED - the topology is closed",
    )


# Knowing the node


def test_node_is_known_by_its_token_where_addresses_say_nothing(
    connect: Connect, cluster: Cluster, topology: Topology, images: str
) -> None:
    """As behind a load balancer: the peer's address is no node's."""
    shard_map = topology.shard_map(images)
    assert shard_map is not None
    nodes = tuple(replace(node, addresses=()) for node in shard_map.nodes)
    nowhere = ShardMap(images, 1, shard_map.shards, nodes, shard_map.policy)
    url = cluster.nodes[0].endpoint.amqp_url
    with Topology(url, maps=[nowhere], options=patient.TOPOLOGY) as fixed:
        client = connect(node=1, topology=fixed)
        frame = client.ask(
            lambda answer: client.channel.queue_declare(images, durable=True, callback=answer)
        )
        assert frame.method.queue == str(ShardName(images, cluster.nodes[1].name, 0))
        # The channel that asked is not left behind.
        wait_until(lambda: len(client.connection._channels) == 1)


# Returns and confirms


def unbind(cluster: Cluster, topology: Topology, logical: str) -> str:
    """Take one shard off its exchange; returns a key of it."""
    shard_map = topology.shard_map(logical)
    assert shard_map is not None
    shard = shard_map.shards[0].name
    with raw_channel(cluster.nodes[0]) as channel:
        channel.queue_unbind(shard, shards_exchange(logical), shard)
    return keys_of(topology, logical, shard, 1)[0]


def test_return_that_was_asked_for_reaches_the_application(
    connect: Connect, cluster: Cluster, topology: Topology, images: str
) -> None:
    key = unbind(cluster, topology, images)
    client = connect()
    properties = pika.BasicProperties(headers={"a": 1})
    client.publish(images, key, b"asked", properties=properties, mandatory=True)
    wait_until(lambda: client.returned)
    channel, method, received, body = client.returned[0]
    assert channel is client.channel
    assert (method.exchange, method.routing_key, body) == (images, key, b"asked")
    assert received.headers == {"a": 1}


def test_return_that_was_not_asked_for_is_logged_and_kept_from_the_application(
    connect: Connect,
    cluster: Cluster,
    topology: Topology,
    images: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = unbind(cluster, topology, images)
    client = connect()
    client.publish(images, key, b"not asked")
    wait_until(lambda: f"a message with key {key!r} came back" in caplog.text)
    # Returns come in order: the first one must have been kept back.
    client.publish("", "nobody", b"plain", mandatory=True)
    wait_until(lambda: client.returned)
    assert [body for _, _, _, body in client.returned] == [b"plain"]


def without_its_first_shard(shard_map: ShardMap) -> ShardMap:
    """The next map, in which the first shard is away and its keys are with the others."""
    first, *rest = shard_map.shards
    shards = (Shard(first.name, first.node, available=False), *rest)
    epoch = shard_map.epoch + 1
    return ShardMap(shard_map.logical, epoch, shards, shard_map.nodes, shard_map.policy)


@pytest.mark.parametrize("bound", [True, False])
def test_message_sent_by_an_old_map_is_sent_once_to_the_shard_of_the_new_one(
    connect: Connect,
    cluster: Cluster,
    topology: Topology,
    images: str,
    bound: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    older = topology.shard_map(images)
    assert older is not None
    key = unbind(cluster, topology, images)
    newer = without_its_first_shard(older)
    target = newer.shard_of(key).name
    if not bound:
        with raw_channel(cluster.nodes[0]) as channel:
            channel.queue_unbind(target, shards_exchange(images), target)
    urls = [node.endpoint.amqp_url for node in cluster]
    with Topology(*urls, maps=[older], options=patient.TOPOLOGY) as fixed:
        client = connect(topology=fixed)

        def publish_and_change() -> None:
            client.channel.basic_publish(images, key, b"stray")
            cast(dict[str, ShardMap], fixed.state.maps)[images] = newer

        client.do(publish_and_change)
        if bound:
            wait_until(lambda: messages_in(topology, target) == 1)
        else:
            wait_until(lambda: f"a message with key {key!r} came back" in caplog.text)
        assert client.returned == []
        # Both were suspected and are there; the topology must not be closed while it looks.
        wait_until(
            lambda: not any(map(fixed.unavailable, [target, older.shards[0].name])), PATIENCE
        )


def test_confirms_carry_the_applications_own_tags(connect: Connect, images: str) -> None:
    client = connect()
    client.confirm()
    for number in range(30):
        if number % 3 == 2:
            client.publish("amq.direct", "nobody")
        else:
            client.publish(images, f"user-{number}")
    confirmed: set[int] = set()

    def all_confirmed() -> bool:
        confirmed.clear()
        for name, tag, multiple in client.verdicts:
            assert name == "Basic.Ack"
            confirmed.update(range(1, tag + 1) if multiple else [tag])
        return confirmed == set(range(1, 31))

    wait_until(all_confirmed, explain=lambda: str(client.verdicts))


def test_unasked_return_of_a_confirmed_message_is_a_nack(
    connect: Connect, cluster: Cluster, topology: Topology, images: str
) -> None:
    lost = unbind(cluster, topology, images)
    shard_map = topology.shard_map(images)
    assert shard_map is not None
    fine = keys_of(topology, images, shard_map.shards[1].name, 1)[0]
    client = connect()
    client.confirm()

    def publish() -> None:
        # In one go, before the lost shard is known to be away.
        for key, mandatory in [(fine, 0), (lost, 0), (fine, 0), (lost, 1), (lost, 0), (fine, 0)]:
            client.channel.basic_publish(images, key, b"x%d" % mandatory, None, bool(mandatory))

    client.do(publish)
    open_tags: set[int] = set()
    nacked: set[int] = set()

    def all_told() -> bool:
        open_tags.update(range(1, 7))
        nacked.clear()
        for name, tag, multiple in list(client.verdicts):
            told = {each for each in open_tags if each <= tag} if multiple else {tag}
            assert told <= open_tags
            open_tags.difference_update(told)
            if name == "Basic.Nack":
                nacked.update(told)
        return not open_tags

    wait_until(all_told, explain=lambda: str(client.verdicts))
    assert nacked == {2, 5}
    assert [body for _, _, _, body in client.returned] == [b"x1"]


def test_equal_messages_with_other_properties_are_told_apart_when_they_come_back(
    connect: Connect, cluster: Cluster, topology: Topology, images: str
) -> None:
    """The shard is lost in the middle of them: those before are stored, those behind are not."""
    shard = local_shards(topology, cluster.nodes[0], images)[0]
    key = keys_of(topology, images, shard, 1)[0]
    behind = shards_exchange(images)
    client = connect()
    client.confirm()

    def publish(numbers: range) -> None:
        for number in numbers:
            properties = pika.BasicProperties(message_id=str(number), delivery_mode=2)
            client.channel.basic_publish(images, key, b"tick", properties)

    def lose_the_shard_in_the_middle(first: int) -> None:
        publish(range(first, first + 100))
        # On the same channel: the broker takes one after the other.
        client.channel.queue_unbind(shard, behind, shard, callback=lambda _: None)
        publish(range(first + 100, first + 200))

    def told() -> dict[int, str]:
        names: dict[int, str] = {}
        for name, tag, multiple in list(client.verdicts):
            for each in range(1, tag + 1) if multiple else [tag]:
                names.setdefault(each, name)
        return names

    def told_all(numbers: range) -> bool:
        return told().keys() >= {*numbers}

    with raw_channel(cluster.nodes[0]) as raw:  # where the client is, so that it sees the binding
        for first in (1, 201, 401):
            wait_until(lambda: not topology.unavailable(shard))
            client.do(partial(lose_the_shard_in_the_middle, first))
            mine = range(first, first + 200)
            wait_until(partial(told_all, mine))
            raw.queue_bind(shard, behind, shard)
            found = iter(lambda: raw.basic_get(shard, auto_ack=True)[1], None)
            stored = {int(properties.message_id or "") for properties in found}
            assert stored == {*mine[:100]}
            assert {each for each in mine if told()[each] == "Basic.Ack"} == stored


@given(
    fates=st.lists(st.sampled_from(["stored", "plain", "asked", "unasked"]), min_size=1),
    data=st.data(),
)
def test_every_message_gets_one_verdict_however_the_broker_confirms(
    fates: list[str], data: st.DataObject
) -> None:
    unconfirmed = Unconfirmed()
    for tag, fate in enumerate(fates, 1):
        content = ("images", str(tag), 0)
        sharded = None if fate == "plain" else Publication(content, "shard", fate == "asked")
        unconfirmed.sent(sharded)
        if fate.endswith("asked"):
            assert unconfirmed.returned(content) is sharded
    waiting = set(range(1, len(fates) + 1))
    told: dict[int, str] = {}
    while waiting:
        tag = data.draw(st.sampled_from(sorted(waiting)))
        multiple = data.draw(st.booleans())
        waiting -= {each for each in waiting if each <= tag} if multiple else {tag}
        for verdict in unconfirmed.confirmed(Basic.Ack(tag, multiple))[0]:
            last = verdict.delivery_tag
            open_tags = set(range(1, len(fates) + 1)) - told.keys()
            assert last in open_tags
            covered = {each for each in open_tags if each <= last} if verdict.multiple else {last}
            told.update(dict.fromkeys(covered, verdict.NAME))
    assert told == {
        tag: "Basic.Nack" if fate == "unasked" else "Basic.Ack" for tag, fate in enumerate(fates, 1)
    }


def test_nack_makes_its_shard_suspect() -> None:
    unconfirmed = Unconfirmed()
    for shard in ("first", "second", "third"):
        unconfirmed.sent(Publication(("images", shard, 0), shard, asked=False))
    nack = Basic.Nack(2, True)
    assert unconfirmed.confirmed(nack) == ([nack], {"first", "second"})


def test_key_of_a_shard_that_is_away_is_refused_at_once(
    connect: Connect, topology: Topology, images: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "unavailable", lambda _: True)
    client = connect()
    with pytest.raises(ShardUnavailable):
        client.publish(images, "user-42")

    def behind_a_deferred_call() -> None:
        client.channel.basic_consume(images, client.on_message)
        client.channel.basic_publish(images, "user-42", b"x")

    with pytest.raises(ShardUnavailable):
        client.do(behind_a_deferred_call)


def test_channel_that_confirms_already_can_not_be_wrapped(
    connect: Connect, topology: Topology
) -> None:
    client = connect()
    raw = client.channel._channel
    client.ask(lambda answer: raw.confirm_delivery(print, answer))
    with pytest.raises(InvalidInput, match="before confirm_delivery"):
        client.do(lambda: AsyncShardedChannel(raw, topology))


# Being the channel


def test_wrapper_is_the_channel_in_everything_else(connect: Connect) -> None:
    client = connect()
    raw = client.channel._channel
    assert int(client.channel) == int(raw) == client.channel.channel_number
    assert repr(client.channel) == f"<AsyncShardedChannel of {raw!r}>"
    assert client.channel.connection is client.connection
    assert client.channel.is_open
    got_empty: list[Any] = []
    client.channel.add_callback(got_empty.append, [Basic.GetEmpty])
    plain = fresh_queue()
    client.ask(lambda answer: client.channel.queue_declare(plain, exclusive=True, callback=answer))
    client.do(lambda: client.channel.basic_get(plain, client.on_message))
    wait_until(lambda: got_empty)
