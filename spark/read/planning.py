"""How far a streaming query has read: what its checkpoint holds, and how a batch is planned.

A checkpoint's offset is the next offset to read of every stream. Rules:

1. A batch reads, of each stream, from where the last batch ended. Where that is not so it is
   written down in the batch's own end, under `began`: for the very first batch, for a stream that
   was found later (it is read from its beginning), and for one that goes on after a loss. So a
   batch that is repeated after a restart reads the same rows, whatever `startingOffsets` says by
   then and whatever retention has deleted. So are the streams' numbers, under `numbers`: they are
   the rows' `partition`, and others when a partition was bound or unbound meanwhile.
2. The very first batch is planned even if there is nothing to read: from then on "latest" is a
   place in the checkpoint and not a moment that each restart moves.
3. What was last seen of a stream's end is kept under `seen`. A stream that is no longer there and
   had been read to that end is read no more. With rows that were not read, and also where that
   can't be known, it is a loss. It may come back (a node that has just started does not know it
   yet, a partition is bound again): how far it was read, and what was seen of it, is kept under
   `left`. If it still has that chunk, it goes on where it was, else from its beginning.
4. A stream that was deleted and made again is a loss. It ends before the place to go on at or
   before the last chunk that was seen; or it has another chunk there, stored at another time. That
   is looked up once after a start, and again when the stream begins with a chunk that is younger
   than one that came later. An empty one may only have been emptied by retention: it is waited for,
   if all of it was read, and what was seen before is kept to compare with what comes.
5. A task that is slow, or repeated after a restart, may find another stream than was planned. So it
   is told what the plan has seen: rows that were stored later, or a stream that ends before the
   range does, are a reason to look at that chunk again. If it is there, the stream is the same and
   will be told as a whole later (a leader of 3.10 that was just elected calls its stream empty):
   the task fails and may be repeated, as planning asks such a stream again.
6. Losses fail the query, or, where they are allowed, are passed over and counted, under `lost`: the
   stream goes on at its first message.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from pyspark.sql.datasource import InputPartition

from sharding.errors import RemoteError, UnsupportedFormat

_VERSION = 1
_MOST_LEFT = 1_000
"""Streams that left are remembered up to so many: a pattern may match new ones without end."""


class StreamGone(RemoteError):
    """A stream with messages that were not read was deleted, or made again."""


class Seen(NamedTuple):
    """What was last seen of a stream: where it ended, and of its last chunk, if there was any, the
    first offset and when it was stored, in milliseconds since 1970."""

    end: int
    chunk: int = -1
    time: int = 0


@dataclass(frozen=True)
class Extent:
    """What a stream holds: offsets from `first` up to `end`, without it; equal if it is empty."""

    first: int = 0
    end: int = 0
    first_time: int = 0
    """When its first chunk was stored."""
    seen: Seen | None = None
    """Of its end, also where `end` is only what may be read now."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it at all."""
        return self.seen is not None and self.seen.chunk < 0


@dataclass(frozen=True)
class Offsets:
    """One offset of the source, as Spark keeps it."""

    next: Mapping[str, int]
    """The first offset that is not read yet, by stream."""
    began: Mapping[str, int] = field(default_factory=dict)
    """Where the batch that ends here began, for streams where the batch before does not say."""
    initial: bool = False
    """Whether no batch ends here: the query begins."""
    seen: Mapping[str, Seen] = field(default_factory=dict)
    """What the plan of the batch that ends here saw of each stream."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """How many offsets were passed over so far, where that is allowed; Spark reports it with the
    query's progress."""
    left: Mapping[str, tuple[int, Seen]] = field(default_factory=dict)
    """Of streams that are no longer there: the first offset that is not read yet, and what was
    seen."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Of the streams in their super stream, when the batch that ends here was planned."""

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Offsets:
        if value.get("version") != _VERSION:
            raise UnsupportedFormat(
                f"the checkpoint's offset has version {value.get('version')!r} and not {_VERSION}: "
                "it was written by a newer Warren, or not by Warren"
            )
        return cls(
            _offsets(value, "next"),
            _offsets(value, "began"),
            bool(value.get("initial")),
            _seen(value),
            _offsets(value, "lost"),
            _left(value),
            _offsets(value, "numbers"),
        )

    def to_json(self) -> dict[str, object]:
        value: dict[str, object] = {"version": _VERSION, "next": dict(self.next)}
        if self.began:
            value["began"] = dict(self.began)
        if self.initial:
            value["initial"] = True
        if self.seen:
            value["seen"] = {stream: list(found) for stream, found in self.seen.items()}
        if self.lost:
            value["lost"] = dict(self.lost)
        if self.left:
            value["left"] = {stream: [after, *seen] for stream, (after, seen) in self.left.items()}
        if self.numbers:
            value["numbers"] = dict(self.numbers)
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
    seen: Mapping[str, Seen] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    """What this batch passes over, as far as it can be counted."""
    left: Mapping[str, tuple[int, Seen]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)

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
        lost = dict(self.start.lost)
        for stream, count in self.lost.items():
            lost[stream] = lost.get(stream, 0) + count
        numbers = {stream: self.numbers[stream] for stream in after if stream in self.numbers}
        return Offsets(
            after, self.began, seen=self.seen, lost=lost, left=self.left, numbers=numbers
        )


def plan(
    start: Offsets,
    extents: Mapping[str, Extent],
    *,
    fail_on_data_loss: bool,
    made_again: Collection[str] = (),
    came_back: Collection[str] = (),
) -> Batch:
    """What there is to read in the streams of `extents` after `start`.

    `made_again` are those that are known to be other streams than before, `came_back` those that
    had left and are known to be the same.
    """
    ranges: dict[str, tuple[int, int]] = {}
    began: dict[str, int] = dict(start.next) if start.initial else {}
    lost: dict[str, int] = {}
    left = dict(start.left)
    for stream, extent in extents.items():
        begin, seen = start.next.get(stream), start.seen.get(stream)
        if begin is None and stream in left and extent.is_empty:
            continue  # by what comes it will be known which stream it is
        if begin is None and stream in came_back:
            begin = began[stream] = left[stream][0]
        elif begin is None:
            begin = began[stream] = extent.first
        elif stream in made_again or begin > extent.end > 0:
            if fail_on_data_loss:
                raise _other_stream(stream, begin, extent)
            if seen is not None and seen.end > begin:
                lost[stream] = seen.end - begin
            begin = began[stream] = extent.first
        elif extent.is_empty and seen is not None and seen.end > begin:
            if fail_on_data_loss:
                raise _emptied(stream, seen.end - begin)
            lost[stream] = seen.end - begin
            begin = began[stream] = seen.end
        elif begin < extent.first and not fail_on_data_loss:
            lost[stream] = extent.first - begin
            begin = began[stream] = extent.first
        ranges[stream] = (begin, max(begin, extent.end))
        left.pop(stream, None)
    for stream in start.next.keys() - extents.keys():
        seen = start.seen.get(stream)
        if seen is not None:
            left[stream] = start.next[stream], seen
            if seen.end > start.next[stream]:
                lost[stream] = seen.end - start.next[stream]
    return Batch(
        start,
        ranges,
        {stream: at for stream, at in began.items() if stream in ranges},
        last_seen({stream: extents[stream] for stream in ranges}, start.seen),
        lost,
        dict(list(left.items())[-_MOST_LEFT:]),
    )


def last_seen(extents: Mapping[str, Extent], before: Mapping[str, Seen]) -> dict[str, Seen]:
    """What is known of each stream after another look, by what was seen `before`."""
    return {
        stream: before[stream] if extent.is_empty and stream in before else extent.seen
        for stream, extent in extents.items()
        if extent.seen is not None
    }


def _other_stream(stream: str, begin: int, extent: Extent) -> StreamGone:
    how = (
        f"ends at offset {extent.end}, but was read up to {begin} before"
        if begin > extent.end
        else f"has other messages before offset {begin} than were read from it"
    )
    return StreamGone(
        f"{stream!r} {how}: it was deleted and made again; start with a new checkpoint, or allow "
        "the loss (failOnDataLoss=false)"
    )


def _emptied(stream: str, unread: int) -> StreamGone:
    return StreamGone(
        f"{stream!r} is empty, and {unread} offsets of it were not read: they were deleted, or it "
        "was made again; start with a new checkpoint, or allow the loss (failOnDataLoss=false)"
    )


def is_shorter(extent: Extent, seen: Seen) -> bool:
    """Whether a stream no longer has the last chunk that was seen of it, though it is not empty."""
    return 0 < extent.end <= seen.chunk


def may_be_another(extent: Extent, seen: Seen) -> bool:
    """Whether a stream begins with a chunk that is younger than one that was seen behind it.

    Clocks of two leaders may differ, so this is a reason to look at the chunk itself.
    """
    return extent.first_time > seen.time


def has_chunk(extent: Extent, seen: Seen) -> bool:
    """Whether a stream should still have the last chunk that was seen of it."""
    return extent.first <= seen.chunk < extent.end


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
            limited[stream] = replace(extent, end=min(extent.end, end))
    return limited


def check_gone(start: Offsets, gone: Mapping[str, Extent | None]) -> None:
    """Raise if one of the streams that are no longer selected had rows that were not read.

    None stands for a stream that does not exist any more: what was last seen of it counts.
    """
    for stream, extent in gone.items():
        last = start.seen.get(stream) if extent is None else Seen(extent.end)
        unread = None if last is None else last.end - start.next[stream]
        if unread is None or unread > 0:
            what = ["is deleted"] if extent is None else []
            what += [f"has {unread} offsets that were not read"] if unread is not None else []
            raise StreamGone(
                f"{stream!r} is no longer a part of what is read, and {' and '.join(what)}; "
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


def _seen(value: Mapping[str, object]) -> dict[str, Seen]:
    found: Any = value.get("seen", {})
    try:
        return {stream: Seen(*map(int, parts)) for stream, parts in found.items()}
    except (AttributeError, TypeError, ValueError):
        problem = f"the checkpoint's offset is damaged: 'seen' holds {found!r}"
        raise UnsupportedFormat(problem) from None


def _left(value: Mapping[str, object]) -> dict[str, tuple[int, Seen]]:
    found: Any = value.get("left", {})
    try:
        return {
            stream: (int(after), Seen(*map(int, seen))) for stream, (after, *seen) in found.items()
        }
    except (AttributeError, TypeError, ValueError):
        problem = f"the checkpoint's offset is damaged: 'left' holds {found!r}"
        raise UnsupportedFormat(problem) from None


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
    seen: Seen | None = field(default=None, compare=False)
    """What the plan saw of the stream, which has no range after that."""

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
        yield replace(found, first=first, end=end)
