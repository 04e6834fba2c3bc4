"""Real nodes, killed, frozen, cut off, added and removed, on the default and the oldest version."""

from __future__ import annotations

import pika
import pytest

from sharding.cluster.management import NoAnswer
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.cluster import members_seen
from tests.cluster.nodes import answers_tcp, serves

pytestmark = pytest.mark.cluster


def publish(node: Node, queue: str, body: bytes) -> None:
    with pika.BlockingConnection(pika.URLParameters(node.endpoint.amqp_url)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))


def take(node: Node, queue: str) -> bytes | None:
    with pika.BlockingConnection(pika.URLParameters(node.endpoint.amqp_url)) as connection:
        body: bytes | None = connection.channel().basic_get(queue, auto_ack=True)[2]
        return body


def names_of_members(node: Node) -> set[str]:
    """The running members as the node sees them, however long it takes to say so."""
    return {each["name"] for each in node.management.get("nodes") if each.get("running")}


def test_started_means_every_node_serves_and_all_agree(nodes: Cluster, any_version: str) -> None:
    names = {node.name for node in nodes}
    assert len(names) == 3
    assert len({node.endpoint.address for node in nodes}) == 3
    for node in nodes:
        wait_until(lambda node=node: serves(node.endpoint))  # type: ignore[misc]
        assert names_of_members(node) == names
        assert node.management.get("overview")["rabbitmq_version"].startswith(f"{any_version}.")
        publish(node, "hello", b"from " + node.name.encode())
    assert {take(nodes.nodes[0], "hello") for _ in nodes} == {
        b"from " + name.encode() for name in names
    }


def test_killed_node_is_gone_at_once_and_comes_back_with_its_data(harmed: Cluster) -> None:
    victim = harmed.nodes[1]
    publish(victim, "kept", b"over kill -9")
    victim.kill()
    assert not victim.driver.running()
    assert not answers_tcp(victim.endpoint.address, victim.endpoint.ports["amqp"])
    assert victim not in harmed.running_nodes()
    wait_until(lambda: victim.name not in members_seen(harmed.nodes[0].management))
    victim.restart()
    assert take(victim, "kept") == b"over kill -9"


def test_stopped_node_comes_back_with_its_data(harmed: Cluster) -> None:
    victim = harmed.nodes[2]
    publish(victim, "kept", b"over a stop")
    victim.stop()
    assert not victim.driver.running()
    victim.restart()
    assert take(victim, "kept") == b"over a stop"


def test_frozen_node_keeps_its_listeners_but_answers_nothing(harmed: Cluster) -> None:
    victim = harmed.nodes[0]
    victim.freeze()
    try:
        # The kernel still accepts; nobody behind it speaks.
        assert answers_tcp(victim.endpoint.address, victim.endpoint.ports["amqp"])
        assert not serves(victim.endpoint)
        with pytest.raises(NoAnswer):
            victim.management.get("overview", timeout=1)
    finally:
        victim.thaw()
    harmed.wait_until_whole()
    wait_until(lambda: serves(victim.endpoint))


def test_node_that_is_added_joins_and_one_that_leaves_is_forgotten(harmed: Cluster) -> None:
    before = {node.name for node in harmed}
    fourth = harmed.add_node()
    assert fourth.name not in before
    for node in harmed:
        assert names_of_members(node) == before | {fourth.name}
    publish(fourth, "at-the-fourth", b"x")
    assert take(harmed.nodes[0], "at-the-fourth") == b"x"

    harmed.remove_node(fourth)
    assert not fourth.driver.running()
    for node in harmed:
        known = {entry["name"] for entry in node.management.get("nodes")}
        assert known == before  # forgotten, not merely down


def test_node_cut_off_is_unseen_by_the_others_until_healed(harmed: Cluster) -> None:
    victim, *others = harmed.nodes
    victim.cut_off()
    assert victim.driver.running()
    for other in others:
        assert names_of_members(other) == {node.name for node in others}
    # Cut means cut: the others can't call it back.
    harmed.nodes[1].driver.ctl("eval", f"net_adm:ping('{victim.name}').")
    assert victim.name not in names_of_members(harmed.nodes[1])
    victim.heal()
    for node in harmed:
        assert names_of_members(node) == {node.name for node in harmed}
        assert not any(entry.get("partitions") for entry in node.management.get("nodes"))
