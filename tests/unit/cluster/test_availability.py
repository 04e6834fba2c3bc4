"""One connection for all questions to a node, and no more of them than tell something new."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sharding.amqp.session import Refused
from sharding.cluster.availability import AwayShards, _Line
from sharding.errors import Unreachable
from sharding.maps.shard_map import Node
from tests.cluster.waiting import PATIENCE
from tests.support.hand_time import run_without_waiting
from tests.support.maps import queue_map

pytestmark = pytest.mark.timeout(PATIENCE)


class FakeSession:
    """A connection, and whether it is open; `silent` queues are not answered for."""

    def __init__(self) -> None:
        self.is_open = True
        self.asked: list[str] = []
        self.silent: set[str] = set()
        self.missing: set[str] = set()

    async def channel(self) -> Any:
        return SimpleNamespace(declare=self._declare, close=lambda: None)

    async def _declare(self, queue: str, *, passive: bool) -> None:
        assert passive
        self.asked.append(queue)
        if queue in self.missing:
            raise Refused(404, f"no queue {queue!r}")
        while queue in self.silent:
            await asyncio.sleep(0.001)

    async def close(self, _timeout: float) -> None:
        self.is_open = False


class FakePlane:
    """Opens a session, or fails with what it is told to, when it may."""

    def __init__(self) -> None:
        self.options = SimpleNamespace(probe_interval=PATIENCE, answer_timeout=PATIENCE)
        self.log = SimpleNamespace(state=SimpleNamespace(maps={}))
        self.has_log = True
        self.may_open = asyncio.Event()
        self.failure: Exception | None = None
        self.opened: list[FakeSession] = []
        self.tries = 0

    async def open_at(self, node: Node) -> FakeSession:
        assert node.name in {"rabbit@rmq0", "rabbit@a"}
        self.tries += 1
        await self.may_open.wait()
        if self.failure is not None:
            raise self.failure
        self.opened.append(FakeSession())
        return self.opened[-1]

    def has_reached(self, _: Node) -> bool:
        return True

    @property
    def asked(self) -> list[str]:
        return [queue for session in self.opened for queue in session.asked]


def line_of(plane: FakePlane) -> _Line:
    line = _Line(plane)  # type: ignore[arg-type]
    line.node = Node("rabbit@rmq0")
    return line


def test_all_questions_wait_for_one_connection() -> None:
    async def run() -> None:
        plane = FakePlane()
        line = line_of(plane)
        asking = [asyncio.create_task(line.ask_for(f"q{number}")) for number in range(30)]
        await asyncio.sleep(0)
        plane.may_open.set()
        await asyncio.gather(*asking)
        await line.ask_for("later")
        assert plane.tries == 1
        await line.hang_up()
        assert not plane.opened[0].is_open

    asyncio.run(run())


def test_a_node_that_refuses_is_tried_once_for_all() -> None:
    async def run() -> None:
        plane = FakePlane()
        plane.failure = Unreachable("refused")
        plane.may_open.set()
        line = line_of(plane)
        for _ in range(2):
            asking = (line.ask_for(f"q{number}") for number in range(30))
            told = await asyncio.gather(*asking, return_exceptions=True)
            assert {str(each) for each in told} == {"refused"}
        assert plane.tries == 1
        await line.hang_up()

    asyncio.run(run())


@pytest.mark.parametrize("opens", ["before", "after", "never"])
def test_a_connection_that_nobody_waits_for_any_more_is_closed(opens: str) -> None:
    async def run() -> None:
        plane = FakePlane()
        line = line_of(plane)
        asking = asyncio.create_task(line.ask_for("q"))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        if opens == "before":
            plane.may_open.set()
            while not plane.opened:
                await asyncio.sleep(0)
        hanging_up = asyncio.create_task(line.hang_up())
        if opens == "after":
            plane.may_open.set()
        await hanging_up
        assert not any(session.is_open for session in plane.opened)
        assert len(plane.opened) == (opens == "before")

    asyncio.run(run())


def test_who_is_answered_is_not_disturbed_by_who_is_not() -> None:
    async def run() -> None:
        plane = FakePlane()
        plane.may_open.set()
        line = line_of(plane)
        await line.ask_for("there")
        (first,) = plane.opened
        first.silent = {"hangs", "slow"}
        slow = asyncio.create_task(line.ask_for("slow"))
        hangs = asyncio.create_task(line.ask_for("hangs"))
        await asyncio.sleep(0.01)
        hangs.cancel()
        await asyncio.wait([hangs])
        await line.ask_for("there")  # over another connection
        assert (plane.tries, first.is_open) == (2, True)
        first.silent = set()
        await slow
        assert not first.is_open
        await line.hang_up()

    asyncio.run(run())


def test_an_answer_that_a_queue_is_missing_ends_no_connection() -> None:
    async def run() -> None:
        plane = FakePlane()
        plane.may_open.set()
        line = line_of(plane)
        await line.ask_for("there")
        plane.opened[0].missing = {"gone"}
        for _ in range(3):
            with pytest.raises(Refused):
                await line.ask_for("gone")
        await line.ask_for("there")
        assert plane.tries == 1
        await line.hang_up()

    asyncio.run(run())


ONE = queue_map("a")
(SHARD,) = ONE.shards


def shards_of(plane: FakePlane) -> AwayShards:
    return AwayShards(plane)  # type: ignore[arg-type]


def test_a_shard_that_nacks_but_answers_is_asked_once_in_an_interval_over_one_connection() -> None:
    """It is full, say: each nack makes it suspect, a thousand times a second."""

    async def run() -> None:
        plane = FakePlane()
        plane.options.probe_interval = 1.0
        plane.log.state.maps["images"] = ONE
        plane.may_open.set()
        away = shards_of(plane)
        for _ in range(5_500):
            away.suspect(SHARD, ONE)
            await asyncio.sleep(0.001)
        assert SHARD.name not in away
        assert plane.asked == [SHARD.name] * 6
        assert plane.tries == 1
        await asyncio.sleep(10)
        assert plane.asked == [SHARD.name] * 7  # the last nack came after the question before
        assert not away._lines
        assert not plane.opened[0].is_open
        away.suspect(SHARD, ONE)
        await asyncio.sleep(0.1)
        await away.stop()
        assert not plane.opened[1].is_open

    run_without_waiting(run())


def test_a_shard_that_falls_right_after_its_answer_is_away_an_interval_later() -> None:
    async def run() -> None:
        plane = FakePlane()
        plane.options.probe_interval = 1.0
        plane.log.state.maps["images"] = ONE
        plane.may_open.set()
        away = shards_of(plane)
        away.suspect(SHARD, ONE)
        await asyncio.sleep(0.1)
        plane.opened[0].missing.add(SHARD.name)
        away.suspect(SHARD, ONE)
        await asyncio.sleep(0.8)
        assert SHARD.name not in away
        await asyncio.sleep(0.2)
        assert SHARD.name in away
        await away.stop()

    run_without_waiting(run())


@pytest.mark.parametrize("has_log", [True, False])
def test_a_name_that_was_forgotten_is_asked_for_no_more(has_log: bool) -> None:
    async def run() -> None:
        plane = FakePlane()
        plane.has_log = has_log
        plane.options.probe_interval = 1.0
        plane.failure = Unreachable("refused")
        plane.may_open.set()
        if has_log:  # fixed maps are in no log
            plane.log.state.maps["images"] = ONE
        away = shards_of(plane)
        away.suspect(SHARD, ONE)
        await asyncio.sleep(5)
        assert SHARD.name in away
        plane.log.state.maps.clear()
        await asyncio.sleep(5)
        assert (SHARD.name in away) is not has_log
        await away.stop()

    run_without_waiting(run())
