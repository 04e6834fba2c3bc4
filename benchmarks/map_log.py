"""What a new client pays to learn the shard maps, and what one change of them costs: `make
bench-maps`.

It starts a cluster of its own, with a virtual host for each history: so many logical queues of 30
shards each, and so many changes of them, each citing the last, with the snapshots that their writer
would append. The queues themselves need not exist. Records are made by the functions that a
topology makes them with and lie in a real log; who reads it is a process with a `Topology` and
nothing else.

* ready: from the constructor's call until every question for a map is answered at once, the median
  of some processes, one after the other; CPU and memory are of that process, without its imports;
* a change: one map is set, and confirmed to have taken effect; the median of some;
* together: so many processes, their imports done, start at one time;
* ignored: the same behind what somebody wrote through the default exchange, before and after the
  first change that follows it.

These are times of one machine, which brokers and clients share. They are here because a bound is
promised for them, and stand in docs/operations.md; `make bench` has ratios, which say more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import pika

from sharding import Node, Policy, Shard, ShardMap, ShardName, Topology, TopologyOptions
from sharding.maps import map_log
from sharding.maps.map_log import LOG, MAP, NOTES, POLICY, Change, Entry
from sharding.maps.snapshots import LogReader, snapshot_records

if TYPE_CHECKING:
    from tests.cluster import Cluster

SHARDS_PER_NODE = 10
STARTS = 5
IGNORED_BYTES = 100_000
PATIENCE = 600.0
PATIENT = TopologyOptions(connect_timeout=60, start_timeout=PATIENCE, change_timeout=PATIENCE)
PART = 500
"""So many records are sent before the broker is asked whether it has them."""
NODES = tuple(f"rabbit@host-{number}" for number in range(3))
POLICY_OF_ALL = Policy("all", "^queue-", shards_per_node=SHARDS_PER_NODE)
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Learnt:
    """What it cost a process to be ready."""

    seconds: float
    cpu: float
    bytes_read: int
    memory: int


def main() -> None:
    from tests.cluster import DEFAULT_VERSION, Cluster

    parser = argparse.ArgumentParser(prog="python -m benchmarks.map_log")
    parser.add_argument("--queues", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--changes", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--together", type=int, default=100, help="clients that start at once")
    parser.add_argument("--ignored", type=int, default=1_000, help="megabytes that are ignored")
    parser.add_argument("--version", default=DEFAULT_VERSION, help="of RabbitMQ")
    asked = parser.parse_args()
    with Cluster.start(nodes=3, version=asked.version) as cluster:
        print(
            "| queues | changes | the log | ready | CPU | read | memory | a change | its record |\n"
            "|---|---|---|---|---|---|---|---|---|"
        )
        for queues in asked.queues:
            for changes in asked.changes:
                with history(cluster, queues, changes) as (urls, size):
                    print(row(queues, changes, size, urls), flush=True)
                    if (queues, changes) == (asked.queues[-1], asked.changes[-1]):
                        say(together(asked.together, urls, lambda: cpu_of_brokers(cluster)))
                        for line in ignored(asked.ignored, urls):
                            say(line)


def say(line: str) -> None:
    print(f"\n{line}", flush=True)


def row(queues: int, changes: int, size: int, urls: list[str]) -> str:
    learnt = [learn(urls) for _ in range(STARTS)]
    took, record = one_change(urls)
    cells = [
        f"{queues:,}",
        f"{changes:,}",
        f"{size / 1e6:.1f} MB",
        f"{middle(learnt, lambda each: each.seconds):.2f} s "
        f"(at most {max(each.seconds for each in learnt):.2f})",
        f"{middle(learnt, lambda each: each.cpu):.2f} s",
        f"{middle(learnt, lambda each: each.bytes_read) / 1e6:.2f} MB",
        f"{middle(learnt, lambda each: each.memory) / 1e6:.0f} MB",
        f"{1e3 * took:.0f} ms",
        f"{record:,} bytes",
    ]
    return "| " + " | ".join(cells) + " |"


def middle(learnt: list[Learnt], of: Callable[[Learnt], float]) -> float:
    return median(map(of, learnt))


# A log with a history


@contextmanager
def history(cluster: Cluster, queues: int, changes: int) -> Iterator[tuple[list[str], int]]:
    """The log of that many changes, in a virtual host of its own, and how many bytes it has."""
    view = cluster.new_vhost(f"q{queues}-c{changes}")
    urls = [node.endpoint.amqp_url for node in view]
    make_log(urls[0])
    size = send(urls[0], written(queues, changes), exchange=LOG)
    try:
        yield urls, size
    finally:
        cluster.delete_vhost(view.vhost)


def make_log(url: str) -> None:
    """As a topology makes it, but that nothing is noted: the first record is at offset 0."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare(LOG, durable=True, arguments={"x-queue-type": "stream"})
        for exchange in (LOG, NOTES):
            channel.exchange_declare(exchange, "fanout", durable=True)
            channel.queue_bind(LOG, exchange)


def written(queues: int, changes: int) -> Iterator[bytes]:
    """The records that a writer would append, with snapshots where they are due."""
    reader, offset = LogReader(), 0
    for number in range(queues + changes):
        assert reader.state is not None
        logical = f"queue-{number % queues}"
        revision = reader.state.revision(Entry(MAP, logical))
        changed = [Change(Entry(MAP, logical), revision, shard_map(logical, revision + 1))]
        if number == 0:
            changed.append(Change(Entry(POLICY, POLICY_OF_ALL.name), 0, POLICY_OF_ALL))
        body = map_log.encode(changed, name=f"c{number}", log=reader.log, start=reader.start)
        read = reader.read(offset, body)
        assert read.void is None, read
        yield body
        offset += 1
        if read.is_due:
            for part in snapshot_records(
                reader.state, offset - 1, name=f"s{number}", start=reader.start
            ):
                reader.read(offset, part)
                yield part
                offset += 1


def shard_map(logical: str, epoch: int) -> ShardMap:
    """One of 30 shards of which another one is away each time, so that each change is one."""
    shards = [
        Shard(str(ShardName(logical, node, index)), node)
        for node in NODES
        for index in range(SHARDS_PER_NODE)
    ]
    away = epoch % len(shards)
    shards[away] = replace(shards[away], available=False)
    return ShardMap(logical, epoch, tuple(shards), tuple(map(Node, NODES)), POLICY_OF_ALL)


def send(url: str, records: Iterable[bytes], exchange: str = "", routing_key: str = "") -> int:
    size = 0
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for number, body in enumerate(records, 1):
            channel.basic_publish(exchange, routing_key, body)
            size += len(body)
            if number % PART == 0:
                channel.close()  # answered when all before it has been taken
                channel = connection.channel()
        channel.close()
    return size


# A process that learns it


def learn(urls: list[str]) -> Learnt:
    with reader_process(urls) as process:
        go(process)
        return result(process)


@contextmanager
def reader_process(urls: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has done its imports, and starts when it is told."""
    command = [sys.executable, "-m", "benchmarks.map_log", "--reader", *urls]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        try:
            assert line_of(process) == "imported\n"
            yield process
        finally:
            process.stdin.close()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def result(process: subprocess.Popen[str]) -> Learnt:
    return Learnt(**json.loads(line_of(process)))


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def read_the_log(urls: list[str]) -> None:
    """What such a process does."""
    print("imported", flush=True)
    sys.stdin.readline()
    memory, began, cpu = resident(), perf_counter(), process_time()
    with Topology(*urls, options=PATIENT) as topology:
        topology.wait_until_ready(PATIENCE)
        learnt = Learnt(
            perf_counter() - began,
            process_time() - cpu,
            topology._plane.log.bytes_read,
            resident() - memory,
        )
        print(json.dumps(asdict(learnt)), flush=True)
        sys.stdin.readline()


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# What is measured beside that


def one_change(urls: list[str]) -> tuple[float, int]:
    """The median time of a few changes by a topology that runs, and the size of a record."""
    took = []
    with Topology(*urls, options=PATIENT) as topology:
        topology.wait_until_ready(PATIENCE)
        for _ in range(STARTS):
            current = topology.state.maps["queue-1"]
            wanted = shard_map("queue-1", current.epoch + 1)
            began = perf_counter()
            topology.change(lambda state, to=wanted: state.with_map(to))  # type: ignore[misc]
            took.append(perf_counter() - began)
    change = Change(Entry(MAP, "queue-1"), wanted.epoch - 1, wanted)
    return median(took), len(map_log.encode([change], name="x" * 32, log="x" * 32, start=10_000))


def together(count: int, urls: list[str], cpu_of_brokers: Callable[[], float]) -> str:
    """As many new clients at once; and what that cost the brokers."""
    with ExitStack() as stack:
        running = []
        for number in range(count):
            turned = number % len(urls)
            running.append(stack.enter_context(reader_process(urls[turned:] + urls[:turned])))
        before, began = cpu_of_brokers(), perf_counter()
        for process in running:
            go(process)
        learnt = [result(process) for process in running]
        took, cost = perf_counter() - began, cpu_of_brokers() - before
    return (
        f"{count} clients at once: all ready after {took:.1f} s, the first after "
        f"{min(each.seconds for each in learnt):.1f} s; {sum(each.cpu for each in learnt):.1f} s "
        f"of CPU in the clients, {cost:.1f} s in the brokers, which sent "
        f"{sum(each.bytes_read for each in learnt) / 1e6:.0f} MB"
    )


def cpu_of_brokers(cluster: Cluster) -> float:
    from tests.cluster import processes

    ticks = 0
    for node in cluster:
        for pid in processes.beam(node.driver.folder):  # type: ignore[attr-defined]
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def ignored(megabytes: int, urls: list[str]) -> Iterator[str]:
    junk = (b"x" * IGNORED_BYTES for _ in range(megabytes * 1_000_000 // IGNORED_BYTES))
    size = send(urls[0], junk, routing_key=LOG)
    for when in ("before", "after"):
        learnt = [learn(urls) for _ in range(STARTS)]
        yield (
            f"Behind {size / 1e6:,.0f} MB that is ignored, {when} the next change: ready after "
            f"{middle(learnt, lambda each: each.seconds):.1f} s (at most "
            f"{max(each.seconds for each in learnt):.1f}), "
            f"{middle(learnt, lambda each: each.cpu):.1f} s of CPU, "
            f"{middle(learnt, lambda each: each.bytes_read) / 1e6:.0f} MB read, "
            f"{middle(learnt, lambda each: each.memory) / 1e6:.0f} MB of memory"
        )
        with Topology(*urls, options=PATIENT) as topology:
            topology.set_policy(replace(POLICY_OF_ALL, priority=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--reader"]:
        read_the_log(sys.argv[2:])
    else:
        main()
