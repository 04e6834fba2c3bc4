"""What became of published messages: of each, and of all since the last report.

Every message gets one outcome and stands in one report. What has none yet when a report is made is
`pending` there: counted, and told of by a later one. No message is called stored before the broker
has confirmed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from sharding.errors import OutcomeUnknown, RemoteError
from sharding.maps.slots import Key

PUBLISHING_COUNTED = ("published", "confirmed", "nacked", "returned", "unknown")
"""What every channel counts."""


class Outcome(StrEnum):
    STORED = "stored"
    REFUSED = "refused"
    """Not stored, and never will be; it may be sent again."""
    UNROUTABLE = "unroutable"
    """No queue and no partition is there to take it; so it is not stored either."""
    UNKNOWN = "unknown"
    """Sent, and whether it was stored is not known. Sending it again may store it twice."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one message."""

    number: int
    """As `publish` or `send` returned it."""
    outcome: Outcome
    reason: str = ""
    """Why it is not stored."""
    key: Key | None = None
    """Of a message of a publisher; a producer keeps no keys."""
    stream: str | None = None
    """Of a message of a producer; None if its key belongs to no partition."""
    publishing_id: int | None = None
    """None if it never got one."""
    cause: Exception | None = field(default=None, repr=False, compare=False)
    """What `reason` says, where it was an error; it tells whether to try again."""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the messages that got an outcome since the report before."""

    stored: int = 0
    refused: int = 0
    unroutable: int = 0
    unknown: int = 0
    pending: int = 0
    """Messages without an outcome when the time was up; a later report has them."""
    not_stored: tuple[Result, ...] = ()
    """Each message that is refused, unroutable or unknown, up to as many as are remembered."""

    @property
    def omitted(self) -> int:
        """How many results are counted, but were too many to remember."""
        return self.refused + self.unroutable + self.unknown - len(self.not_stored)

    @property
    def all_stored(self) -> bool:
        return not (self.refused or self.unroutable or self.unknown or self.pending)

    def raise_for_failures(self) -> None:
        """`NotStored` or `PerhapsNotStored`, unless every message is stored."""
        if self.unknown or self.pending:
            raise PerhapsNotStored(self)
        if not self.all_stored:
            raise NotStored(self)

    def __str__(self) -> str:
        """
        >>> print(Report(7, refused=1, not_stored=(Result(3, Outcome.REFUSED, "too late"),)))
        7 stored, 1 refused; the first refused is message 3: too late
        """
        counts = {
            "refused": self.refused,
            "unroutable": self.unroutable,
            "unknown": self.unknown,
            "pending": self.pending,
        }
        failed = [f"{count} {outcome}" for outcome, count in counts.items() if count]
        text = ", ".join([f"{self.stored} stored", *failed])
        worst = _worst(self)
        if worst is None:
            return text
        where = "" if worst.stream is None else f" to {worst.stream!r}"
        return f"{text}; the first {worst.outcome} is message {worst.number}{where}: {worst.reason}"


class NotStored(RemoteError):
    """Some messages are not stored, and may be sent again; all others are. `report` says which."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(
            f"not every message is stored: {report}. Those that are not may be sent again; the "
            "error's `report` names them, as flush()'s does"
        )
        _chain(self, report)

    def __reduce__(self) -> tuple[type[NotStored], tuple[Report]]:
        return type(self), (self.report,)


class PerhapsNotStored(OutcomeUnknown):
    """The outcome of some messages is unknown, or still to come. `report` says of which, and which
    are not stored."""

    def __init__(self, report: Report) -> None:
        self.report = report
        advice = []
        if report.unknown:
            advice.append(
                "Sending what is unknown again may store it twice; the error's `report` names it, "
                "as flush()'s does"
            )
        if report.pending:
            advice.append("What is pending may yet be stored: the report of another flush() has it")
        super().__init__(f"not every message is known to be stored: {report}. {'. '.join(advice)}")
        _chain(self, report)

    def __reduce__(self) -> tuple[type[PerhapsNotStored], tuple[Report]]:
        return type(self), (self.report,)


def _worst(report: Report) -> Result | None:
    """The first message of unknown outcome, or else the first that is not stored."""
    unknown = (each for each in report.not_stored if each.outcome is Outcome.UNKNOWN)
    return next(unknown, report.not_stored[0] if report.not_stored else None)


def _chain(error: Exception, report: Report) -> None:
    # When it is made, not where it is raised: so the cause is still there in another process.
    worst = _worst(report)
    if worst is not None and worst.cause is not None:
        error.__cause__ = worst.cause


class Tally:
    """Collects outcomes until a report takes them, and remembers results within a bound. Its owner
    holds a lock, or is the only thread."""

    def __init__(self, max_results: int) -> None:
        self._max_results = max_results
        self._clear()

    def _clear(self) -> None:
        self.stored = 0
        """Whoever reads confirms adds to it, once for all that came together: stored messages are
        many, and cost nothing else here."""
        self._failed: Counter[Outcome] = Counter()
        self._results: list[Result] = []

    def add(self, results: Iterable[Result]) -> None:
        """Messages that are not stored."""
        for result in results:
            self._failed[result.outcome] += 1
            if len(self._results) < self._max_results:
                self._results.append(result)

    def absorb(self, other: Tally) -> None:
        """Take over what another one has collected; it starts again from nothing."""
        self.include(other)
        other._clear()

    def include(self, other: Tally) -> None:
        """Add what another one has collected, which keeps it."""
        self.stored += other.stored
        self._failed.update(other._failed)
        self._results += other._results[: self._max_results - len(self._results)]

    def take_report(self, pending: int = 0) -> Report:
        """Report, and start again from nothing."""
        report = self.report(pending)
        self._clear()
        return report

    def report(self, pending: int = 0) -> Report:
        """Report, and keep what is told."""
        counts = {str(outcome): count for outcome, count in self.counts.items()}
        return Report(**counts, pending=pending, not_stored=tuple(self._results))

    @property
    def counts(self) -> dict[Outcome, int]:
        """Outcomes that no report has taken."""
        return {each: self._failed[each] for each in Outcome} | {Outcome.STORED: self.stored}
