"""A shard that a broker policy has put on another node than its own, while that node is down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from sharding import Node, Policy, Shard, ShardMap, ShardName, TopologyOptions, Unreachable
from sharding.amqp.session import Declared, Refused
from sharding.cluster.provisioner import Ensured, Manager
from sharding.maps.map_log import State
from sharding.maps.naming import refusing, token_of_node
from sharding.maps.planning import Member
from sharding.maps.policy import OnUnavailable
from tests.support.hand_time import run_without_waiting

HERE, DOWN = "rabbit@a", "rabbit@b"
NODES = tuple(Node(name, (), token_of_node(name)) for name in (HERE, DOWN))
POLICY = Policy("images", "^images$", shards_per_node=20, on_unavailable=OnUnavailable.MOVE)
HELD = 64.0
"""Seconds for which RabbitMQ holds a question about a queue whose node is down."""


def name_of(home: str, index: int) -> str:
    return str(ShardName("images", home, index))


class Broker:
    """The node that runs; what it knows to be on the other one it does not answer for."""

    def __init__(self, *away: str) -> None:
        self.away = set(away)
        self.refusal: str | None = None
        self.hangs_at = "declare"
        self.asked: list[str] = []
        self.where = HERE

    async def _ask(self, step: str, queue: str) -> Declared:
        if queue in self.away and step == self.hangs_at:
            self.asked.append(queue)
            if self.refusal is not None:
                raise Refused(404, self.refusal)
            await asyncio.sleep(HELD)
        return Declared(queue, 0, 0)

    async def channel(self) -> Any:
        async def answer(*_: Any, **__: Any) -> None: ...

        return SimpleNamespace(
            declare=lambda queue, **_: self._ask("declare", queue),
            bind=lambda queue, *_: self._ask("bind", queue),
            declare_exchange=answer,
            bind_exchange=answer,
            close=lambda: None,
        )

    async def reply_token(self) -> str:
        return token_of_node(HERE)

    async def close(self) -> None: ...


class Plane:
    """Without a management API, so that the map's word is all there is about where shards are."""

    options = TopologyOptions()
    view = None

    def __init__(self, broker: Broker, *shards: Shard) -> None:
        self._broker = broker
        known = ShardMap("images", 1, shards, NODES, POLICY)
        self.log = SimpleNamespace(state=State(1, {"images": POLICY}, {"images": known}))

    def known_nodes(self) -> list[Node]:
        return list(NODES)

    async def members(self) -> list[Member]:
        return [Member(NODES[0], running=True), Member(NODES[1], running=False)]

    async def connected(self) -> Broker:
        return self._broker

    async def open_at(self, node: Node) -> Broker:
        assert node.name == HERE
        return self._broker

    async def refresh(self) -> None: ...

    async def change(self, step: Callable[[State], Coroutine[Any, Any, State | None]]) -> State:
        async with asyncio.timeout(self.options.change_timeout):
            state: State = self.log.state
            return await step(state) or state


def ensured(plane: Plane) -> Ensured:
    result: list[Ensured] = []

    async def run() -> None:
        manager = Manager(plane, "/")  # type: ignore[arg-type]
        result.append(await manager.ensure("images"))

    run_without_waiting(run())
    return result[0]


def shards(misplaced: int) -> list[Shard]:
    """All that there should be; so many of those that belong here are on the node that is down."""
    return [
        *(Shard(name_of(HERE, i), DOWN if i < misplaced else HERE) for i in range(20)),
        Shard(name_of(DOWN, 0), DOWN),
    ]


@pytest.mark.parametrize("step", ["declare", "bind"])
@pytest.mark.parametrize(
    "refusal",
    [
        None,
        "NOT_FOUND - failed to perform operation on queue 'q' in vhost '/' due to timeout",
        "NOT_FOUND - home node 'b' of durable queue 'q' in vhost '/' is down or inaccessible",
    ],
    ids=["silence", "timeout", "down"],
)
def test_keys_of_shards_that_are_elsewhere_and_away_move(step: str, refusal: str | None) -> None:
    misplaced = [name_of(HERE, index) for index in range(18)]
    broker = Broker(*misplaced)
    broker.hangs_at, broker.refusal = step, refusal
    found = ensured(Plane(broker, *shards(18)))
    away = {each.name for each in found.shard_map.shards if not each.available}
    assert away == {*misplaced, name_of(DOWN, 0)}
    assert {each.node for each in found.shard_map.shards if each.name in away} == {DOWN}
    assert all(any(repr(name) in note for note in found.notes) for name in misplaced)
    assert broker.asked == misplaced[:1]  # the others are left as they are for the same reason


def test_a_queue_that_takes_nothing_and_is_away_holds_up_no_shard() -> None:
    found = ensured(Plane(Broker(refusing(HERE)), *shards(0)))
    away = [each.name for each in found.shard_map.shards if not each.available]
    assert away == [name_of(DOWN, 0)]


def test_a_new_shard_that_does_not_answer_is_told() -> None:
    broker = Broker(name_of(HERE, 0))
    with pytest.raises(Unreachable, match="can't be made: no answer in time"):
        ensured(Plane(broker, *shards(0)[1:]))


def test_a_refusal_that_says_nothing_of_a_node_is_raised() -> None:
    broker = Broker(name_of(HERE, 0))
    broker.hangs_at, broker.refusal = "bind", "NOT_FOUND - no exchange 'images.shards' in vhost '/'"
    with pytest.raises(Refused, match="no exchange"):
        ensured(Plane(broker, *shards(1)))
