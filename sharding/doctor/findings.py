"""What a check says: pure values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

SILENCE = (
    "Look for a node that hangs or is overloaded ('rabbitmqctl cluster_status' tells of alarms and "
    "partitions), then try again; one hanging node keeps the others from answering too."
)
"""What to do when no answer comes in time."""


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but not all of it, or it could not be looked at."""
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of one thing. `fix` is a whole sentence; there is none where all is well."""

    check: str
    subject: str
    verdict: Verdict
    wanted: str
    found: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


def ok(check: str, subject: str, wanted: str, found: str) -> Finding:
    return Finding(check, subject, Verdict.OK, wanted, found)


def warning(check: str, subject: str, wanted: str, found: str, fix: str) -> Finding:
    return Finding(check, subject, Verdict.WARNING, wanted, found, fix)


def problem(check: str, subject: str, wanted: str, found: str, fix: str) -> Finding:
    return Finding(check, subject, Verdict.PROBLEM, wanted, found, fix)


def summary(findings: Iterable[Finding]) -> str:
    """
    >>> summary([ok("login", "a", "", ""), ok("login", "b", "", "")])
    '0 problems, 0 warnings, 2 ok'
    """
    counts = Counter(finding.verdict for finding in findings)
    problems, warnings = counts[Verdict.PROBLEM], counts[Verdict.WARNING]
    return (
        f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}, "
        f"{counts[Verdict.OK]} ok"
    )
