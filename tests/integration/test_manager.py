"""Shards exist where they should, as the management API sees it and not as we say."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from interceptors import ShardedChannel
from sharding import Node as SeenNode
from sharding import Policy, ShardMap, ShardName, Topology
from sharding.amqp.session import Channel, Refused
from sharding.cluster.futures import TopologyFutures
from sharding.cluster.management import ClusterView
from sharding.cluster.provisioner import Forgotten, Manager, locator_policy
from sharding.errors import MissingRight
from sharding.maps.naming import unrouted
from sharding.maps.planning import Member
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.support import patient
from tests.support.sharded import (
    before_harm,
    connection_to,
    drain,
    fresh_queue,
    raw_channel,
    shards_in_broker,
    topology_of,
)

pytestmark = pytest.mark.cluster


def names(logical: str, nodes: list[Node], per_node: int) -> dict[str, str]:
    return {
        str(ShardName(logical, node.name, index)): node.name
        for node in nodes
        for index in range(per_node)
    }


def set_up(topology: Topology, logical: str, per_node: int) -> None:
    topology.set_policy(Policy.exactly(logical, per_node, name=logical))
    topology.ensure(logical)


def test_every_node_has_its_shards_bound_by_name(cluster: Cluster) -> None:
    logical = fresh_queue()
    with topology_of(cluster) as topology:
        set_up(topology, logical, 2)
        shard_map = topology.shard_map(logical)
    assert shard_map is not None
    assert shards_in_broker(cluster, logical) == names(logical, cluster.nodes, 2)
    assert {shard.name: shard.node for shard in shard_map.shards} == names(
        logical, cluster.nodes, 2
    )
    with raw_channel(cluster.nodes[0]) as channel:
        channel.confirm_delivery()
        for shard in shard_map.shards:
            channel.basic_publish(logical, shard.name, b"bound", mandatory=True)


def test_the_plugins_routing_key_is_bound_to_no_shard(cluster: Cluster) -> None:
    logical = fresh_queue()
    with topology_of(cluster) as topology:
        topology.set_policy(Policy(logical, f"^{logical}$", 1, routing_key="all"))
        topology.ensure(logical)
    with raw_channel(cluster.nodes[0]) as channel:
        channel.confirm_delivery()
        channel.basic_publish(logical, "all", b"", mandatory=True)  # was stored in every shard
        assert channel.queue_declare(unrouted(logical), passive=True).method.message_count == 1


def test_raising_adds_shards_and_lowering_keeps_them(cluster: Cluster) -> None:
    logical = fresh_queue()
    with topology_of(cluster) as topology:
        set_up(topology, logical, 2)
        set_up(topology, logical, 5)
        assert shards_in_broker(cluster, logical) == names(logical, cluster.nodes, 5)
        surplus = str(ShardName(logical, cluster.nodes[1].name, 4))
        with raw_channel(cluster.nodes[0]) as channel:
            channel.basic_publish("", surplus, b"kept")
        set_up(topology, logical, 3)
        shard_map = topology.shard_map(logical)
        assert shard_map is not None
        # As the plugin does it: nothing is deleted, and the surplus is still routed to and read.
        assert len(shard_map.shards) == 15
    assert shards_in_broker(cluster, logical) == names(logical, cluster.nodes, 5)
    assert drain(cluster.nodes[0], [surplus]) == [(surplus, surplus, b"kept")]


def test_queue_arguments_reach_the_shards(cluster: Cluster) -> None:
    logical = fresh_queue()
    arguments: dict[str, str | int] = {"x-max-length": 7, "x-overflow": "reject-publish"}
    with topology_of(cluster) as topology:
        topology.set_policy(Policy("limited", f"^{logical}$", 1, queue_arguments=arguments))
        topology.ensure(logical)
    for shard in shards_in_broker(cluster, logical):
        queue = cluster.nodes[0].management.get("queues", cluster.vhost, shard)
        assert {key: queue["arguments"][key] for key in arguments} == arguments


@pytest.fixture
def hostile(cluster: Cluster) -> Iterator[None]:
    """A policy of the broker that puts every shard on another node than asked."""
    api = cluster.nodes[0].management
    old = cluster.version.startswith("3.10")
    definition = {"queue-master-locator" if old else "queue-leader-locator": "balanced"}
    if old:
        definition = {"queue-master-locator": "min-masters"}
    body = {"pattern": "^sharding", "definition": definition, "priority": 5, "apply-to": "queues"}
    api.call("PUT", "policies", cluster.vhost, "hostile", body=body)
    yield
    api.call("DELETE", "policies", cluster.vhost, "hostile")
    for policy in api.get("policies", cluster.vhost):
        if policy["name"].startswith(locator_policy("")):
            api.call("DELETE", "policies", cluster.vhost, policy["name"])


@pytest.mark.usefixtures("hostile")
def test_shards_stay_home_under_a_hostile_locator_policy(cluster: Cluster) -> None:
    logical = fresh_queue()
    with topology_of(cluster) as topology:
        topology.set_policy(Policy.exactly(logical, 4, name=logical))
        ensured = topology.ensure(logical)
    assert shards_in_broker(cluster, logical) == names(logical, cluster.nodes, 4)
    assert any(locator_policy(logical) in note for note in ensured.notes)


@pytest.mark.usefixtures("hostile")
def test_shard_that_another_manager_has_put_into_a_map_meanwhile_is_not_deleted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that was held up took it for new still, and deleted it: what was on its way to it
    was confirmed and dropped."""
    set_policy, delete_empty = Manager._set_locator_policy, Channel.delete_empty
    is_held_up, is_in_a_map = threading.Event(), threading.Event()
    deleted: list[str] = []

    def hold_up_the_first(manager: Manager, shard: str) -> None:
        set_policy(manager, shard)
        if not is_held_up.is_set():
            is_held_up.set()
            assert is_in_a_map.wait(PATIENCE)

    async def watched(channel: Channel, queue: str) -> None:
        if is_in_a_map.is_set():
            deleted.append(queue)
        await delete_empty(channel, queue)

    monkeypatch.setattr(Manager, "_set_locator_policy", hold_up_the_first)
    monkeypatch.setattr(Channel, "delete_empty", watched)
    logical = fresh_queue()
    with topology_of(cluster) as slow, topology_of(cluster) as quick:
        quick.set_policy(Policy.exactly(logical, 2, name=logical))
        held_up = slow.futures.ensure(logical)
        assert is_held_up.wait(PATIENCE)
        shard_map = quick.ensure(logical).shard_map
        is_in_a_map.set()
        assert held_up.result(PATIENCE).shard_map.shards == shard_map.shards
    assert deleted == []
    assert shards_in_broker(cluster, logical) == {each.name: each.node for each in shard_map.shards}


@pytest.mark.usefixtures("hostile")
def test_map_tells_the_truth_where_shards_can_not_be_held(cluster: Cluster) -> None:
    api = cluster.nodes[0].management
    api.call("PUT", "users", "limited", body={"password": "limited", "tags": "monitoring"})
    rights = {"configure": ".*", "write": ".*", "read": ".*"}
    api.call("PUT", "permissions", cluster.vhost, "limited", body=rights)
    logical = fresh_queue()
    url = cluster.nodes[0].endpoint.amqp_url.replace("guest:guest", "limited:limited")
    with Topology(url, management_urls=[api.url], options=patient.TOPOLOGY) as topology:
        topology.set_policy(Policy.exactly(logical, 4, name=logical))
        ensured = topology.ensure(logical)
    api.call("DELETE", "users", "limited")
    placed = shards_in_broker(cluster, logical)
    assert {shard.name: shard.node for shard in ensured.shard_map.shards} == placed
    assert placed != names(logical, cluster.nodes, 4), "the hostile policy moved nothing"
    assert any("policymaker" in note for note in ensured.notes)
    assert not any("limited:" in note for note in ensured.notes)
    with topology_of(cluster) as topology:  # who may hold them
        again = topology.ensure(logical)
    # Found by an attack: they were deleted when empty, with what was confirmed in that moment.
    assert shards_in_broker(cluster, logical) == placed
    assert again.shard_map == ensured.shard_map
    assert any("on their way to it" in note for note in again.notes)


def test_who_may_not_append_to_the_log_is_told_so_until_he_may(cluster: Cluster) -> None:
    """Found by an attack: it was tried again for as long as a change may take, and then the outcome
    was unknown."""
    api = cluster.nodes[0].management
    api.call("PUT", "users", "reader", body={"password": "reader", "tags": ""})
    rights = {
        "configure": ".*",
        "write": "^(?!(amq[.]default|warren[.]shard-maps)$).*",
        "read": ".*",
    }
    api.call("PUT", "permissions", cluster.vhost, "reader", body=rights)
    policy, images = Policy.exactly(fresh_queue(), 1, name="reader's"), fresh_queue()
    with topology_of(cluster) as topology:
        set_up(topology, images, 1)
    url = cluster.nodes[0].endpoint.amqp_url.replace("guest:guest", "reader:reader")
    with Topology(url, options=patient.TOPOLOGY) as topology:
        with pytest.raises(MissingRight, match=r"'write' on 'warren\.shard-maps'"):
            topology.set_policy(policy)
        with pytest.raises(Refused, match=r"access to exchange 'amq\.default'"):
            topology.ensure(images)  # all nodes seemed to be down, and nothing to be amiss
        api.call("PUT", "permissions", cluster.vhost, "reader", body=rights | {"write": ".*"})
        assert topology.set_policy(policy).policies["reader's"] == policy
        topology.clear_policy("reader's")
    api.call("DELETE", "users", "reader")


def test_node_without_a_known_address_is_told_of_and_gets_its_shards_next_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a node that joins: the API calls it running seconds before it lists its listeners."""
    logical, joining = fresh_queue(), cluster.nodes[2]
    whole = ClusterView.members

    def without_its_listeners(view: ClusterView, *asked: Any) -> list[Member]:
        return [
            Member(SeenNode(each.name), each.running) if each.name == joining.name else each
            for each in whole(view, *asked)
        ]

    with topology_of(cluster) as topology:
        topology.set_policy(Policy.exactly(logical, 2, name=logical))
        monkeypatch.setattr(ClusterView, "members", without_its_listeners)
        first = topology.ensure(logical)
        assert first.notes == (
            f"{joining.name}: no address of {joining.name} is known; "
            "2 shards are not made on it yet, the next ensure makes them",
        )
        assert shards_in_broker(cluster, logical) == names(logical, cluster.nodes[:2], 2)
        monkeypatch.undo()
        assert topology.ensure(logical).notes == ()
    assert shards_in_broker(cluster, logical) == names(logical, cluster.nodes, 2)


def delete_all(cluster: Cluster, logical: str) -> None:
    with raw_channel(cluster.nodes[0]) as channel:
        channel.exchange_delete(logical)
        for shard in names(logical, cluster.nodes, 1):
            channel.queue_delete(shard)


def is_exchange(cluster: Cluster, logical: str) -> bool:
    exchanges = cluster.nodes[0].management.get("exchanges", cluster.vhost)
    return logical in {exchange["name"] for exchange in exchanges}


@pytest.mark.parametrize("step", ["_open_exchange", "_place", "_where"])
def test_what_another_forgets_in_the_middle_of_a_round_stays_forgotten(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Before one of the manager's steps another process forgets the name and deletes all of it."""
    logical = fresh_queue()
    whole = getattr(Manager, step)
    forgotten = threading.Event()
    with topology_of(cluster) as topology, topology_of(cluster) as another:
        set_up(topology, logical, 1)

        def forget() -> None:
            another.forget(logical)
            delete_all(cluster, logical)

        async def after_it_was_forgotten(manager: Manager, *given: Any, **named: Any) -> Any:
            if not forgotten.is_set():
                forgotten.set()
                await asyncio.to_thread(forget)
            return await whole(manager, *given, **named)

        monkeypatch.setattr(Manager, step, after_it_was_forgotten)
        with pytest.raises(Forgotten):
            topology.ensure(logical)
        assert forgotten.is_set()
        another.refresh(PATIENCE)
        assert another.shard_map(logical) is None
        assert not is_exchange(cluster, logical)
        assert shards_in_broker(cluster, logical) == {}
        monkeypatch.undo()
        topology.ensure(logical)  # who says so again shards it again
        assert shards_in_broker(cluster, logical) == names(logical, cluster.nodes, 1)


def test_round_that_began_before_a_name_was_forgotten_does_not_bring_it_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted([fresh_queue(), fresh_queue()])
    with topology_of(cluster) as topology, topology_of(cluster) as another:
        for logical in (first, second):
            set_up(topology, logical, 1)
        whole = TopologyFutures.ensure

        def ensure(futures: TopologyFutures, logical: str, *given: Any, **more: Any) -> Any:
            if logical == second:
                another.forget(second)
            return whole(futures, logical, *given, **more)

        monkeypatch.setattr(TopologyFutures, "ensure", ensure)
        done = {ensured.shard_map.logical for ensured in topology.ensure_all()}
        assert first in done
        assert second not in done
        assert topology.shard_map(second) is None


def test_fourth_node_has_its_shards_while_publishing_goes_on(harmed: Cluster) -> None:
    logical = fresh_queue()
    with before_harm(harmed, Policy.exactly(logical, 2, name=logical)) as (topology, _):
        before = topology.shard_map(logical)
        assert before is not None
        published: Counter[str] = Counter()
        stop = threading.Event()

        def publish() -> None:
            with connection_to(harmed.nodes[0]) as connection:
                channel = ShardedChannel(connection.channel(), topology)
                channel.confirm_delivery()
                number = 0
                while not stop.is_set():
                    key = f"user-{number % 500}"
                    channel.basic_publish(logical, key, b"%d" % number)
                    published[key] += 1
                    number += 1

        publisher = threading.Thread(target=publish)
        watcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "sharding.cli", "shards", "watch", "--interval", "1"),
                *("--url", harmed.nodes[0].endpoint.amqp_url),
                *("--management", harmed.nodes[0].management.url),
            ],
            cwd=PROJECT,
            stdout=subprocess.DEVNULL,
        )
        try:
            publisher.start()
            fourth = harmed.add_node()
            wait_until(lambda: len(shards_in_broker(harmed, logical)) == 8)
            wait_until(lambda: len(_map(topology, logical).shards) == 8)
            seen = sum(published.values())
            wait_until(lambda: sum(published.values()) > seen + 500)
        finally:
            stop.set()
            publisher.join()
            watcher.terminate()
            watcher.wait()
        after = _map(topology, logical)
        assert shards_in_broker(harmed, logical) == names(logical, harmed.nodes, 2)
        taken = drain(harmed.nodes[0], shards_in_broker(harmed, logical))
        assert Counter(key for _, key, _ in taken) == published  # nothing lost, nothing twice
        for queue, key, _ in taken:
            assert queue in {before.shard_of(key).name, after.shard_of(key).name}
        moved = {key for key in published if before.shard_of(key) != after.shard_of(key)}
        assert moved
        assert all(after.shard_of(key).node == fourth.name for key in moved)


def _map(topology: Topology, logical: str) -> ShardMap:
    shard_map = topology.shard_map(logical)
    assert shard_map is not None
    return shard_map


def test_node_that_leaves_takes_only_its_own_shards(harmed: Cluster) -> None:
    logical = fresh_queue()
    with before_harm(harmed, Policy.exactly(logical, 2, name=logical)) as (topology, _):
        # With the queue of unrouted messages, which may be missing for a while.
        kept = harmed.nodes[0].management.get("queues", harmed.vhost, unrouted(logical))
        leaver = next(node for node in harmed if node.name == kept["node"])
        leaver.stop()
        # Merely down: it keeps its place.
        wait_until(lambda: leaver.name in topology._plane.down_nodes)
        ensured = topology.ensure(logical)
        assert len(ensured.shard_map.shards) == 6
        assert any(unrouted(logical) in note for note in ensured.notes)
        leaver.restart()
        harmed.remove_node(leaver)
        left = topology.ensure(logical).shard_map
        assert {shard.node for shard in left.shards} == {node.name for node in harmed}
        assert shards_in_broker(harmed, logical) == names(logical, harmed.nodes, 2)
