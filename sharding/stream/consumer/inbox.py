"""Chunks on their way from the connections' reading threads to the application, bounded and fair.

Each partition has a lane. The rules:

* A lane holds as many chunks as the broker has credit for. Credit goes back when a chunk is taken,
  so a slow application stops the broker, not the memory of this process. A broker that sends more
  than `capacity` chunks is broken.
* A lane's position is the offset after the last chunk taken. It moves in the same step as the
  chunks leave, so whoever subscribes again at the position loses and repeats nothing.
* A lane listens to one source at a time, the subscription that is current. When another takes
  over, what still waits is dropped (the position is before it, so it is sent again), and what the
  old one still delivers is not let in.
* A lane can be shut, for a single active consumer that is not the active one: chunks are dropped,
  and none is taken. Each shutting begins a new tenure; what was taken in an older one is no longer
  the application's to see.
* When a lane is opened the first chunk to come may be a *stray*: a broker that asks who is active
  already goes on sending where it was, until it has read the answer. So the first chunk is taken
  alone, and unless it holds the place to go on at, somebody looks whether it is the next one; if it
  is not, it is `put_back`, which is to forget it.
* All chunks that wait in one lane are taken together (within bounds), since many small chunks
  cost less as one batch. Lanes take turns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sharding.stream.messages.chunk import ChunkHeader
from sharding.stream.protocol.constants import Limits

_SIGNALS_SEEN_EVERY = 1.0
BATCH_CHUNKS = 64

Gap = tuple[int, int]


class _Arrived(NamedTuple):
    first: int
    end: int
    chunk: memoryview


class Lane:
    """One partition's place in the inbox. Only the inbox changes it, but for `handed_out` and
    `witness`."""

    def __init__(self, stream: str, position: int | None = None, *, shut: bool = False) -> None:
        self.stream = stream
        self.position = position
        """The first offset that has not been taken; None before the first chunk."""
        self.handed_out = position
        """The first offset that the application has not seen. Behind `position` while it goes
        through what it took message by message; written by the application's thread alone."""
        self.shut = shut
        self.tenure = 0
        self.owed = 0
        """Chunks that were dropped, and for which the broker has not got its credit back."""
        self.begun = True
        """Whether what comes follows on what was taken; not so from opening to the next chunk."""
        self.witness: ChunkHeader | None = None
        """A chunk of the stream that was read, or was there when reading began: none other ever
        has its offset, unless the stream is made anew."""
        self._source: object = None
        self._waiting: deque[_Arrived] = deque()
        self._in_turn = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def __repr__(self) -> str:
        gate = ", shut" if self.shut else ""
        return f"<Lane {self.stream} at {self.position}, {self.waiting} waiting{gate}>"


@dataclass(frozen=True, slots=True)
class Taken:
    """Chunks of one lane, now in the hands of the application."""

    lane: Lane
    source: object
    tenure: int
    first: int
    """Messages at lower offsets were handed out before."""
    end: int
    chunks: Sequence[memoryview]
    gaps: tuple[Gap, ...]
    """Offsets that no chunk holds, from and up to; they may never have been messages."""
    place: int | None = None
    """The lane's position before."""
    may_be_stray: bool = False
    """Whether this is the first of a tenure, and may not be what comes next from `place` on."""

    @property
    def void(self) -> bool:
        """Whether the partition has gone to another consumer since."""
        return self.tenure != self.lane.tenure


class Inbox:
    """The hand-over for all partitions of one consumer."""

    def __init__(
        self,
        capacity: int,
        *,
        batch_chunks: int = BATCH_CHUNKS,
        batch_bytes: int = Limits.batch_max,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._batch_chunks = batch_chunks
        self._batch_bytes = batch_bytes
        self._clock = clock
        # Leaving a condition is a call, which a signal's exception may come before; leaving a plain
        # lock is none, so it is always free again.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ready: deque[Lane] = deque()
        self._sleepers = 0
        self._failure: Exception | None = None
        self._woken = False
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def failed(self) -> bool:
        """Whether `take` raises, after what waits."""
        return self._failure is not None

    def listen(self, lane: Lane, source: object) -> int | None:
        """Let `source` alone fill the lane from now on; returns where it has to begin."""
        with self._lock:
            lane._source = source
            lane._waiting.clear()
            lane.owed = 0  # the new source begins with its own credit
            return lane.position

    def place(self, lane: Lane, position: int) -> None:
        """Say where a lane begins that had no position yet."""
        with self._lock:
            if lane.position is None:
                lane.position = lane.handed_out = position

    def put(self, lane: Lane, source: object, first: int, end: int, chunk: memoryview) -> bool:
        """Add a chunk; False if the lane is full, which only a broken broker brings about."""
        with self._lock:
            if lane._source is not source or self._closed or self._failure is not None:
                return True  # what comes after a failure would be handed out before it
            if lane.shut:  # it was sent before we said where to go on
                lane.owed += 1
                return True
            if len(lane._waiting) >= self._capacity:
                return False
            lane._waiting.append(_Arrived(first, end, chunk))
            self._line_up(lane)
        return True

    def take(self, deadline: float | None) -> Taken | None:
        """The chunks of the lane whose turn it is; None at the deadline, when woken or closed.

        A failure is raised once everything that came before it is taken.
        """
        while True:
            with self._lock:
                while self._ready:
                    lane = self._ready.popleft()
                    lane._in_turn = False
                    if lane._waiting and not lane.shut:
                        return self._take_from(lane)
                if self._failure is not None:
                    raise self._failure
                is_late = deadline is not None and self._clock() >= deadline
                if self._closed or self._woken or is_late:
                    self._woken = False
                    return None
            self.wait(deadline)

    def wait(self, deadline: float | None) -> None:
        """Until `take` has something to say. Who is interrupted meanwhile has missed nothing."""
        with self._lock:
            while not (self._ready or self._failure or self._closed or self._woken):
                left = None if deadline is None else deadline - self._clock()
                if left is not None and left <= 0:
                    return
                self._sleepers += 1
                try:
                    self._changed.wait(_slice(left))
                finally:
                    self._sleepers -= 1

    def wake(self) -> None:
        """Let who waits in `take`, or comes next and finds nothing, return with nothing."""
        with self._lock:
            self._woken = True
            self._changed.notify_all()

    def shut(self, lane: Lane) -> None:
        """Hand out no more of this lane; what waits is dropped."""
        with self._lock:
            lane.shut = True
            lane.tenure += 1
            lane.owed += len(lane._waiting)
            lane._waiting.clear()

    def open(self, lane: Lane, tenure: int, position: int | None) -> int:
        """Hand out again, from `position`, unless it was shut again since `tenure`.

        Returns for how many dropped chunks credit is owed.
        """
        with self._lock:
            if lane.tenure != tenure:
                return 0
            lane.shut = False
            lane.begun = False
            lane.position = lane.handed_out = position
            owed, lane.owed = lane.owed, 0
            return owed

    def put_back(self, stray: Taken) -> None:
        """Go on as if this had not come: what is missing before it is on its way."""
        with self._lock:
            if not stray.void:
                stray.lane.position = stray.place
                stray.lane.begun = False

    def fail(self, failure: Exception) -> None:
        """End with an error, after what waits. The first one counts."""
        with self._lock:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _line_up(self, lane: Lane) -> None:
        if not lane._in_turn and lane._waiting:
            lane._in_turn = True
            self._ready.append(lane)
            if self._sleepers:
                self._changed.notify()

    def _take_from(self, lane: Lane) -> Taken:
        waiting, place = lane._waiting, lane.position
        position = first = waiting[0].first if place is None else place
        gaps: list[Gap] = []
        chunks: list[memoryview] = []
        size = 0
        while waiting and len(chunks) < (self._batch_chunks if lane.begun else 1):
            size += len(waiting[0].chunk)
            if chunks and size > self._batch_bytes:
                break
            arrived = waiting.popleft()
            if arrived.first > position:
                gaps.append((position, arrived.first))
            position = max(position, arrived.end)
            chunks.append(arrived.chunk)
        may_be_stray = not lane.begun and (bool(gaps) or place is None)
        lane.begun = lane.begun or position > first
        lane.position = position
        self._line_up(lane)
        taken = (lane, lane._source, lane.tenure, first, position, chunks, tuple(gaps))
        return Taken(*taken, place, may_be_stray)


def _slice(left: float | None) -> float | None:
    """How long to wait at once. Python sees a signal that comes just before the main thread begins
    to wait only when that wait ends, so there it is not a long one."""
    if threading.current_thread() is not threading.main_thread():
        return left
    return _SIGNALS_SEEN_EVERY if left is None else min(left, _SIGNALS_SEEN_EVERY)
