"""The map log is deleted and made again under clients of every kind: all follow the new one, none
differs from the others, and nothing that one was told is stored is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sharding import Policy, ShardMap, Topology
from sharding.groups import ConsumerGroup, Delivery
from sharding.maps.map_log import LOG
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.faults.policy_load import CHANNELS, Publishers
from tests.faults.policy_publisher import THREADS
from tests.machine import PROJECT
from tests.support import patient
from tests.support.sharded import fresh_queue, raw_channel, topology_of

pytestmark = pytest.mark.cluster

MESSAGES = 6
"""Of each thread, at least, between two steps of the operator."""
READERS = 4
"""On each node, beside those of the publishers, of the operator and of `warren shards watch`."""
CHANGES = 8
"""Of the old log, at least."""


class Handled:
    """What the groups were given, and the shard that it came from last."""

    def __init__(self) -> None:
        self.shards: dict[bytes, str] = {}

    def __call__(self, message: Delivery) -> None:
        self.shards[message.body] = message.shard


@pytest.mark.twin(
    "integration/test_topology.py::test_a_log_made_again_with_as_many_records_is_another_one"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [0, -4, 9], ids=["as many records", "fewer", "more"])
def test_all_follow_a_log_that_replaces_another(
    cluster: Cluster, tmp_path: Path, more: int
) -> None:
    logical, handled = fresh_queue(), Handled()
    urls = [node.endpoint.amqp_url for node in cluster]
    with ExitStack() as stack:
        operator = stack.enter_context(topology_of(cluster))
        fill(operator, logical, 2, changes=CHANGES)
        old = operator.state
        stack.enter_context(watching(cluster, tmp_path))
        readers = [
            stack.enter_context(topology_of(nodes))
            for nodes in [[node] for node in cluster] * READERS
        ]
        for reader in readers[:2]:
            group = ConsumerGroup(reader, logical, handled, options=patient.group())
            stack.enter_context(group)
        publishers = stack.enter_context(Publishers(tmp_path, logical, urls))
        publishers.wait_for(MESSAGES, "S")

        began = time.monotonic()
        with raw_channel(cluster.nodes[0]) as channel:
            channel.queue_delete(LOG)
        wait_until(lambda: operator.state.log != old.log)
        publishers.wait_for(MESSAGES, "S", CHANNELS)  # without a map: it is kept
        made = time.monotonic()
        new = fill(operator, logical, 3, changes=old.epoch + more)
        filled = time.monotonic()
        assert operator.state.epoch == old.epoch + more
        wait_until(lambda: all(reader.state == operator.state for reader in readers))
        print(f"\nempty after {made - began:.1f} s, made in {filled - made:.1f} s, ", end="")
        print(f"all readers on it {time.monotonic() - filled:.1f} s later")
        publishers.wait_for(1, "SRU")
        since = {each.kind: len(each.lines) for each in publishers.all}
        wait_until(
            lambda: follow(publishers, handled, new, since),
            3 * PATIENCE,
            lambda: str(publishers.last_words()),
        )
        print(f"all publishers heard of it {time.monotonic() - filled:.1f} s later")
        assert new.log == operator.state.log != old.log
        assert all(reader.state == operator.state for reader in readers)
        publishers.end()
        stored = publishers.told("S")
        wait_until(
            lambda: stored <= handled.shards.keys(),
            2 * PATIENCE,
            lambda: f"{len(stored - handled.shards.keys())} of {len(stored)} are lost",
        )
        assert not publishers.told("X")
        assert follow(publishers, handled, new, since)


def fill(operator: Topology, logical: str, shards_per_node: int, changes: int) -> ShardMap:
    """Make the map, after as many changes of other things as make so many in all."""
    while operator.state.epoch < changes - 2:
        operator.set_policy(Policy(fresh_queue(), "^never$", 1))
    operator.set_policy(Policy.exactly(logical, shards_per_node, name=logical))
    return operator.ensure(logical).shard_map


def follow(
    publishers: Publishers, handled: Handled, shard_map: ShardMap, since: dict[str, int]
) -> bool:
    """Whether what each thread of each client published last went where the map says, of what has
    been handled by now."""
    for each in publishers.all:
        each.read()
        went: dict[int, list[bool]] = {thread: [] for thread in range(THREADS)}
        for line in each.lines[since[each.kind] :]:
            shard = handled.shards.get(f"{each.kind}|{line.thread}|{line.number}".encode())
            if line.what == "S" and shard is not None:
                went[line.thread].append(shard == shard_map.shard_of(line.key).name)
        newest = [right[-MESSAGES:] for right in went.values()]
        if not all(len(right) == MESSAGES and all(right) for right in newest):
            return False
    return True


@contextmanager
def watching(cluster: Cluster, folder: Path) -> Iterator[None]:
    """`warren shards watch`, as operators run it."""
    command = [sys.executable, "-m", "sharding.cli", "shards", "watch", "--interval", "1"]
    for node in cluster:
        command += ["--url", node.endpoint.amqp_url, "--management", node.management.url]
    with (folder / "watch.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=PROJECT, stdout=output, stderr=output)
        try:
            yield
            assert process.poll() is None, (folder / "watch.txt").read_text()
        finally:
            process.terminate()
            process.wait(PATIENCE)
