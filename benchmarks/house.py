"""Counts the house: modules, lines, and through how many modules data goes.

    python -m benchmarks.house            what can be counted without a broker
    WARREN_URL=… python -m benchmarks.house    the ways of data too, on that broker (`make up`)

A way is counted by running it: the modules of Warren in which a function was entered, of a publish
by the caller's thread between the call and the confirm, of a worker by any of its threads between
the delivery of a message and the moment when none is in hand.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pika

from interceptors import ShardedChannel
from sharding import Policy, Topology
from sharding.groups import ConsumerGroup, GroupOptions

PACKAGES = ("sharding", "interceptors", "spark")
ROOT = Path(__file__).parent.parent


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
        self.entered: set[str] = set()
        self._is_open = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._is_open:
            name = str(frame.f_globals.get("__name__", ""))
            if name.partition(".")[0] in PACKAGES and frame.f_code.co_name != "<module>":
                self.entered.add(name)

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False


@contextmanager
def logical_queue(url: str) -> Iterator[tuple[Topology, str]]:
    with Topology(url) as topology:
        name = f"house-{os.getpid()}"
        topology.set_policy(Policy.exactly(name, 1, name=name))
        topology.ensure(name)
        try:
            yield topology, name
        finally:
            topology.forget(name)


def way_of_publish(url: str) -> set[str]:
    with (
        logical_queue(url) as (topology, name),
        pika.BlockingConnection(pika.URLParameters(url)) as connection,
    ):
        channel = ShardedChannel(connection.channel(), topology)
        channel.confirm_delivery()
        channel.basic_publish(name, "warm", b"")
        way = Way()
        sys.setprofile(way.note)
        with way.opened():
            channel.basic_publish(name, "key", b"")
        sys.setprofile(None)
    return way.entered


def way_of_worker(url: str) -> set[str]:
    with (
        logical_queue(url) as (topology, name),
        pika.BlockingConnection(pika.URLParameters(url)) as connection,
    ):
        shard_map = topology.shard_map(name)
        assert shard_map is not None
        shards = frozenset(shard.name for shard in shard_map.shards)
        handled: queue.Queue[None] = queue.Queue()
        way = Way()
        threading.setprofile(way.note)  # the group's threads, which start now
        # Workers tell each other what they hold, which is not on the way of a message.
        options = GroupOptions(announce_interval=60, member_timeout=180)
        with ConsumerGroup(topology, name, lambda _: handled.put(None), options=options) as group:
            threading.setprofile(None)
            while group.shards != shards:
                time.sleep(0.01)
            for opened in (nullcontext(), way.opened()):
                with opened:
                    connection.channel().basic_publish("", min(shards), b"")
                    handled.get()
                    while group.counters["in_hand"]:
                        time.sleep(0.01)
    return way.entered


def main() -> None:
    for name, value in counted().items():
        print(f"{name:24} {value:7,}")
    url = os.environ.get("WARREN_URL")
    if url is None:
        return
    for name, entered in (("publish", way_of_publish(url)), ("queue worker", way_of_worker(url))):
        print(f"{'way of a ' + name:24} {len(entered):7,}   {', '.join(sorted(entered))}")


if __name__ == "__main__":
    main()
