"""Who is a node follows from tokens, and from what most management APIs say."""

from __future__ import annotations

from itertools import permutations

import pytest

from sharding import Address, Node
from sharding.maps.membership import known_as, names_of, voted
from sharding.maps.naming import name_for, token_of_node
from sharding.maps.planning import Member

# As nodes of 3.10.8 and 4.0.5 gave them out.
TOKENS = {
    "rmq1@127.0.1.1": "reply@106439121",
    "rmq2@127.0.1.2": "reply@106242514",
    "rmq3@127.0.1.3": "reply@106308051",
    "rmq1@127.0.4.1": "reply@106440401",
    "rmq2@127.0.4.2": "reply@106243794",
    "rmq3@127.0.3.3": "reply@106309587",
}


def node(name: str, token: str | None = None, address: str = "") -> Node:
    return Node(name, (Address(address, 5672),) if address else (), token)


def member(name: str, running: bool = True, address: str = "") -> Member:
    return Member(node(name, token_of_node(name), address), running)


@pytest.mark.parametrize("name", TOKENS)
def test_token_is_the_hash_that_the_node_gives_out(name: str) -> None:
    assert token_of_node(name) == TOKENS[name]


def test_node_is_called_by_its_true_name_if_that_can_be_guessed() -> None:
    token = token_of_node("rabbit@b")
    assert name_for(token, "b", "rabbit@a") == "rabbit@b"
    assert name_for(token, "b", "production") == "rabbit@b"
    assert name_for(token_of_node("warren@b"), "b", "warren@a") == "warren@b"
    assert name_for(token_of_node("warren@a"), "10.0.0.1", "warren@a") == "warren@a"


def test_node_whose_name_can_not_be_guessed_has_one_that_no_other_gets() -> None:
    names = {name_for(token, "balancer", "production") for token in TOKENS.values()}
    assert names == {f"node-{token.removeprefix('reply@')}@balancer" for token in TOKENS.values()}


def test_node_may_truly_be_called_as_we_call_nodes_without_a_name() -> None:
    true = member("node-1@host")
    assert known_as([true], [Node("node-1@host")]) == [true]
    assert true.node.reply_token != "reply@1"


def test_node_keeps_the_name_that_maps_have_for_it() -> None:
    true = "rmq1@127.0.1.1"
    invented = node("node-1@host", TOKENS[true])
    (found,) = known_as([member(true, address="a")], [invented])
    assert (found.name, found.node.reply_token) == ("node-1@host", TOKENS[true])
    assert found.node.addresses == (Address("a", 5672),)
    assert known_as([member(true)], [node(true), invented])[0].name == true
    assert known_as([member(true)], [invented, node(true)])[0].name == "node-1@host"
    assert known_as([member(true)], [node("rabbit@b")])[0].name == true


def test_nodes_with_one_hash_are_told_apart_by_their_names() -> None:
    first, second = Node("rabbit@a", (), "reply@1"), Node("rabbit@b", (), "reply@1")
    found = known_as([Member(first, True), Member(second, True)], [first, second])
    assert [each.name for each in found] == ["rabbit@a", "rabbit@b"]


def test_what_is_down_is_down_under_all_of_its_names() -> None:
    true = "rmq1@127.0.1.1"
    invented = node("node-1@host", TOKENS[true])
    assert names_of([member(true)], [invented, node("rabbit@b")]) == {true, "node-1@host"}


def test_node_that_is_cut_off_is_down_whatever_it_says_of_the_others() -> None:
    a, b, c = "rabbit@a", "rabbit@b", "rabbit@c"
    healthy = [member(a), member(b), member(c, running=False)]
    cut_off = [member(a, running=False), member(b, running=False), member(c)]
    for reports in permutations([healthy, healthy, cut_off]):
        assert {each.name: each.running for each in voted(reports)} == {a: True, b: True, c: False}


def test_on_a_tie_a_node_is_there_and_runs() -> None:
    reports = [
        [member("rabbit@a"), member("rabbit@b", running=False)],
        [member("rabbit@a", running=False), member("rabbit@b")],
    ]
    assert all(each.running for each in voted(reports))
    assert [
        each.name
        for each in voted([[member("rabbit@a")], [member("rabbit@a"), member("rabbit@b")]])
    ] == ["rabbit@a", "rabbit@b"]


def test_node_has_left_when_most_do_not_know_it() -> None:
    reports = [[member("rabbit@a")], [member("rabbit@a")], [member("rabbit@a"), member("rabbit@b")]]
    assert [each.name for each in voted(reports)] == ["rabbit@a"]


def test_addresses_are_taken_from_who_knows_them() -> None:
    (found,) = voted([[member("rabbit@a")], [member("rabbit@a", address="host")]])
    assert found.node.addresses == (Address("host", 5672),)
