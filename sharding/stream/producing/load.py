"""Messages on their way into a partition, with all that goes along with each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sharding.stream.producing.report import Failure


@dataclass(frozen=True, slots=True)
class Load:
    """As many numbers as messages, and as many filters and ids if there are any."""

    messages: Sequence[bytes]
    numbers: Sequence[int]
    plain: bool
    """The messages are bodies, which are still to be encoded."""
    filters: Sequence[bytes | None] | None = None
    ids: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def longest(self) -> int:
        """The bytes of the largest message, and of the largest filter value."""
        longest = max(map(len, self.messages), default=0)
        if self.filters is not None:
            longest += max((len(each) for each in self.filters if each), default=0)
        return longest

    def part(self, start: int, stop: int) -> Load:
        """Those from `start` up to `stop`."""
        return replace(
            self,
            messages=self.messages[start:stop],
            numbers=self.numbers[start:stop],
            filters=None if self.filters is None else self.filters[start:stop],
            ids=None if self.ids is None else self.ids[start:stop],
        )

    def chosen(self, positions: Sequence[int]) -> Load:
        """Those at `positions`."""

        return replace(
            self,
            messages=[self.messages[position] for position in positions],
            numbers=[self.numbers[position] for position in positions],
            filters=None if self.filters is None else [self.filters[each] for each in positions],
            ids=None if self.ids is None else [self.ids[position] for position in positions],
        )

    def failures(self, stream: str, reason: Exception) -> Iterator[Failure]:
        """All of them, as failures."""
        for position, number in enumerate(self.numbers):
            publishing_id = None if self.ids is None else self.ids[position]
            yield Failure(number, stream, publishing_id, reason)
