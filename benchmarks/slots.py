"""What a slot table costs: to build it, and to look a key up in it as the shards grow in number.

Run it with `python -m benchmarks.slots`. Times are of this machine; the ratio should hold anywhere:
1 means that the number of shards costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

from benchmarks.rounds import Ratio, alternate, print_ratio
from sharding import SlotTable

FEW, MANY = 6, 1_000
BUILDS = 5
ROUNDS = 15
KEYS = [f"customer-{number}" for number in range(50_000)]


def main() -> list[Ratio]:
    print_build_times(MANY)
    ways = {
        f"looking up a key among {count:,} shards": partial(
            lookups, SlotTable.rendezvous(shard_names(count))
        )
        for count in (FEW, MANY)
    }
    few, many = ways
    return [print_ratio(alternate(ways, ROUNDS), many, few)]


def shard_names(count: int) -> list[str]:
    return [f"sharding: images - rabbit@rmq{number} - 0" for number in range(count)]


def print_build_times(shards: int) -> None:
    names = shard_names(shards)
    times = sorted(seconds(lambda: SlotTable.rendezvous(names)) for _ in range(BUILDS))
    print(
        f"Building the table for {shards:,} shards: best {times[0] * 1e3:.0f} ms, "
        f"spread {times[0] * 1e3:.0f} to {times[-1] * 1e3:.0f} ms, {BUILDS} builds"
    )


def lookups(table: SlotTable) -> float:
    shard_of = table.shard_of

    def look_all_up() -> None:
        for key in KEYS:
            shard_of(key)

    return len(KEYS) / seconds(look_all_up)


def seconds(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


if __name__ == "__main__":
    main()
