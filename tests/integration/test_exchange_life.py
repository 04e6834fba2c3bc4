"""Exchanges of logical queues that are deleted and made again, by whom and whenever it may be.

What is published to one through Warren reaches its shard or fails; what anybody else publishes to
it is kept. Found by an attack, each one seen failing.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aio_pika
import pika
import pytest
from pika.exceptions import ChannelClosedByBroker, NackError

from interceptors import (
    AioShardedChannel,
    AioShardedConnection,
    AsyncShardedChannel,
    ShardedChannel,
)
from sharding import Policy, ShardMap, Topology
from sharding.amqp.session import Channel
from sharding.cli import maps
from sharding.cluster.provisioner import net
from sharding.doctor.checks import judge_exchanges
from sharding.maps.naming import shards_exchange, unrouted
from tests.cluster import Cluster, wait_until
from tests.cluster.pool import Pool
from tests.cluster.waiting import PATIENCE
from tests.conformance.callers import CALLERS, Publication
from tests.support.sharded import (
    connection_to,
    drain,
    fresh_queue,
    publish_all,
    raw_channel,
    set_up,
    topology_of,
)

pytestmark = pytest.mark.cluster

PERSISTENT = pika.BasicProperties(delivery_mode=2)
WRAPPERS: dict[str, Any] = {
    "blocking": ShardedChannel,
    "async": AsyncShardedChannel,
    "aio": AioShardedChannel,
    "robust": AioShardedChannel,
}


def shard(topology: Topology, logical: str) -> ShardMap:
    topology.set_policy(Policy.exactly(logical, 1, name=logical))
    return topology.ensure(logical).shard_map


def names(shard_map: ShardMap) -> list[str]:
    return [each.name for each in shard_map.shards]


@pytest.mark.parametrize("declared_as", ["direct", "x-modulus-hash"])
@pytest.mark.parametrize("kind", list(CALLERS))
def test_an_exchange_that_is_declared_again_leads_to_its_shards(
    cluster: Cluster, topology: Topology, kind: str, declared_as: str
) -> None:
    """Somebody has deleted it, and who uses it next declares it, as applications do."""
    images = shard(topology, fresh_queue())
    with raw_channel(cluster.nodes[1]) as raw:
        raw.exchange_delete(images.logical)
    url = cluster.nodes[0].endpoint.amqp_url
    wrap = WRAPPERS[kind]
    with CALLERS[kind](url, lambda channel: wrap(channel, topology), confirms=True) as caller:
        caller.declare_exchange(images.logical, declared_as, durable=True)
        caller.publish(Publication(images.logical, "user-1", "hello"))
    found = drain(cluster.nodes[0], [*names(images), unrouted(images.logical)])
    assert found == [(images.shard_of("user-1").name, "user-1", b"hello")]


@pytest.mark.parametrize("who", ["application", "watch"])
def test_what_is_published_while_an_exchange_is_made_again_is_brought_to_its_shard(
    cluster: Cluster, topology: Topology, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """It is there before it is bound: what comes in between is confirmed and kept."""
    images = shard(topology, fresh_queue())
    with raw_channel(cluster.nodes[1]) as raw:
        raw.exchange_delete(images.logical)
    whole = Channel.bind_exchange
    published: list[bool] = []

    def publish() -> None:
        with connection_to(cluster.nodes[1]) as connection:
            channel = ShardedChannel(connection.channel(), topology)
            channel.confirm_delivery()
            channel.basic_publish(images.logical, "user-1", b"in between")

    async def bind_exchange(channel: Channel, target: str, source: str, key: str) -> None:
        if source == images.logical and not published:
            published.append(True)
            await asyncio.to_thread(publish)
        await whole(channel, target, source, key)

    monkeypatch.setattr(Channel, "bind_exchange", bind_exchange)
    if who == "application":
        with connection_to(cluster.nodes[0]) as connection:
            channel = ShardedChannel(connection.channel(), topology)
            channel.exchange_declare(images.logical, "direct", durable=True)
    else:
        watch_once(topology, monkeypatch)
    found = drain(cluster.nodes[0], [*names(images), unrouted(images.logical)])
    assert found == [(images.shard_of("user-1").name, "user-1", b"in between")]


def watch_once(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `warren shards watch` does at each look."""
    monkeypatch.setattr(maps, "connected", lambda *_: nullcontext(topology))
    monkeypatch.setattr(maps, "time", SimpleNamespace(sleep=sys.exit))
    with pytest.raises(SystemExit):
        maps.watch()


def test_what_was_published_while_a_manager_ended_half_way_is_brought_by_the_next(
    cluster: Cluster, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after it had made the exchange again and before it was bound: the next one found it
    there, and what had been confirmed meanwhile stayed unrouted."""
    images = shard(topology, fresh_queue())
    with raw_channel(cluster.nodes[1]) as raw:
        raw.exchange_delete(images.logical)
        raw.exchange_declare(images.logical, "direct", durable=True, arguments=net(images.logical))
    with connection_to(cluster.nodes[1]) as connection:
        channel = ShardedChannel(connection.channel(), topology, confirm_timeout=PATIENCE)
        channel.confirm_delivery()
        channel.basic_publish(images.logical, "user-1", b"half-way")
    watch_once(topology, monkeypatch)
    found = drain(cluster.nodes[0], [*names(images), unrouted(images.logical)])
    assert found == [(images.shard_of("user-1").name, "user-1", b"half-way")]


def test_what_can_not_be_brought_is_not_tried_at_each_look(
    pool: Pool, broker_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a virtual host of its own, as who watches looks after all names that there are."""
    with (
        pool.shared("healthy", broker_version, "alone") as cluster,
        topology_of(cluster) as topology,
    ):
        images = shard(topology, fresh_queue())
        tried: list[str] = []
        whole = maps._bring

        def bring(topology: Topology, logical: str) -> int:
            tried.append(logical)
            return whole(topology, logical)

        looks = iter(range(5))
        monkeypatch.setattr(maps, "_bring", bring)
        monkeypatch.setattr(maps, "connected", lambda *_: nullcontext(topology))
        monkeypatch.setattr(
            maps, "time", SimpleNamespace(sleep=lambda _: next(looks, None) is None and sys.exit())
        )
        with raw_channel(cluster.nodes[1]) as raw:
            raw.confirm_delivery()
            raw.basic_publish(images.logical, names(images)[0], b"would be stored twice")
            raw.basic_publish(images.logical, "user-1", b"brought")
        with pytest.raises(SystemExit):
            maps.watch()
        assert 1 <= tried.count(images.logical) < 5
        found = drain(cluster.nodes[0], [*names(images), unrouted(images.logical)])
        assert found == [
            (images.shard_of("user-1").name, "user-1", b"brought"),
            (unrouted(images.logical), names(images)[0], b"would be stored twice"),
        ]


def test_a_robust_channel_makes_no_exchange_that_leads_nowhere(
    cluster: Cluster, topology: Topology
) -> None:
    """It was deleted, with all that was behind it, while the connection was lost."""
    logical = fresh_queue()
    images = shard(topology, logical)

    def delete_and_close(named: str) -> None:
        with connection_to(cluster.nodes[1]) as connection:
            ShardedChannel(connection.channel(), topology).exchange_delete(logical)
        management = cluster.nodes[0].management
        wait_until(lambda: _connections(management.get("connections"), named))
        for name in _connections(management.get("connections"), named):
            management.call("DELETE", "connections", name)

    async def play() -> None:
        opened = await aio_pika.connect_robust(
            cluster.nodes[0].endpoint.amqp_url,
            reconnect_interval=0.1,
            client_properties={"connection_name": logical},
        )
        async with AioShardedConnection(opened, topology) as connection:
            reconnected = asyncio.Event()
            connection.reconnect_callbacks.add(lambda *_: reconnected.set())
            channel = await connection.channel()
            await channel.declare_exchange(logical, "x-modulus-hash", durable=True)
            await channel.declare_exchange(logical, "direct", durable=True)
            await asyncio.to_thread(delete_and_close, logical)
            await asyncio.wait_for(reconnected.wait(), PATIENCE)
            await asyncio.wait_for(channel.ready(), PATIENCE)

    asyncio.run(play())
    with raw_channel(cluster.nodes[0]) as stranger:
        stranger.confirm_delivery()
        with pytest.raises(ChannelClosedByBroker, match="no exchange"):
            stranger.basic_publish(logical, "user-1", b"to nobody")
    assert drain(cluster.nodes[0], names(images)) == []


def _connections(listed: list[dict[str, Any]], named: str) -> list[str]:
    return [
        each["name"]
        for each in listed
        if each.get("client_properties", {}).get("connection_name") == named
    ]


def test_what_is_behind_a_deleted_exchange_stays_for_who_shards_it_again(
    cluster: Cluster, topology: Topology
) -> None:
    """Found by an attack: who was held up in `exchange_delete` deleted the net that another process
    had just made, and 13,272 of 15,087 messages of strangers were confirmed and dropped."""
    logical = fresh_queue()
    shard(topology, logical)
    with connection_to(cluster.nodes[0]) as connection:
        ShardedChannel(connection.channel(), topology).exchange_delete(logical)
    with raw_channel(cluster.nodes[0]) as raw:
        raw.exchange_declare(shards_exchange(logical), passive=True)
        raw.exchange_declare(unrouted(logical), passive=True)
        raw.queue_declare(unrouted(logical), passive=True)


def test_exchange_that_a_stranger_made_again_without_a_net_is_not_used(
    cluster: Cluster, topology: Topology
) -> None:
    """Found by an attack: ensure took it for ours, and the doctor said that all is well."""
    logical = fresh_queue()
    shard(topology, logical)
    with raw_channel(cluster.nodes[0]) as raw:
        raw.exchange_delete(logical)
        raw.exchange_declare(logical, "direct", durable=True)
    assert _doctor_says(cluster, logical) == "problem"
    ensured = topology.ensure(logical)
    assert ensured.shard_map.exchange == f"warren: {logical}"
    assert any("is not ours" in note for note in ensured.notes)
    with connection_to(cluster.nodes[0]) as connection:
        channel = ShardedChannel(connection.channel(), topology)
        channel.confirm_delivery()
        channel.basic_publish(logical, "user-1", b"ours")
    assert [body for _, _, body in drain(cluster.nodes[0], names(ensured.shard_map))] == [b"ours"]
    with raw_channel(cluster.nodes[0]) as raw:
        raw.exchange_delete(logical)
    assert topology.ensure(logical).shard_map.exchange == logical


def test_exchange_in_use_stays_ours_when_the_policy_wants_another_durability(
    topology: Topology,
) -> None:
    logical = fresh_queue()
    shard(topology, logical)
    topology.set_policy(replace(topology.state.policies[logical], durable=False))
    ensured = topology.ensure(logical)
    assert ensured.shard_map.exchange == logical
    assert not any("is not ours" in note for note in ensured.notes)


def _doctor_says(cluster: Cluster, exchange: str) -> str | None:
    api = cluster.nodes[0].management
    seen = [api.get(kind, cluster.vhost) for kind in ("exchanges", "queues", "bindings")]
    return next(
        (str(each.verdict) for each in judge_exchanges(*seen) if each.subject == exchange), None
    )


def test_nothing_is_confirmed_and_dropped_while_the_node_of_unrouted_messages_is_down(
    harmed: Cluster,
) -> None:
    """A broker of 3.10 forgets the way to such a queue."""
    logical = fresh_queue()
    set_up(harmed, Policy.exactly(logical, 1, name=logical))
    queue = harmed.nodes[0].management.get("queues", harmed.vhost, unrouted(logical))
    home = next(node for node in harmed if node.name == queue["node"])
    other = next(node for node in harmed if node != home)
    home.stop()
    confirmed: list[bytes] = []
    with raw_channel(other) as stranger:
        stranger.confirm_delivery()
        for number in range(100):
            with suppress(NackError):
                body = b"%d" % number
                stranger.basic_publish(logical, "user-1", body, PERSISTENT)
                confirmed.append(body)
    home.restart()
    assert [body for _, _, body in drain(other, [unrouted(logical)])] == confirmed


def test_doctor_names_queues_whose_dead_letters_go_back_by_the_keys_of_an_old_shard(
    cluster: Cluster, topology: Topology
) -> None:
    """Seen on 3.10 and 4.0: such a message does not take the way to the unrouted ones, as it has
    our keys, and where its old shard is not bound any more it is lost without a trace."""
    logical = fresh_queue()
    retry = f"{logical}-retry"
    with raw_channel(cluster.nodes[0]) as channel:
        channel.exchange_declare(retry, "fanout")
        topology.set_policy(
            replace(
                Policy.exactly(logical, 1, name=logical),
                queue_arguments={"x-dead-letter-exchange": retry},
            )
        )
        shard_map = topology.ensure(logical).shard_map
        arguments = {"x-message-ttl": 1, "x-dead-letter-exchange": shard_map.exchange}
        channel.queue_declare(retry, arguments=arguments)
        channel.queue_bind(retry, retry, "")
        publish_all(topology, logical, [("key-1", b"again")])
        shard = shard_map.shard_of("key-1").name
        channel.queue_unbind(shard, shards_exchange(logical), shard)
        wait_until(lambda: reject_one(channel, shard))
        wait_until(lambda: ready(channel, retry) == 0)
        assert [ready(channel, queue) for queue in [*names(shard_map), unrouted(logical)]] == [
            0
        ] * 4
        api, vhost = cluster.nodes[0].management, cluster.vhost
        seen = [api.get(kind, vhost) for kind in ("exchanges", "queues", "bindings")]
        told = {each.subject: each for each in judge_exchanges(*seen)}
        assert "the old shard of a key that has moved" in told[retry].found
        channel.queue_delete(retry)
        channel.exchange_delete(retry)


def reject_one(channel: Any, queue: str) -> bool:
    method, _, _ = channel.basic_get(queue)
    if method is not None:
        channel.basic_reject(method.delivery_tag, requeue=False)
    return method is not None


def ready(channel: Any, queue: str) -> int:
    count: int = channel.queue_declare(queue, passive=True).method.message_count
    return count
