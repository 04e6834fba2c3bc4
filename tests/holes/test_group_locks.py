"""One worker at a time reads a shard, whatever becomes of its queue, its name or its loop."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from typing import Any

import pytest

from sharding import Policy, Topology
from sharding.groups import AioConsumerGroup, ConsumerGroup, Delivery
from sharding.groups.queues.shard_reader import NotLockable
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.sharded import keys_of, make_sharded, publish_all, raw_channel

pytestmark = pytest.mark.cluster


def test_a_shard_made_again_as_a_queue_without_locks_ends_its_worker(
    cluster: Cluster, topology: Topology
) -> None:
    """A worker tried the lock of each shard once in its life. A shard that somebody deleted and
    made again as a quorum queue was read on, and nothing kept a second worker out."""
    shard_map = make_sharded(topology)
    shard = shard_map.shards[0].name
    group = ConsumerGroup(topology, shard_map.logical, print, options=patient.group())
    group.start()
    try:
        wait_until(lambda: len(group.shards) == len(shard_map.shards))
        with raw_channel(cluster.nodes[0]) as channel:
            channel.queue_delete(shard)
            channel.queue_declare(shard, durable=True, arguments={"x-queue-type": "quorum"})
        wait_until(lambda: group.failure is not None)
        assert isinstance(group.failure, NotLockable)
    finally:
        group.stop()


def test_shards_with_long_names_are_read(topology: Topology) -> None:
    """The broker says who has a lock in 255 bytes, and of a long name cuts off the end. The group
    took that for a right that is missing, and stopped."""
    logical = f"{secrets.token_hex(3)}-{'x' * 190}"
    topology.set_policy(Policy("long", f"^{logical}$", 1))
    topology.ensure(logical)
    handled: list[bytes] = []
    options = patient.group()
    with ConsumerGroup(topology, logical, lambda it: handled.append(it.body), options=options):
        publish_all(topology, logical, [(f"user-{n}", b"%d" % n) for n in range(20)])
        wait_until(lambda: len(handled) == 20)


class StandingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while callbacks run, as uvloop's does."""

    _seen = time.monotonic()

    def time(self) -> float:
        return self._seen

    def _run_once(self) -> None:
        self._seen = time.monotonic()
        super()._run_once()  # type: ignore[misc]  # private


@pytest.mark.parametrize("kind", [asyncio.SelectorEventLoop, StandingLoop])
def test_a_worker_whose_loop_was_blocked_begins_nothing_that_others_have_handled(
    topology: Topology, kind: type[asyncio.AbstractEventLoop]
) -> None:
    """Handlers were begun in time, as tasks, and ran when the loop came to them: after somebody had
    blocked it until the broker gave the shard to another worker."""
    shard_map = make_sharded(topology)
    keys = keys_of(shard_map, shard_map.shards[0].name)
    publish_all(topology, shard_map.logical, [(next(keys), b"blocks"), (next(keys), b"waits")])
    blocked, let_go = threading.Event(), threading.Event()
    begun: list[bytes] = []
    handled_by_other: set[bytes] = set()

    async def handle(delivery: Delivery) -> None:
        begun.append(delivery.body)
        if delivery.body == b"blocks":
            blocked.set()
            let_go.wait(2 * PATIENCE)

    loop = kind()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(2 * PATIENCE)

    async def make() -> AioConsumerGroup:
        # The broker gives it up after two to three seconds of silence.
        options = patient.group(heartbeat=1, parallelism=2)
        group = AioConsumerGroup(topology, shard_map.logical, handle, options=options)
        await group.start()
        return group

    group = run(make())
    try:
        assert blocked.wait(PATIENCE)
        other = ConsumerGroup(
            topology,
            shard_map.logical,
            lambda delivery: handled_by_other.add(delivery.body),
            options=patient.group(),
        )
        with other:
            wait_until(lambda: handled_by_other == {b"blocks", b"waits"})
            wait_until(lambda: other.counters["in_hand"] == 0)
            let_go.set()
            wait_until(lambda: group.counters["lost"] > 0)
        assert begun == [b"blocks"]
    finally:
        let_go.set()
        run(group.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()
