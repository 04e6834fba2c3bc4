"""Both kinds of queue group, driven alike from a test's own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sharding import Topology
from sharding.groups import AioConsumerGroup, ConsumerGroup, Delivery, GroupOptions
from tests.cluster.waiting import PATIENCE

Group = ConsumerGroup | AioConsumerGroup
Handler = Callable[[Delivery], Any]

KINDS = pytest.mark.parametrize("kind", ["threads", "tasks"])


@contextmanager
def running_group(
    kind: str, topology: Topology, logical: str, handler: Handler, options: GroupOptions
) -> Iterator[Group]:
    """A worker, stopped in order at the end; one of tasks has a loop in a thread of its own."""
    if kind == "threads":
        with ConsumerGroup(topology, logical, handler, options=options) as group:
            yield group
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(2 * PATIENCE)

    try:
        made = AioConsumerGroup(topology, logical, handler, options=options)
        run(made.start())
        try:
            yield made
        finally:
            run(made.stop())
        assert made.failure is None
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


def handler_of(kind: str, handle: Handler) -> Handler:
    """What a group of this kind is given: for tasks a coroutine function that does the same."""

    async def awaited(delivery: Delivery) -> None:
        handle(delivery)

    return awaited if kind == "tasks" else handle
