"""What became of published messages: of each, and of all since the last report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sharding.maps.slots import Key

PUBLISHING_COUNTED = ("published", "confirmed", "nacked", "returned", "unknown")
"""What every channel counts."""


class Outcome(StrEnum):
    STORED = "stored"
    REFUSED = "refused"
    """Not sent: nothing has happened, and it may be published again."""
    UNROUTABLE = "unroutable"
    """The broker gave it back: no queue has it."""
    UNKNOWN = "unknown"
    """Sent, and whether it was stored is not known. Publishing it again may store it twice."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one message."""

    number: int
    outcome: Outcome
    reason: str
    key: Key


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the messages that were settled since the report before."""

    stored: int = 0
    refused: int = 0
    unroutable: int = 0
    unknown: int = 0
    pending: int = 0
    """Messages that are not settled yet; a later report has them."""
    not_stored: tuple[Result, ...] = ()
    """Each message that is not stored, up to the number that the publisher may remember."""

    @property
    def omitted(self) -> int:
        """How many results are counted, but were too many to remember."""
        return self.refused + self.unroutable + self.unknown - len(self.not_stored)

    @property
    def all_stored(self) -> bool:
        return not (self.refused or self.unroutable or self.unknown or self.pending)

    def __str__(self) -> str:
        return (
            f"{self.stored} stored, {self.refused} refused, {self.unroutable} unroutable, "
            f"{self.unknown} unknown, {self.pending} pending"
        )


class Tally:
    """Counts of outcomes, and the results worth remembering, within a bound."""

    def __init__(self, max_results: int) -> None:
        self._max_results = max_results
        self.counts = dict.fromkeys(Outcome, 0)
        self.results: list[Result] = []
        self._reported = dict.fromkeys(Outcome, 0)

    @property
    def totals(self) -> dict[str, int]:
        """Outcomes since the beginning, those that reports have taken included."""
        return {str(each): self._reported[each] + count for each, count in self.counts.items()}

    def remember(self, result: Result) -> None:
        if len(self.results) < self._max_results:
            self.results.append(result)

    def absorb(self, other: Tally) -> None:
        """Take over what another one has counted; it starts again from nothing."""
        for outcome, count in other.counts.items():
            self.counts[outcome] += count
        self.results += other.results[: self._max_results - len(self.results)]
        other.clear()

    def clear(self) -> None:
        self.counts = dict.fromkeys(Outcome, 0)
        self.results = []

    def take_report(self, pending: int) -> Report:
        """Report, and start again from nothing but the totals."""
        report = self.report(pending)
        for outcome, count in self.counts.items():
            self._reported[outcome] += count
        self.clear()
        return report

    def report(self, pending: int = 0) -> Report:
        counts = {str(outcome): count for outcome, count in self.counts.items()}
        return Report(**counts, pending=pending, not_stored=tuple(self.results))
