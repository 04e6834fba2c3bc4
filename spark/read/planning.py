"""How far a streaming query has read: what its checkpoint holds, and how a batch is planned.

A checkpoint's offset is the next offset to read of every stream. Rules:

1. A batch reads, of each stream, from where the last batch ended. Where that is not so it is
   written down in the batch's own end, under `began`: for the very first batch, for a stream that
   was found later (it is read from its beginning), and for one that goes on after a loss. So a
   batch that is repeated after a restart reads the same rows, whatever `startingOffsets` says by
   then and whatever retention has deleted.
2. The very first batch is planned even if there is nothing to read: from then on "latest" is a
   place in the checkpoint and not a moment that each restart moves.
3. A stream that is no longer there and had been read to its end is forgotten. With rows that were
   not read, and also where that can't be known, it is a loss.
4. A stream that ends before the place to go on at was deleted and made again: a loss. But an empty
   one may only have been emptied by retention: it is waited for.
5. Losses fail the query, or, where they are allowed, are passed over: the stream goes on at its
   first message.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from pyspark.sql.datasource import InputPartition

from sharding.errors import RemoteError, UnsupportedFormat

_VERSION = 1


class StreamGone(RemoteError):
    """A stream with messages that were not read was deleted, or made again."""


@dataclass(frozen=True)
class Extent:
    """What a stream holds: offsets from `first` up to `end`, without it; equal if it is empty."""

    first: int = 0
    end: int = 0


@dataclass(frozen=True)
class Offsets:
    """One offset of the source, as Spark keeps it."""

    next: Mapping[str, int]
    """The first offset that is not read yet, by stream."""
    began: Mapping[str, int] = field(default_factory=dict)
    """Where the batch that ends here began, for streams where the batch before does not say."""
    initial: bool = False
    """Whether no batch ends here: the query begins."""

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Offsets:
        if value.get("version") != _VERSION:
            raise UnsupportedFormat(
                f"the checkpoint's offset has version {value.get('version')!r} and not {_VERSION}: "
                "it was written by a newer Warren, or not by Warren"
            )
        return cls(_offsets(value, "next"), _offsets(value, "began"), bool(value.get("initial")))

    def to_json(self) -> dict[str, object]:
        value: dict[str, object] = {"version": _VERSION, "next": dict(self.next)}
        if self.began:
            value["began"] = dict(self.began)
        if self.initial:
            value["initial"] = True
        return value

    def starts_after(self, start: Offsets) -> dict[str, int]:
        """Where each stream begins in the batch from `start` to here."""
        return {
            stream: self.began.get(stream, start.next.get(stream, end))
            for stream, end in self.next.items()
        }


@dataclass(frozen=True)
class Batch:
    """What could be read after `start`: begin and end of each stream."""

    start: Offsets
    ranges: Mapping[str, tuple[int, int]]
    began: Mapping[str, int]

    @property
    def waiting(self) -> int:
        """How many offsets there are to read."""
        return sum(end - begin for begin, end in self.ranges.values())

    def up_to(self, limit: int | None) -> Offsets:
        """The end of a batch of `limit` offsets; `start` itself if there is nothing to do."""
        sizes = {stream: end - begin for stream, (begin, end) in self.ranges.items()}
        taken = sizes if limit is None else share_out(limit, sizes)
        after = {stream: self.ranges[stream][0] + size for stream, size in taken.items()}
        if not self.began and after == dict(self.start.next):
            return self.start
        return Offsets(after, self.began)


def plan(start: Offsets, extents: Mapping[str, Extent], *, fail_on_data_loss: bool) -> Batch:
    """What there is to read in the streams of `extents` after `start`."""
    ranges: dict[str, tuple[int, int]] = {}
    began: dict[str, int] = dict(start.next) if start.initial else {}
    for stream, extent in extents.items():
        begin = start.next.get(stream)
        if begin is None:
            begin = began[stream] = extent.first
        elif begin > extent.end > 0:
            if fail_on_data_loss:
                raise StreamGone(
                    f"{stream!r} ends at offset {extent.end}, but was read up to {begin} before: "
                    "it was deleted and made again; start with a new checkpoint, or allow the loss "
                    "(failOnDataLoss=false)"
                )
            begin = began[stream] = extent.first
        elif begin < extent.first and not fail_on_data_loss:
            begin = began[stream] = extent.first
        ranges[stream] = (begin, max(begin, extent.end))
    return Batch(start, ranges, {stream: at for stream, at in began.items() if stream in ranges})


def up_to_target(
    extents: Mapping[str, Extent], target: Mapping[str, int], start: Offsets
) -> dict[str, Extent]:
    """What a query that stops by itself may read: up to where the streams ended when it began.

    Its start may be later than that where it was looked up afterwards; that is no loss.
    """
    limited = {}
    for stream, extent in extents.items():
        if stream in target or stream in start.next:
            end = max(target.get(stream, 0), start.next.get(stream, 0))
            limited[stream] = Extent(extent.first, min(extent.end, end))
    return limited


def check_gone(start: Offsets, gone: Mapping[str, Extent | None]) -> None:
    """Raise if one of the streams that are no longer selected had rows that were not read.

    None stands for a stream that does not exist any more.
    """
    for stream, extent in gone.items():
        unread = None if extent is None else extent.end - start.next[stream]
        if unread is None or unread > 0:
            what = "is deleted" if unread is None else f"has {unread} offsets that were not read"
            raise StreamGone(
                f"{stream!r} is no longer a part of what is read, and {what}; "
                "start with a new checkpoint, or allow the loss (failOnDataLoss=false)"
            )


def share_out(limit: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """`limit` divided in proportion to `sizes`, and no more than those; the sum is exact.

    Each stream that has something gets at least one, if the limit allows that: a small stream must
    not wait for ever beside a large one.

    >>> share_out(10, {"a": 900, "b": 99, "c": 1, "d": 0})
    {'a': 8, 'b': 1, 'c': 1, 'd': 0}
    """
    total = sum(sizes.values())
    if total <= limit:
        return dict(sizes)
    filled = [stream for stream, size in sizes.items() if size]
    least = 1 if len(filled) <= limit else 0
    rest, rest_total = limit - least * len(filled), total - least * len(filled)
    shares = dict.fromkeys(sizes, 0)
    remainders: list[tuple[int, str]] = []
    for stream in filled:
        part, remainder = divmod(rest * (sizes[stream] - least), rest_total)
        shares[stream] = least + part
        remainders.append((remainder, stream))
    missing = limit - sum(shares.values())
    for _, stream in sorted(remainders, key=lambda found: -found[0])[:missing]:
        shares[stream] += 1
    return shares


def _offsets(value: Mapping[str, object], name: str) -> dict[str, int]:
    found = value.get(name, {})
    if not isinstance(found, dict) or not all(_is_offset(offset) for offset in found.values()):
        raise UnsupportedFormat(f"the checkpoint's offset is damaged: {name!r} holds {found!r}")
    return found


def _is_offset(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
