"""What reaches the exchange of a logical queue and no shard is kept, and can be brought there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from interceptors import ShardedChannel
from sharding import InvalidInput, Policy, ShardUnavailable, Topology
from sharding.maps.naming import shards_exchange, unrouted
from sharding.publishing.unrouted import bring_unrouted
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.raw_amqp import Raw, RawConnection
from tests.support.sharded import (
    connection_to,
    drain,
    fresh_queue,
    raw_channel,
    shards_in_broker,
    topology_of,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def topology(nodes: Cluster) -> Iterator[Topology]:
    with topology_of(nodes) as running:
        yield running


def shard(topology: Topology, logical: str) -> list[str]:
    topology.set_policy(Policy.exactly(logical, 1, name=logical))
    return [each.name for each in topology.ensure(logical).shard_map.shards]


def publish_as_a_stranger(node: Node, logical: str, messages: list[tuple[str, bytes]]) -> None:
    with raw_channel(node) as channel:
        channel.confirm_delivery()
        for key, body in messages:
            channel.basic_publish(logical, key, body, pika.BasicProperties(headers={"h": 1}))


def test_what_a_stranger_publishes_is_kept_as_it_was_sent(
    nodes: Cluster, topology: Topology
) -> None:
    logical = fresh_queue()
    shard(topology, logical)
    for node in nodes:
        publish_as_a_stranger(node, logical, [("user-1", b"hello")])
    with raw_channel(nodes.nodes[0]) as channel:
        for _ in nodes:
            method, properties, body = channel.basic_get(unrouted(logical), auto_ack=True)
            assert method is not None
            assert properties is not None
            seen = (method.exchange, method.routing_key, properties.headers, body)
            assert seen == (logical, "user-1", {"h": 1}, b"hello")
    assert drain(nodes.nodes[0], shards_in_broker(nodes, logical)) == []


def test_what_is_kept_is_brought_to_its_shards_in_order(nodes: Cluster, topology: Topology) -> None:
    logical = fresh_queue()
    shards = shard(topology, logical)
    sent = [(f"user-{n % 7}", b"%d" % n) for n in range(500)]
    publish_as_a_stranger(nodes.nodes[1], logical, sent)
    assert bring_unrouted(topology, logical).result(PATIENCE) == 500
    assert bring_unrouted(topology, logical).result(PATIENCE) == 0
    stored = drain(nodes.nodes[0], shards)
    shard_map = topology.shard_map(logical)
    assert shard_map is not None
    assert all(shard_map.shard_of(key).name == queue for queue, key, _ in stored)
    for wanted in {key for key, _ in sent}:
        bodies = [body for _, key, body in stored if key == wanted]
        assert bodies == [body for key, body in sent if key == wanted]


def test_a_stranger_s_message_that_looks_like_our_mark_is_brought(
    nodes: Cluster, topology: Topology
) -> None:
    logical = fresh_queue()
    shards = shard(topology, logical)
    looks = pika.BasicProperties(type="warren.end", message_id="mine")
    with raw_channel(nodes.nodes[0]) as channel:
        channel.confirm_delivery()
        channel.basic_publish(logical, unrouted(logical), b"hello", looks)
    assert bring_unrouted(topology, logical).result(PATIENCE) == 1
    assert [body for _, _, body in drain(nodes.nodes[0], shards)] == [b"hello"]


def test_several_who_bring_at_once_bring_each_message_once(
    nodes: Cluster, topology: Topology
) -> None:
    logical = fresh_queue()
    shards = shard(topology, logical)
    publish_as_a_stranger(nodes.nodes[0], logical, [(f"user-{n}", b"%d" % n) for n in range(300)])
    with ExitStack() as others:
        processes = [others.enter_context(topology_of(nodes)) for _ in range(4)]
        bringing = [bring_unrouted(each, logical) for each in processes]
        assert sum(each.result(PATIENCE) for each in bringing) == 300
    assert sorted(int(body) for _, _, body in drain(nodes.nodes[0], shards)) == list(range(300))


def test_many_who_ask_at_once_are_served_by_one_who_waits(
    nodes: Cluster, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every channel that published early comes to know of the map at the same moment."""
    logical = fresh_queue()
    shards = shard(topology, logical)
    publish_as_a_stranger(nodes.nodes[0], logical, [("user-1", b"kept")])
    opened = []
    open_at = topology._plane.open_at

    async def counted(node: Any) -> Any:
        opened.append(node)
        return await open_at(node)

    monkeypatch.setattr(topology._plane, "open_at", counted)
    with raw_channel(nodes.nodes[0]) as other:
        other.basic_consume(unrouted(logical), lambda *_: None, exclusive=True)
        bringing = [bring_unrouted(topology, logical) for _ in range(20)]
        wait_until(lambda: opened)
        bringing += [bring_unrouted(topology, logical) for _ in range(20)]
    assert {each.result(PATIENCE) for each in bringing} == {1}
    assert len(opened) == 1
    assert bring_unrouted(topology, logical).result(PATIENCE) == 0
    assert [body for _, _, body in drain(nodes.nodes[0], shards)] == [b"kept"]


def test_what_no_shard_takes_stays_where_it_is(nodes: Cluster, topology: Topology) -> None:
    logical = fresh_queue()
    shards = shard(topology, logical)
    shard_map = topology.shard_map(logical)
    assert shard_map is not None
    with raw_channel(nodes.nodes[0]) as channel:
        channel.queue_unbind(shards[0], shards_exchange(logical), shards[0])
    sent = [(f"user-{n}", b"%d" % n) for n in range(50)]
    publish_as_a_stranger(nodes.nodes[0], logical, sent)
    with pytest.raises(ShardUnavailable, match="can't be brought"):
        bring_unrouted(topology, logical).result(PATIENCE)
    topology.ensure(logical)  # binds it again
    wait_until(lambda: not topology.unavailable(shards[0]))
    bring_unrouted(topology, logical).result(PATIENCE)
    assert sorted(drain(nodes.nodes[0], shards)) == sorted(
        (shard_map.shard_of(key).name, key, body) for key, body in sent
    )


def test_a_shard_that_takes_nothing_holds_up_no_other(nodes: Cluster, topology: Topology) -> None:
    logical = fresh_queue()
    shards = shard(topology, logical)
    shard_map = topology.shard_map(logical)
    assert shard_map is not None
    with raw_channel(nodes.nodes[0]) as channel:
        channel.queue_unbind(shards[0], shards_exchange(logical), shards[0])
    sent = [(f"user-{n % 25}", b"%d" % n) for n in range(75)]
    publish_as_a_stranger(nodes.nodes[0], logical, sent)
    placed = [(shard_map.shard_of(key).name, key, body) for key, body in sent]
    with pytest.raises(ShardUnavailable, match="can't be brought"):
        bring_unrouted(topology, logical).result(PATIENCE)
    assert in_order(drain(nodes.nodes[0], shards)) == in_order(
        each for each in placed if each[0] != shards[0]
    )
    topology.ensure(logical)  # binds it again
    wait_until(lambda: not topology.unavailable(shards[0]))
    bring_unrouted(topology, logical).result(PATIENCE)
    assert in_order(drain(nodes.nodes[0], shards)) == in_order(
        each for each in placed if each[0] == shards[0]
    )


def in_order(stored: Iterable[tuple[str, str, bytes]]) -> dict[tuple[str, str], list[bytes]]:
    """By shard and key; between keys there is no order."""
    found: dict[tuple[str, str], list[bytes]] = {}
    for queue, key, body in stored:
        found.setdefault((queue, key), []).append(body)
    return found


def test_messages_that_can_not_be_sent_again_end_bringing_with_an_error(
    nodes: Cluster, topology: Topology
) -> None:
    """They fill what the broker gives at a time, and nothing would ever come behind them."""
    logical = fresh_queue()
    shard(topology, logical)
    with RawConnection(nodes.nodes[0].endpoint.amqp_url) as connection:
        for _ in range(300):
            connection.publish(logical, Raw(b"caf\xe9", b"\x00\x00", b"x"))
        connection.wait_for_confirms()
    with pytest.raises(InvalidInput, match="take them out"):
        bring_unrouted(topology, logical).result(PATIENCE)
    with connection_to(nodes.nodes[0]) as client:
        channel = ShardedChannel(client.channel(), topology)
        channel.confirm_delivery()
        topology.forget(logical)
        channel.basic_publish(logical, "user-1", b"kept behind them")
        topology.ensure(logical)
        channel.basic_publish(logical, "user-1", b"goes on")


@pytest.mark.parametrize("by", ["key", "copy"])
def test_what_would_reach_two_shards_by_a_name_of_theirs_stays_where_it_is(
    nodes: Cluster, topology: Topology, by: str
) -> None:
    """Also by that of a shard which is in no map any more, and is bound all the same."""
    logical = fresh_queue()
    topology.set_policy(Policy.exactly(logical, 2, name=logical))
    shards = [each.name for each in topology.ensure(logical).shard_map.shards]
    topology.forget(logical)
    shard(topology, logical)
    with raw_channel(nodes.nodes[0]) as channel:
        channel.confirm_delivery()
        for number, name in enumerate(shards):
            copies = pika.BasicProperties(headers={"CC": [name]} if by == "copy" else {})
            channel.basic_publish(logical, name if by == "key" else "k", b"%d" % number, copies)
        channel.basic_publish(logical, "user-1", b"brought")
    assert bring_unrouted(topology, logical).result(PATIENCE) == 1
    assert [body for _, _, body in drain(nodes.nodes[0], shards)] == [b"brought"]
    kept = drain(nodes.nodes[0], [unrouted(logical)])
    assert [body for _, _, body in kept] == [b"%d" % number for number in range(len(shards))]


def test_exchange_that_is_deleted_and_made_again_keeps_its_net(
    nodes: Cluster, topology: Topology
) -> None:
    logical = fresh_queue()
    shard(topology, logical)
    with connection_to(nodes.nodes[0]) as connection:
        channel = ShardedChannel(connection.channel(), topology)
        channel.exchange_delete(logical)
    with pytest.raises(ChannelClosedByBroker):
        publish_as_a_stranger(nodes.nodes[0], logical, [("user-1", b"no exchange")])
    shards = shard(topology, logical)
    publish_as_a_stranger(nodes.nodes[0], logical, [("user-1", b"kept")])
    assert bring_unrouted(topology, logical).result(PATIENCE) == 1
    assert [body for _, _, body in drain(nodes.nodes[0], shards)] == [b"kept"]


def test_no_confirmed_message_is_lost_while_shards_are_made(nodes: Cluster) -> None:
    """Published without knowing the shards, from before the exchange is there."""
    logical = fresh_queue()
    confirmed: list[bytes] = []
    end = threading.Event()

    def publish() -> None:
        with connection_to(nodes.nodes[1]) as connection:
            number, channel = 0, None
            while not end.is_set():
                try:
                    if channel is None:
                        channel = connection.channel()
                        channel.confirm_delivery()
                    channel.basic_publish(logical, f"user-{number % 9}", b"%d" % number)
                    confirmed.append(b"%d" % number)
                    number += 1
                except ChannelClosedByBroker:  # there is no exchange yet
                    channel = None

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        with topology_of(nodes) as operator:
            shards = shard(operator, logical)
            wait_until(lambda: len(confirmed) > 50)
            end.set()
            thread.join()
            assert bring_unrouted(operator, logical).result(PATIENCE) == len(confirmed)
    finally:
        end.set()
        thread.join()
    found = {body for _, _, body in drain(nodes.nodes[0], shards)}
    assert found == set(confirmed)


def test_arguments_that_the_broker_refuses_leave_nothing_half_made(
    nodes: Cluster, topology: Topology
) -> None:
    logical = fresh_queue()
    bad = Policy(logical, f"^{logical}$", 2, queue_arguments={"x-max-length": -1})
    topology.set_policy(bad)
    with pytest.raises(InvalidInput, match="x-max-length"):
        topology.ensure(logical)
    assert shards_in_broker(nodes, logical) == {}
    for name in (logical, shards_exchange(logical), unrouted(logical)):
        with raw_channel(nodes.nodes[0]) as channel:
            with pytest.raises(ChannelClosedByBroker) as refused:
                channel.exchange_declare(name, passive=True)
            assert refused.value.reply_code == 404


def test_an_exchange_that_was_there_before_is_left_alone(
    nodes: Cluster, topology: Topology
) -> None:
    """It has no way to a queue of unrouted messages, and nobody can give it one."""
    logical = fresh_queue()
    with raw_channel(nodes.nodes[0]) as channel:
        channel.exchange_declare(logical, "direct", durable=True)
    shard(topology, logical)
    ensured = topology.ensure(logical)
    assert ensured.shard_map.exchange == f"warren: {logical}"
    assert any("is not ours" in note for note in ensured.notes)


@pytest.mark.parametrize("kind", ["direct", "x-modulus-hash"])
def test_an_application_may_declare_the_exchange_again(
    nodes: Cluster, topology: Topology, kind: str
) -> None:
    logical = fresh_queue()
    shard(topology, logical)
    with connection_to(nodes.nodes[0]) as connection:
        channel = ShardedChannel(connection.channel(), topology)
        channel.exchange_declare(logical, kind, durable=True)
        channel.basic_publish(logical, "user-1", b"")
