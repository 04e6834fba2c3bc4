"""Which node a connection is on, by its peer's address."""

from __future__ import annotations

from sharding.amqp.connected_node import node_at
from sharding.maps.shard_map import Address, Node

A = Node("rabbit@a", (Address("127.0.0.1", 5672),))
B = Node("rabbit@b", (Address("127.0.0.2", 5672),))
BEHIND = [Node(f"rabbit@{name}", (Address("127.0.0.9", 5672),)) for name in "cd"]


def test_node_is_known_by_the_address_it_listens_at() -> None:
    assert node_at(("127.0.0.2", 5672), [A, B]) == "rabbit@b"
    assert node_at(("127.0.0.2", 5673), [A, B]) is None
    assert node_at(("127.0.0.2", 5672), [A, B, A, B]) == "rabbit@b", "several maps name it"


def test_address_of_several_nodes_is_a_balancers_and_says_nothing() -> None:
    """The first of them was taken: no channel behind the balancer read the others' shards."""
    assert node_at(("127.0.0.9", 5672), [A, *BEHIND]) is None
