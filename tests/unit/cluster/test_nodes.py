"""What is believed of management APIs follows from how each was proved."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pika
import pytest

from sharding.amqp.addresses import connection_parameters
from sharding.cluster.management import ClusterView, Management, NoAnswer
from sharding.cluster.nodes import ClusterNodes, Proof, Timeouts
from sharding.cluster.trust import Trust
from sharding.errors import Unreachable
from sharding.maps.shard_map import Address, Node
from tests.unit.cluster.test_cluster_view import Api

SESSION: Any = SimpleNamespace(where="here:5672")


def nodes_of(*apis: Management) -> ClusterNodes:
    given = [connection_parameters("amqp://here")]
    return ClusterNodes(ClusterView(apis), given, Timeouts(1, 1), list, Trust([]))


def running(nodes: ClusterNodes, proofs: dict[Management, Proof]) -> dict[str, bool]:
    nodes._proofs = proofs
    nodes._view.believe(proofs)
    try:
        return {each.name: each.running for each in asyncio.run(nodes._seen())}
    finally:
        nodes.close()


CUT_OFF, SECOND, THIRD = Api("http://1", down="rabbit@b rabbit@c"), Api("http://2"), Api("http://3")


def test_an_api_that_sees_what_is_made_now_is_believed_bad_news() -> None:
    found = running(nodes_of(CUT_OFF, SECOND, THIRD), {CUT_OFF: Proof.QUEUE})
    assert found == {"rabbit@a": True, "rabbit@b": False, "rabbit@c": False}


@pytest.mark.parametrize("others", [[], [SECOND, THIRD]])
def test_bad_news_of_an_api_that_may_be_cut_off_with_us_is_none(others: list[Management]) -> None:
    """Found by an attack (4.3): users who may make no queue took the nodes that serve for down."""
    found = running(nodes_of(CUT_OFF, *others), {CUT_OFF: Proof.CONNECTION})
    assert all(found.values())


def test_bad_news_of_most_apis_counts_however_they_are_proved() -> None:
    apis: list[Management] = [Api(f"http://{n}", down="rabbit@c") for n in (1, 2)]
    found = running(nodes_of(*apis, THIRD), dict.fromkeys(apis, Proof.CONNECTION))
    assert found == {"rabbit@a": True, "rabbit@b": True, "rabbit@c": False}


def test_an_api_of_odd_answers_spoils_no_other() -> None:
    """Found by an attack: no client started any more."""
    odd, good = Api("http://1"), Api("http://2")
    nodes = nodes_of(odd, good)
    answers: list[Proof | BaseException | None]
    answers = [AttributeError("'list' object has no attribute 'get'"), Proof.QUEUE]
    assert nodes._judged(answers, SESSION) == {good: Proof.QUEUE}
    with pytest.raises(NoAnswer, match="answers as no management API does"):
        nodes._judged([answers[0], None], SESSION)


def test_a_stranger_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    nodes = nodes_of(Api("http://1"))
    assert nodes._judged([None], SESSION) == {}
    assert nodes._judged([None], SESSION) == {}
    assert [each.split(" is ")[0] for each in caplog.messages] == ["the management API http://1"]


def test_a_node_that_is_down_may_be_asked_where_it_listened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was asked for through others, which hold a question about its queues for a minute."""
    api, trust = Api("http://1"), Trust([])
    given = [connection_parameters("amqp://here")]
    nodes = ClusterNodes(ClusterView([api]), given, Timeouts(1, 1), list, trust)

    async def believe(_: Any) -> None:
        nodes._proofs = {api: Proof.QUEUE}
        nodes._view.believe([api])

    monkeypatch.setattr(nodes, "_prove", believe)
    for down in ("", "rabbit@b"):
        object.__setattr__(api, "down", down)
        asyncio.run(nodes.learn(SESSION))
        assert trust.allows(Address("host-b", 5672))
        assert not trust.allows(Address("host-d", 5672))
    nodes.close()


def test_a_wrong_password_is_named_and_not_taken_for_another_clusters_api() -> None:
    class Refusing(Api):
        def get(self, *path: str, timeout: float = 10) -> Any:  # noqa: ARG002
            raise NoAnswer("GET http://1: 401 Not authorised", 401)

    api = Refusing("http://1")
    nodes = nodes_of(api)
    session: Any = SimpleNamespace(where="here:5672", instance="me")
    with pytest.raises(NoAnswer, match="401"):
        asyncio.run(nodes._proof_of(api, "a queue", session))
    nodes.close()


@pytest.mark.parametrize(
    ("answers", "down"),
    [
        ({"balancer": "token-b"}, []),
        ({}, ["rabbit@a", "rabbit@b"]),
    ],
)
def test_a_node_at_whose_address_another_answers_is_not_down(
    answers: dict[str, str], down: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A balancer leads to each node in turn: those that it did not lead to were taken for down,
    and with `on_unavailable: move` their keys went elsewhere at each round."""
    at_balancer = (Address("balancer", 5672),)
    known = [Node("rabbit@a", at_balancer, "token-a"), Node("rabbit@b", at_balancer, "token-b")]
    given = [connection_parameters("amqp://balancer")]
    view = ClusterView([])
    nodes = ClusterNodes(view, given, Timeouts(1, 1), lambda: known, Trust(["balancer"]))

    async def token_at(parameters: pika.ConnectionParameters) -> tuple[str, str]:
        if str(parameters.host) not in answers:
            raise Unreachable("refused")
        return answers[str(parameters.host)], "a cluster"

    monkeypatch.setattr(nodes, "_token_at", token_at)
    found = asyncio.run(nodes.members(SESSION))
    assert [each.name for each in found if not each.running] == down
