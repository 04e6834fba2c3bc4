"""Counts the house: modules, lines, and through how many modules data goes.

    python -m benchmarks.house            what can be counted without a broker
    WARREN_URL=… WARREN_STREAM_URL=… python -m benchmarks.house
                                          the ways of data too, on that broker (`make up`)

A way is counted by running it: the modules of Warren in which a function was entered, of a publish
by the caller's thread between the call and the confirm, of a worker by any of its threads between
the delivery of a message and its acknowledgement (of a stream: until its offset is stored). A
worker's threads do other things too (they look at the map, prove that the broker answers, tell
other workers what they hold), and some of that may happen just then. So several messages are sent,
and on the way is what every one of them entered; what only some did is printed beside it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pika

from interceptors import ShardedChannel
from sharding import Policy, Topology
from sharding.groups import ConsumerGroup, StreamConsumerGroup, StreamGroupOptions
from sharding.groups.handling.threads import Handler
from sharding.groups.streams.worker import members_stream
from sharding.stream import StreamEnvironment

PACKAGES = ("sharding", "interceptors", "spark")
ROOT = Path(__file__).parent.parent
MESSAGES = 40


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def counted() -> dict[str, int]:
    found = modules()
    flat = [path for path in found if path.parent == ROOT / "sharding"]
    stream = [path for path in found if ROOT / "sharding" / "stream" in path.parents]
    return {
        "modules": len(found),
        "of them in stream/": len(stream),
        "flat in sharding/": len(flat),
        "lines": sum(len(path.read_text().splitlines()) for path in found),
        "longest module, lines": max(len(path.read_text().splitlines()) for path in found),
    }


class Way:
    """The modules that were entered while it was open."""

    def __init__(self) -> None:
        self._entered: set[str] | None = None

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        entered = self._entered
        if event == "call" and entered is not None:
            name = str(frame.f_globals.get("__name__", ""))
            if name.partition(".")[0] in PACKAGES and frame.f_code.co_name != "<module>":
                entered.add(name)

    @contextmanager
    def opened(self) -> Iterator[set[str]]:
        entered = self._entered = set()
        try:
            yield entered
        finally:
            self._entered = None


class WayOfWorker(NamedTuple):
    """The modules that every message entered, and those that only some did."""

    always: set[str]
    sometimes: set[str]


@contextmanager
def logical_queue(url: str, way: str) -> Iterator[tuple[Topology, str]]:
    """One for each way: what is published on one must not be read on another."""
    with Topology(url) as topology:
        name = f"house-{os.getpid()}-{way}"
        topology.set_policy(Policy.exactly(name, 1, name=name))
        topology.ensure(name)
        try:
            yield topology, name
        finally:
            topology.forget(name)


def way_of_publish(url: str) -> set[str]:
    with (
        logical_queue(url, "publish") as (topology, name),
        pika.BlockingConnection(pika.URLParameters(url)) as connection,
    ):
        channel = ShardedChannel(connection.channel(), topology)
        channel.confirm_delivery()
        channel.basic_publish(name, "warm", b"")
        way = Way()
        sys.setprofile(way.note)
        with way.opened() as entered:
            channel.basic_publish(name, "key", b"")
        sys.setprofile(None)
    return entered


def way_of_queue_worker(url: str) -> WayOfWorker:
    with logical_queue(url, "worker") as (topology, name):
        shard_map = topology.shard_map(name)
        assert shard_map is not None
        shards = frozenset(shard.name for shard in shard_map.shards)
        return way_of_worker(url, shards, lambda handler: ConsumerGroup(topology, name, handler))


def way_of_stream_worker(url: str, stream_url: str) -> WayOfWorker:
    options = StreamGroupOptions(store_every_messages=1)  # as a queue's are acknowledged
    with StreamEnvironment(stream_url) as environment:
        name = f"house-{os.getpid()}-stream"
        environment.create_stream(name)
        try:
            return way_of_worker(
                url,
                frozenset({name}),
                lambda handler: StreamConsumerGroup(
                    environment, name, handler, group="house", options=options
                ),
            )
        finally:
            environment.delete_stream(name)
            environment.delete_stream(members_stream(name), missing_ok=True)


def way_of_worker(
    url: str,
    shards: frozenset[str],
    group_with: Callable[[Handler], ConsumerGroup | StreamConsumerGroup],
) -> WayOfWorker:
    """Publish to a shard, queue or stream, by pika alone, of which nothing is counted."""
    handled: queue.Queue[None] = queue.Queue()
    way = Way()
    threading.setprofile(way.note)  # the group's threads, of which some start with its shards
    each: list[set[str]] = []
    with group_with(lambda _: handled.put(None)) as group:
        while group.shards != shards:
            time.sleep(0.01)
        threading.setprofile(None)
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            channel = connection.channel()
            for _ in range(MESSAGES):
                with way.opened() as entered:
                    channel.basic_publish("", min(shards), b"")
                    handled.get()
                    while group.counters["in_hand"]:
                        time.sleep(0.01)
                    time.sleep(0.05)  # its acknowledgement is sent now
                each.append(entered)
    always = set.intersection(*each)
    return WayOfWorker(always, set.union(*each) - always)


def main() -> None:
    for name, value in counted().items():
        print(f"{name:24} {value:7,}")
    url, stream_url = os.environ.get("WARREN_URL"), os.environ.get("WARREN_STREAM_URL")
    if url is None:
        return
    show("way of a publish", way_of_publish(url))
    show_both("way of a queue worker", way_of_queue_worker(url))
    if stream_url is not None:
        show_both("way of a stream worker", way_of_stream_worker(url, stream_url))


def show(name: str, entered: set[str]) -> None:
    print(f"{name:24} {len(entered):7,}   {', '.join(sorted(entered))}")


def show_both(name: str, way: WayOfWorker) -> None:
    show(name, way.always)
    show("beside that way", way.sometimes)


if __name__ == "__main__":
    main()
