"""What became of the messages of a producer: how many are stored, and which are not.

* *stored*: the broker has confirmed it.
* *refused*: it is not in the stream, and never will be.
* *unknown*: it was sent, and no outcome came. It may be stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sharding.errors import OutcomeUnknown, RemoteError

MAX_FAILURES_KEPT = 100_000
"""Of refused and of unknown messages each, between two flushes; further ones are counted only."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A message that is not known to be stored."""

    number: int
    """As `send()` returned it."""
    stream: str
    publishing_id: int | None
    """None if it never got one."""
    reason: Exception


class NotStored(RemoteError):
    """Some messages were refused; all others are stored. `report` says which."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(report.summary())

    def __reduce__(self) -> tuple[type[NotStored], tuple[Report]]:
        return type(self), (self.report,)


class PerhapsNotStored(OutcomeUnknown):
    """The outcome of some messages is unknown. `report` says which, and which were refused."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(report.summary())

    def __reduce__(self) -> tuple[type[PerhapsNotStored], tuple[Report]]:
        return type(self), (self.report,)


@dataclass(frozen=True)
class Report:
    """Outcomes since the last report."""

    stored: int = 0
    refused: tuple[Failure, ...] = ()
    unknown: tuple[Failure, ...] = ()
    refused_count: int = 0
    """More than `refused` holds only if very many were refused since the last flush."""
    unknown_count: int = 0

    def raise_for_failures(self) -> None:
        """`NotStored` or `PerhapsNotStored`, unless every message is stored."""
        if self.unknown_count:
            raise PerhapsNotStored(self) from self.unknown[0].reason
        if self.refused_count:
            raise NotStored(self) from self.refused[0].reason

    def summary(self) -> str:
        """
        >>> Report(stored=7).summary()
        '7 messages are stored'
        """
        parts = [f"{self.stored} messages are stored"]
        for count, failures, what in (
            (self.refused_count, self.refused, "refused"),
            (self.unknown_count, self.unknown, "of unknown outcome"),
        ):
            if count:
                first = failures[0]
                parts.append(
                    f"{count} {what}, first number {first.number} of {first.stream!r}: "
                    f"{first.reason}"
                )
        return "; ".join(parts)


class Tally:
    """Collects outcomes until a report is made of them. Its owner holds a lock."""

    def __init__(self) -> None:
        self._reported = {"stored": 0, "refused": 0, "unknown": 0}
        self._clear()

    @property
    def totals(self) -> dict[str, int]:
        """Outcomes since the beginning. What a report calls unknown and may yet be stored is not
        among them."""
        now = {
            "stored": self.stored,
            "refused": self._refused_count,
            "unknown": self._unknown_count,
        }
        return {outcome: count + now[outcome] for outcome, count in self._reported.items()}

    def _clear(self) -> None:
        self.stored = 0
        self._refused: list[Failure] = []
        self._unknown: list[Failure] = []
        self._refused_count = self._unknown_count = 0

    def refuse(self, failures: Iterable[Failure]) -> None:
        self._refused_count += _keep(self._refused, failures)

    def give_up(self, failures: Iterable[Failure]) -> None:
        self._unknown_count += _keep(self._unknown, failures)

    def report(self, still_unknown: Iterable[Failure] = ()) -> Report:
        """All outcomes so far, and a new beginning. `still_unknown` may yet get an outcome."""
        self._reported = self.totals
        self.give_up(still_unknown)
        made = Report(
            self.stored,
            tuple(self._refused),
            tuple(self._unknown),
            self._refused_count,
            self._unknown_count,
        )
        self._clear()
        return made


def _keep(kept: list[Failure], failures: Iterable[Failure]) -> int:
    count = 0
    for failure in failures:
        count += 1
        if len(kept) < MAX_FAILURES_KEPT:
            kept.append(failure)
    return count
