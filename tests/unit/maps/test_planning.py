"""Which shards there should be follows from policy, members and what there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sharding import Address, Node, OnUnavailable, Policy, Shard, ShardMap, ShardName
from sharding.cluster.management import members_from
from sharding.cluster.plugin_queues import found_in
from sharding.errors import InvalidInput
from sharding.maps.planning import Member, next_map, wanted_shards

POLICY = Policy("pictures", "^images$", shards_per_node=2)


def member(host: str, running: bool = True) -> Member:
    return Member(Node(f"rabbit@{host}", (Address(host, 5672),)), running)


def shard(host: str, index: int) -> Shard:
    return Shard(str(ShardName("images", f"rabbit@{host}", index)), f"rabbit@{host}")


def map_of(members: list[Member], policy: Policy = POLICY) -> ShardMap:
    shards = wanted_shards("images", policy, members, [])
    made = next_map("images", policy, members, shards, {}, None, "images")
    assert made is not None
    return made


def test_every_running_node_gets_its_shards_in_order() -> None:
    wanted = wanted_shards("images", POLICY, [member("a"), member("b")], [])
    assert wanted == [shard("a", 0), shard("a", 1), shard("b", 0), shard("b", 1)]


def test_node_that_is_down_keeps_its_shards_and_gets_no_new_ones() -> None:
    existing = [shard("a", 0), shard("b", 0)]
    wanted = wanted_shards("images", POLICY, [member("a"), member("b", running=False)], existing)
    assert wanted == [shard("a", 0), shard("a", 1), shard("b", 0)]


def test_node_in_maintenance_mode_is_treated_as_one_that_is_down() -> None:
    drained = replace(member("b"), drained=True)
    members = [member("a"), drained]
    existing = [shard("a", 0), shard("b", 0)]
    wanted = wanted_shards("images", POLICY, members, existing)
    assert wanted == [shard("a", 0), shard("a", 1), shard("b", 0)]
    moving = replace(POLICY, on_unavailable=OnUnavailable.MOVE)
    during = next_map("images", moving, members, existing, {}, None, "images")
    assert during is not None
    assert [each.available for each in during.shards] == [True, False]
    after = next_map("images", moving, [member("a"), member("b")], existing, {}, during, "images")
    assert after is not None
    assert all(each.available for each in after.shards)


def test_maintenance_mode_is_read_from_the_management_api() -> None:
    nodes = [{"name": "rabbit@a", "running": True, "being_drained": True}]
    [drained] = members_from(nodes, [])
    assert drained.running
    assert not drained.serves
    [older] = members_from([{"name": "rabbit@a", "running": True}], [])
    assert older.serves
    assert older.drained is None


def test_where_nobody_tells_of_maintenance_mode_the_map_stays_as_it_is() -> None:
    moving = replace(POLICY, on_unavailable=OnUnavailable.MOVE)
    shards = [shard("a", 0), shard("b", 0)]
    unknown = [member("a"), replace(member("b"), drained=None)]
    plain = next_map("images", moving, unknown, shards, {}, None, "images")
    assert plain is not None
    assert all(each.available for each in plain.shards)
    drained = [member("a"), replace(member("b"), drained=True)]
    moved = next_map("images", moving, drained, shards, {}, plain, "images")
    assert moved is not None
    assert next_map("images", moving, unknown, shards, {}, moved, "images") is None
    home = next_map("images", moving, [member("a"), member("b")], shards, {}, moved, "images")
    assert home is not None
    assert all(each.available for each in home.shards)


def test_surplus_is_kept_and_what_left_the_cluster_goes() -> None:
    existing = [shard("a", 0), shard("a", 7), shard("gone", 0)]
    lowered = replace(POLICY, shards_per_node=1)
    assert wanted_shards("images", lowered, [member("a")], existing) == existing[:2]


def test_shard_that_lives_elsewhere_is_kept_where_it_is() -> None:
    moved = replace(shard("a", 0), node="rabbit@b")
    wanted = wanted_shards("images", POLICY, [member("a"), member("b")], [moved])
    assert moved in wanted


def test_same_cluster_makes_no_new_map() -> None:
    members = [member("a"), member("b")]
    current = map_of(members)
    assert next_map("images", POLICY, members, current.shards, {}, current, "images") is None


def test_shards_of_a_node_that_is_down_are_away_only_where_the_policy_moves_keys() -> None:
    down = [member("a"), member("b", running=False)]
    moving = replace(POLICY, on_unavailable=OnUnavailable.MOVE)
    for policy, away in ((POLICY, 0), (moving, 2)):
        current = map_of([member("a"), member("b")], policy)
        after = next_map("images", policy, down, current.shards, {}, current, "images") or current
        assert sum(not each.available for each in after.shards) == away


def test_keys_stay_where_no_shard_is_left_to_move_to() -> None:
    moving = replace(POLICY, on_unavailable=OnUnavailable.MOVE)
    current = map_of([member("a")], moving)
    nobody = [member("a", running=False)]
    assert next_map("images", moving, nobody, current.shards, {}, current, "images") is None


def test_node_that_is_down_keeps_the_address_and_token_that_were_known() -> None:
    current = map_of([member("a"), member("b")])
    known = next_map(
        "images",
        POLICY,
        [member("a"), member("b")],
        current.shards,
        {"rabbit@b": "reply@1"},
        current,
        "images",
    )
    assert known is not None
    silent = Member(Node("rabbit@b"), running=False)
    assert (
        next_map("images", POLICY, [member("a"), silent], known.shards, {}, known, "images") is None
    )


def test_listener_on_all_interfaces_is_reached_by_the_nodes_own_host() -> None:
    nodes: list[dict[str, Any]] = [{"name": "rabbit@b", "running": True}, {"name": "rabbit@a"}]
    listeners = [
        {"node": "rabbit@b", "protocol": "amqp", "ip_address": "::", "port": 5672},
        {"node": "rabbit@b", "protocol": "amqp/ssl", "ip_address": "10.0.0.1", "port": 5671},
        {"node": "rabbit@b", "protocol": "http", "ip_address": "::", "port": 15672},
    ]
    plain = members_from(nodes, listeners)
    assert [(each.name, each.running) for each in plain] == [
        ("rabbit@a", False),
        ("rabbit@b", True),
    ]
    assert plain[1].node.addresses == (Address("b", 5672),)
    assert members_from(nodes, listeners, tls=True)[1].node.addresses == (
        Address("10.0.0.1", 5671),
    )


def test_queues_of_the_plugin_are_found_by_their_names() -> None:
    queues = [
        {"name": shard("b", 1).name, "node": "rabbit@b", "messages": 3, "durable": True},
        {"name": shard("a", 0).name, "node": "rabbit@a", "messages": 4, "durable": True},
        {"name": "sharding: films - rabbit@a - 0", "node": "rabbit@a", "durable": True},
        {"name": "images", "node": "rabbit@a", "durable": True},
    ]
    found = found_in(queues, "images")
    assert found.shards == (shard("a", 0), shard("b", 1))
    assert (found.messages, found.shards_per_node, found.durable) == (7, 2, True)
    assert found.policy().matches("images")
    assert not found.policy().matches("images2")
    with pytest.raises(InvalidInput, match="must have queues named 'sharding: nothing"):
        found_in(queues, "nothing")
