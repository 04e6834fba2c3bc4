"""A queue group under load while workers come, go and are killed, and a node of the broker too."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from interceptors import Outcome, ShardedPublisher
from sharding import Policy, Topology
from sharding.groups import ConsumerGroup
from tests.cluster import Cluster, wait_until
from tests.faults.group_load import (
    ConsumerWatch,
    Load,
    Worker,
    check_one_reader,
    check_order,
    time_until_read,
    wait_for_balance,
)
from tests.faults.group_worker import OPTIONS, Line
from tests.support.sharded import before_harm, fresh_queue

pytestmark = pytest.mark.cluster

MESSAGES = int(os.environ.get("WARREN_GROUP_MESSAGES", "4000"))
RATE = 400.0


@pytest.mark.timeout(600)
def test_workers_come_go_and_die_and_every_message_is_handled_in_order(
    harmed: Cluster, tmp_path: Path
) -> None:
    logical = fresh_queue()
    urls = [node.endpoint.amqp_url for node in harmed.nodes]
    workers: list[Worker] = []

    def start(count: int) -> list[Worker]:
        new = [Worker(tmp_path, len(workers) + n, logical, urls) for n in range(count)]
        workers.extend(new)
        return new

    def recovery(dead: Worker) -> float:
        """Wait until all that a killed worker held is read again; how long it took."""
        since = dead.killed_at or 0
        last = {line.shard: line.worker for line in _lines(workers) if line.what == "B"}
        held = {shard for shard, worker in last.items() if worker == dead.path.stem}
        assert held
        alive = [worker for worker in workers if worker is not dead]

        def taken() -> float:
            return time_until_read([line for w in alive for line in w.lines()], held, since)

        wait_until(lambda: taken() < float("inf"), explain=lambda: f"{held} unread")
        return taken()

    policy = Policy.exactly(logical, 4, name=logical)
    with before_harm(harmed, policy) as (topology, shard_map):
        assert len(shard_map.shards) == 12
        watch = ConsumerWatch(harmed, [shard.name for shard in shard_map.shards])
        load = Load(topology, logical, MESSAGES, RATE)
        try:
            times = {"1 worker": wait_for_balance(start(1), 12)}
            start(4)
            times["5 workers"] = wait_for_balance(workers, 12)
            recoveries = []
            for victim in workers[1:3]:
                victim.kill()
                recoveries.append(recovery(victim))
            alive = [worker for worker in workers if worker.killed_at is None]
            times["3 left of 5"] = wait_for_balance(alive, 12)

            broken = harmed.nodes[2]
            broken.kill()
            lost = {shard.name for shard in shard_map.shards_on(broken.name)}
            times["8 shards"] = wait_for_balance(alive, 8)
            broken.restart()
            node_back = time.monotonic()
            times["12 shards again"] = wait_for_balance(alive, 12)
            wait_until(
                lambda: time_until_read(_lines(workers), lost, node_back) < float("inf"),
                explain=lambda: "shards of the node that came back are not read",
            )
            node_recovery = time_until_read(_lines(workers), lost, node_back)

            assert alive[0].end() == 0
            times["2 workers"] = wait_for_balance(alive[1:], 12)
            load.end()
            stored = load.having(Outcome.STORED)
            wait_until(
                lambda: stored <= _handled(workers), explain=lambda: _missing(stored, workers)
            )
            assert [worker.end() for worker in alive[1:]] == [0, 0]
        finally:
            load.end()
            watch.end()
            for worker in workers:
                worker.process.kill()
                worker.process.wait()
                worker.log.close()

    lines = _lines(workers)
    done = Counter(line.number for line in lines if line.what == "E")
    again = {number for number, count in done.items() if count > 1}
    handovers = check_one_reader(workers)
    print(
        f"\n{harmed.version}: {len(stored)} stored, {len(load.having(Outcome.UNKNOWN))} unknown, "
        f"{load.refused + len(load.having(Outcome.REFUSED))} refused; {len(done)} handled, "
        f"{len(again)} of them more than once; {handovers} handovers of a shard between workers\n"
        "shards read again after kill -9 of a worker: "
        + ", ".join(f"{seconds:.1f} s" for seconds in recoveries)
        + f"; after the node was back: {node_recovery:.1f} s\nfair shares: "
        + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items())
    )
    assert stored <= done.keys()
    assert again <= _out_at_kills(workers, lost, node_back)
    assert any(line.what == "F" for line in lines)
    check_order(lines)
    assert set(watch.most.values()) == {1}
    assert handovers


@pytest.mark.timeout(300)
def test_a_worker_that_was_frozen_knows_that_it_lost_its_shards(
    harmed: Cluster, tmp_path: Path
) -> None:
    """It wakes with messages in its memory that others have handled meanwhile."""
    logical = fresh_queue()
    urls = [node.endpoint.amqp_url for node in harmed.nodes]
    heartbeat = 2
    with before_harm(harmed, Policy.exactly(logical, 2, name=logical)) as (topology, _):
        workers = [Worker(tmp_path, number, logical, urls, heartbeat) for number in range(2)]
        load = Load(topology, logical, 0, RATE)
        try:
            wait_for_balance(workers, 6)
            settled = time.monotonic()
            frozen, other = workers

            def at_work() -> set[str]:
                lines = frozen.lines()
                return {line.shard for line in lines if line.what == "B" and line.at > settled}

            wait_until(lambda: len(at_work()) == 3)
            held = at_work()
            # Else one could be frozen between the look at its lease and its first line.
            frozen.freeze_at_work()
            since = time.monotonic()
            wait_until(lambda: time_until_read(other.lines(), held, since) < float("inf"))
            recovery = time_until_read(other.lines(), held, since)
            meanwhile = _handled([other])
            thawed = time.monotonic()
            frozen.thaw()
            wait_for_balance(workers, 6)
            load.end()
            stored = load.having(Outcome.STORED)
            wait_until(
                lambda: stored <= _handled(workers), explain=lambda: _missing(stored, workers)
            )
            assert [worker.end() for worker in workers] == [0, 0]
        finally:
            load.end()
            for worker in workers:
                worker.process.kill()
                worker.process.wait()
                worker.log.close()
    done = Counter(line.number for line in _lines(workers) if line.what == "E")
    again = {number for number, count in done.items() if count > 1}
    print(f"\nfrozen: {recovery:.1f} s until all is read again, {len(again)} handled twice")
    check_one_reader(workers)
    begun = {line.number for line in frozen.lines() if line.what == "B" and line.at > thawed}
    assert begun, "it works again"
    assert not begun & meanwhile
    # Handlers that were at work when it froze, and what was handled and not yet acknowledged.
    assert len(again) <= OPTIONS.prefetch * len(held)


@pytest.mark.timeout(300)
def test_nodes_that_join_and_leave_are_followed_without_a_restart(harmed: Cluster) -> None:
    logical = fresh_queue()
    handled: list[bytes] = []

    def publish(topology: Topology, count: int) -> None:
        with ShardedPublisher(topology, logical) as publisher:
            for number in range(count):
                publisher.publish(f"key-{number}", b"%d" % number)

    policy = Policy.exactly(logical, 2, name=logical)
    with (
        before_harm(harmed, policy) as (topology, _),
        ConsumerGroup(topology, logical, lambda each: handled.append(each.body)) as group,
    ):
        wait_until(lambda: len(group.shards) == 6)
        node = harmed.add_node()
        try:

            def has_its_shards() -> bool:
                ensured = topology.ensure(logical)
                made = len(ensured.shard_map.shards_on(node.name))
                # Its port answers before the management API lists it: then that is said.
                assert made == 2 or any(node.name in note for note in ensured.notes)
                return made == 2

            wait_until(has_its_shards)  # as `shards watch` does it, round after round
            wait_until(lambda: len(group.shards) == 8)
            publish(topology, 100)
            wait_until(lambda: len(handled) == 100)
        finally:
            harmed.remove_node(node)
        assert not topology.ensure(logical).shard_map.shards_on(node.name)
        wait_until(lambda: len(group.shards) == 6, explain=lambda: str(sorted(group.shards)))
        publish(topology, 100)
        wait_until(lambda: len(handled) == 200)
        assert group.counters["lost"] == 2


def _lines(workers: list[Worker]) -> list[Line]:
    """What all have done, in the order of time."""
    return sorted((line for each in workers for line in each.lines()), key=lambda line: line.at)


def _handled(workers: list[Worker]) -> set[int]:
    return {line.number for line in _lines(workers) if line.what == "E"}


def _missing(stored: set[int], workers: list[Worker]) -> str:
    missing = sorted(stored - _handled(workers))
    return f"{len(missing)} not handled, the first: {missing[:5]}"


def _out_at_kills(workers: list[Worker], lost: set[str], node_back: float) -> set[int]:
    """Messages that may be handled twice.

    Of a worker that was killed: the last ones of each shard, as many as a reader is given at once,
    since the broker waits for no more acknowledgements. Of a node that was killed: what it had on
    it and was handled before, since with its last moments it forgets acknowledgements that it got.
    """
    excused = set()
    for worker in workers:
        handled: dict[str, list[int]] = defaultdict(list)
        for line in worker.lines():
            if line.what == "E":
                handled[line.shard].append(line.number)
                if line.shard in lost and line.at < node_back:
                    excused.add(line.number)
        if worker.killed_at is not None:
            for numbers in handled.values():
                excused.update(numbers[-OPTIONS.prefetch :])
    return excused
