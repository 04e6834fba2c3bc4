"""Ranges of offsets cut into the tasks of a batch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from pyspark.sql.datasource import InputPartition


@dataclass(frozen=True)
class StreamRange(InputPartition):
    """What one task reads: a stream's offsets from `first` up to `end`, without it."""

    stream: str
    partition: int
    """The number of the stream in its super stream."""
    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first


def cut(
    ranges: Iterable[StreamRange],
    *,
    min_partitions: int | None = None,
    max_records: int | None = None,
) -> list[StreamRange]:
    """The same offsets in at least `min_partitions` ranges of at most `max_records` each.

    Ranges are cut in proportion to their sizes; a range of one offset can't be cut. Empty ones are
    left out. The cuts depend on nothing but the ranges, so a repeated batch has the same tasks.
    """
    filled = [found for found in ranges if found.size > 0]
    parts = {
        number: -(-found.size // max_records) if max_records else 1
        for number, found in enumerate(filled)
    }
    missing = (min_partitions or 0) - sum(parts.values())
    if missing > 0:
        _add(parts, [found.size for found in filled], missing)
    return [part for number, found in enumerate(filled) for part in _even(found, parts[number])]


def _add(parts: dict[int, int], sizes: list[int], missing: int) -> None:
    """Cut further, always where the pieces are largest."""
    heap = [(-sizes[number] / count, number) for number, count in parts.items()]
    heapq.heapify(heap)
    while missing and heap:
        _, number = heapq.heappop(heap)
        if parts[number] < sizes[number]:
            parts[number] += 1
            missing -= 1
            heapq.heappush(heap, (-sizes[number] / parts[number], number))


def _even(found: StreamRange, parts: int) -> Iterator[StreamRange]:
    cuts = [found.first + found.size * number // parts for number in range(parts + 1)]
    for first, end in pairwise(cuts):
        yield StreamRange(found.stream, found.partition, first, end)
