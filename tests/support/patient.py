"""Clients that a slow machine does not make fail: where nothing is broken, no deadline ends.

The product's defaults are for applications that want to know soon. A test that asks what a healthy
cluster does must not read a broker that was held up for some seconds as one that is away.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pika
import pytest

from sharding.cluster.topology import TopologyOptions
from sharding.groups import GroupOptions, StreamGroupOptions
from sharding.groups.handling.threads import HandlerThreads
from sharding.stream.options import RouteOptions
from tests.cluster.waiting import PATIENCE

TOPOLOGY = TopologyOptions(
    connect_timeout=PATIENCE,
    answer_timeout=PATIENCE,
    management_timeout=PATIENCE,
    start_timeout=PATIENCE,
    change_timeout=PATIENCE,
    max_staleness=4 * PATIENCE,
)

_GROUP: dict[str, Any] = {
    "connect_timeout": PATIENCE,
    "answer_timeout": PATIENCE,
    "stop_timeout": PATIENCE,
    # A worker that was held up for two of these has lost its shards, and others repeat its work.
    "heartbeat": round(PATIENCE),
}

STREAMS: dict[str, Any] = {
    "connect_timeout": PATIENCE,
    "request_timeout": PATIENCE,
    "routes": RouteOptions(query_timeout=PATIENCE),
}
"""Options of a `StreamEnvironment`."""

READER: dict[str, Any] = {"subscribe_timeout": PATIENCE}
"""Options of a stream's consumer."""


def group(**options: Any) -> GroupOptions:
    return GroupOptions(**_GROUP | options)


def stream_group(**options: Any) -> StreamGroupOptions:
    return StreamGroupOptions(**_GROUP | {"handover_timeout": 50.0} | options)


class StandingClock:
    """The time of a group's runner, which passes only when the test says so.

    Else a short `handler_timeout` would also end on handlers that the machine held up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
        self._now = time.monotonic()
        standing = partial(HandlerThreads, clock=lambda: self._now)
        monkeypatch.setattr(f"sharding.groups.{module}.HandlerThreads", standing)

    def advance(self, seconds: float) -> None:
        self._now += seconds


def parameters(url: str) -> pika.URLParameters:
    """For pika, which else gives up a connection that is not open after 15 s."""
    chosen = pika.URLParameters(url)
    chosen.socket_timeout = chosen.stack_timeout = PATIENCE
    return chosen
