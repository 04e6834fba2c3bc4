"""Up to which offset everything is handled, though handlers finish in any order. Pure.

    begun     10 11 12 14 15        13 was never a message: stored offsets take an offset too
    handled   10 11    14
    mark         11

The mark is what may be stored: whoever goes on after it repeats what is behind it and was handled
already (14), and misses nothing. Beginnings come in rising order, endings in any.
"""

from __future__ import annotations

from collections import deque

from sharding.errors import InvalidInput


class Watermark:
    """Of one partition, while it is this worker's turn."""

    def __init__(self, mark: int | None = None) -> None:
        self.mark = mark
        """The last offset that is handled together with all before it; None if none is."""
        self.in_hand = 0
        """Messages begun of which the outcome is not known."""
        self._open: deque[int] = deque()
        self._handled: set[int] = set()

    def begin(self, offset: int) -> None:
        last = self._open[-1] if self._open else self.mark
        if last is not None and offset <= last:
            raise InvalidInput("offset", f"must be above {last}, the one begun before", offset)
        self._open.append(offset)
        self.in_hand += 1

    def handled(self, offset: int) -> int:
        """Returns by how many messages the mark moved."""
        self.in_hand -= 1
        self._handled.add(offset)
        moved = 0
        while self._open and self._open[0] in self._handled:
            self.mark = self._open.popleft()
            self._handled.remove(self.mark)
            moved += 1
        return moved

    def given_back(self, offset: int) -> None:  # noqa: ARG002
        """It will not be handled in this turn, so the mark will never pass it."""
        self.in_hand -= 1
