"""Counts the house: modules, lines, and through how many modules a publish goes.

    python -m benchmarks.house            what can be counted without a broker
    WARREN_URL=… python -m benchmarks.house    the way of a publish too, on that broker (`make up`)

The way of a publish is counted by running it: the modules of Warren in which the caller's thread
entered a function between the call and the confirm.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

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


@contextmanager
def modules_entered() -> Iterator[set[str]]:
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            name = str(frame.f_globals.get("__name__", ""))
            if name.partition(".")[0] in PACKAGES and frame.f_code.co_name != "<module>":
                entered.add(name)

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def way_of_publish(url: str) -> set[str]:
    import pika

    from interceptors import ShardedChannel
    from sharding import Policy, Topology

    with Topology(url) as topology:
        name = f"house-{os.getpid()}"
        topology.set_policy(Policy.exactly(name, 1, name=name))
        topology.ensure(name)
        connection = pika.BlockingConnection(pika.URLParameters(url))
        channel = ShardedChannel(connection.channel(), topology)
        channel.confirm_delivery()
        channel.basic_publish(name, "warm", b"")
        with modules_entered() as entered:
            channel.basic_publish(name, "key", b"")
        connection.close()
        topology.forget(name)
    return entered


def main() -> None:
    for name, value in counted().items():
        print(f"{name:24} {value:7,}")
    url = os.environ.get("WARREN_URL")
    if url is None:
        return
    entered = way_of_publish(url)
    print(f"{'modules of a publish':24} {len(entered):7,}   {', '.join(sorted(entered))}")


if __name__ == "__main__":
    main()
