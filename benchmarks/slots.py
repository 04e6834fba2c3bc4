"""What a slot table costs: to build it, and to look a key up in it as the shards grow in number.

Run it with `python -m benchmarks.slots`. Times are of this machine; the ratio should hold anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

from sharding import SlotTable

FEW, MANY = 6, 1_000
BUILDS = 5
ROUNDS = 15
KEYS = [f"customer-{number}" for number in range(50_000)]


def main() -> None:
    few = SlotTable.rendezvous(shard_names(FEW))
    many = SlotTable.rendezvous(shard_names(MANY))
    print_build_times(MANY)
    print_lookup_ratio(few, many)


def shard_names(count: int) -> list[str]:
    return [f"sharding: images - rabbit@rmq{number} - 0" for number in range(count)]


def print_build_times(shards: int) -> None:
    names = shard_names(shards)
    times = sorted(seconds(lambda: SlotTable.rendezvous(names)) for _ in range(BUILDS))
    print(
        f"Building the table for {shards:,} shards: best {times[0] * 1e3:.0f} ms, "
        f"spread {times[0] * 1e3:.0f} to {times[-1] * 1e3:.0f} ms, {BUILDS} builds"
    )


def print_lookup_ratio(few: SlotTable, many: SlotTable) -> None:
    costs_few: list[float] = []
    costs_many: list[float] = []
    for round_number in range(ROUNDS):
        # Alternately, and each first in turn, so that a machine that slows down slows both.
        turns = [(few, costs_few), (many, costs_many)]
        for table, costs in turns if round_number % 2 else reversed(turns):
            costs.append(lookup_cost(table))
    ratios = sorted(b / a for a, b in zip(costs_few, costs_many, strict=True))
    print(f"Looking up a key among {FEW} shards: {median(costs_few) * 1e9:.0f} ns (median)")
    print(f"Looking up a key among {MANY:,} shards: {median(costs_many) * 1e9:.0f} ns (median)")
    print(
        f"Ratio, {MANY:,} to {FEW} shards: {median(ratios):.3f} (median), "
        f"spread {ratios[0]:.3f} to {ratios[-1]:.3f}, "
        f"{ROUNDS} rounds of {len(KEYS):,} keys; 1 means that the number of shards costs nothing"
    )


def lookup_cost(table: SlotTable) -> float:
    shard_of = table.shard_of

    def look_all_up() -> None:
        for key in KEYS:
            shard_of(key)

    return seconds(look_all_up) / len(KEYS)


def seconds(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


if __name__ == "__main__":
    main()
