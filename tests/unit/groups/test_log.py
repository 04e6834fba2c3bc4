"""What the application's log raises ends nothing of a group."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import pytest

from sharding.errors import Unreachable
from sharding.groups.log import logger
from sharding.groups.options import GroupOptions
from sharding.groups.queues.connections import NodeConnection
from sharding.groups.queues.worker import Membership
from tests.support.hand_time import run_without_waiting


class Raising(logging.Filter):
    records = 0

    def filter(self, _: logging.LogRecord) -> bool:
        self.records += 1
        raise AttributeError("request_id")


@pytest.fixture
def raising() -> Iterator[Raising]:
    """A filter as applications write it, for records of their own only."""
    filter_ = Raising()
    logging.getLogger("warren.groups").addFilter(filter_)
    yield filter_
    logging.getLogger("warren.groups").removeFilter(filter_)


class Away:
    """Every node, and every way to one."""

    attempts = 0

    async def open(self, _: str) -> NoReturn:
        self.attempts += 1
        raise Unreachable(f"attempt {self.attempts}")

    async def session(self) -> NoReturn:
        await self.open("")

    async def drop(self) -> None:
        pass


def node_connection(away: Any) -> NodeConnection:
    return NodeConnection(
        "rmq0", away, GroupOptions(), time.monotonic, lambda: None, lambda *_: None
    )


def membership(away: Any) -> Membership:
    def silent(*_: object) -> None:
        pass

    options = GroupOptions()
    return Membership(
        away, "images", "me", options, time.monotonic, frozenset, on_heard=silent, on_failure=silent
    )


@pytest.mark.parametrize("make", [node_connection, membership])
def test_a_connection_is_tried_again_though_the_log_raises(make: Any, raising: Raising) -> None:
    """It ended the task in silence: a node's shards were read no more, or none was ever taken."""
    away = Away()

    async def main() -> None:
        trying = asyncio.create_task(cast(Any, make(away)).run())
        while away.attempts < 5 and not trying.done():
            await asyncio.sleep(1)
        assert not trying.done()
        trying.cancel()

    run_without_waiting(main())
    assert raising.records > 0


def test_the_log_names_who_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "warren.groups"):
        logger.info("%s shards", 3)
        logger.log(logging.INFO, "none")
    assert [(each.funcName, each.getMessage()) for each in caplog.records] == [
        ("test_the_log_names_who_logs", "3 shards"),
        ("test_the_log_names_who_logs", "none"),
    ]
