"""Whatever a handler does, its message is acknowledged, retried or a dead letter; no thread dies,
and no key is stuck."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sharding import ShardMap, Topology
from sharding.groups import ConsumerGroup, Delivery, Retry
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.groups import KINDS, handler_of, running_group
from tests.support.sharded import (
    keys_of,
    make_sharded,
    messages_in,
    publish_all,
)

pytestmark = pytest.mark.cluster

QUICK = Retry(attempts=2, first_delay=0.01)


class OrderFailed(Exception):
    def __str__(self) -> str:
        raise AttributeError("order_id")


def unspeakable() -> None:
    raise OrderFailed


def leave() -> None:
    sys.exit("bad input")


@KINDS
@pytest.mark.parametrize("fail", [unspeakable, leave])
def test_what_a_handler_raises_ends_no_worker(
    cluster: Cluster, topology: Topology, fail: Callable[[], None], kind: str
) -> None:
    """q01 and q33. An error whose text can't be had ended the thread of handlers: 0 of 50 other
    messages were handled, the shards stayed held, nothing was said; on a loop its key was stuck for
    good. `sys.exit` in an asynchronous handler ended the application's loop, and that of the next
    worker too, without a dead letter."""
    logical = make_sharded(topology).logical
    handled: list[bytes] = []

    def handle(delivery: Delivery) -> None:
        if delivery.body == b"bad":
            fail()
        handled.append(delivery.body)

    publish_all(topology, logical, [("key", b"bad"), ("key", b"next of its key")])
    options = patient.group(retry=QUICK)
    with running_group(kind, topology, logical, handler_of(kind, handle), options) as group:
        wait_until(lambda: group.counters["failed"])  # so that others come after it
        publish_all(topology, logical, [(f"other-{n}", b"%d" % n) for n in range(50)])
        wait_until(lambda: len(handled) == 51, explain=lambda: str(group.counters))
        wait_until(lambda: group.counters["dead_lettered"] == 1)
        assert group.healthy
    assert messages_in(cluster.nodes[0], f"{logical}.dead") == 1


# q08: "its key waits, other keys go on" held only until `prefetch` messages of the waiting key were
# in hand; then the whole shard stood, and nothing said so. That is so still, and the guide says so
# ("A key that fails again and again", docs/groups.md): the verdict here is that of the guide.

FEW = 10
"""`prefetch` of these groups."""


class OneShard:
    """Messages of two keys of one shard; the handler fails for the first as long as `fails`."""

    def __init__(self, shard_map: ShardMap) -> None:
        keys = keys_of(shard_map, shard_map.shards[0].name)
        self.poison, self.other = next(keys), next(keys)
        self.elsewhere = next(keys_of(shard_map, shard_map.shards[1].name))
        self.fails = True
        self.handled: dict[str, int] = {self.poison: 0, self.other: 0, self.elsewhere: 0}

    def messages(self, poisonous: int) -> list[tuple[str, bytes]]:
        return [(self.poison, b"poison")] * poisonous + [(self.other, b"other")] * 20

    def __call__(self, delivery: Delivery) -> None:
        if delivery.key == self.poison and self.fails:
            raise ValueError("never")
        self.handled[delivery.key] += 1


Start = Callable[..., tuple[OneShard, ConsumerGroup]]


@pytest.fixture
def start(topology: Topology) -> Iterator[Start]:
    """Begins a group over a queue that holds so many poisonous messages, and 20 others behind."""
    begun: list[ConsumerGroup] = []

    def start(poisonous: int, **options: Any) -> tuple[OneShard, ConsumerGroup]:
        shard_map = make_sharded(topology)
        keys = OneShard(shard_map)
        publish_all(topology, shard_map.logical, keys.messages(poisonous))
        chosen = patient.group(prefetch=FEW, **options)
        group = ConsumerGroup(topology, shard_map.logical, keys, options=chosen)
        begun.append(group)
        group.start()
        return keys, group

    yield start
    for group in begun:
        assert group.stop()


def test_other_keys_go_on_while_a_key_waits_as_far_as_prefetch_reaches(start: Start) -> None:
    """q08, 99 messages of the waiting key with `prefetch` 100."""
    keys, group = start(FEW - 1, retry=Retry(first_delay=10 * PATIENCE, max_delay=10 * PATIENCE))
    wait_until(lambda: keys.handled[keys.other] == 20, explain=lambda: str(group.counters))
    assert group.counters["dead_lettered"] == 0


def test_other_keys_go_on_when_poison_has_become_dead_letters(start: Start) -> None:
    """q08, 300 messages of the waiting key."""
    keys, group = start(3 * FEW, retry=QUICK)
    wait_until(lambda: keys.handled[keys.other] == 20, explain=lambda: str(group.counters))
    wait_until(lambda: group.counters["dead_lettered"] == 3 * FEW)


def test_without_dead_letters_a_shard_stands_until_the_handler_succeeds_and_no_other_does(
    topology: Topology, start: Start
) -> None:
    """q08, `dead_letter=None`. It is seen by what the guide names: `in_hand` stays, `retried`
    grows, `handled` does not."""
    keys, group = start(FEW, retry=Retry(first_delay=0.01, max_delay=0.01), dead_letter=None)
    wait_until(lambda: group.counters["retried"] > 2 * FEW)
    assert group.counters["in_hand"] == FEW
    assert group.counters["handled"] == keys.handled[keys.other] == 0
    publish_all(topology, group.logical, [(keys.elsewhere, b"another shard's")])
    wait_until(lambda: keys.handled[keys.elsewhere] == 1)
    assert keys.handled[keys.other] == 0
    keys.fails = False
    wait_until(lambda: keys.handled == {keys.poison: FEW, keys.other: 20, keys.elsewhere: 1})
