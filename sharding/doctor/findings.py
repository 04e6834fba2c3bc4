"""What a check says: pure values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
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


OLDEST = (3, 10)
_CHECK = "version"


@dataclass(frozen=True, slots=True)
class Feature:
    """What needs a version, and what happens below it."""

    since: tuple[int, int]
    what: str
    without: str


FEATURES = (
    Feature(
        (3, 11),
        "single active consumers of streams",
        "single_active=True and named groups on streams are refused",
    ),
    Feature((3, 11), "stream statistics", "StreamEnvironment.stats is refused"),
    Feature((3, 13), "filters of streams", "filtering=True is refused"),
    Feature(
        (3, 13),
        "super streams made over the stream port",
        "they are made over AMQP, so StreamEnvironment needs amqp_url",
    ),
)


def parsed(version: str) -> tuple[int, ...]:
    """
    >>> parsed("4.0.5"), parsed("3.13.0-rc.2"), parsed("unknown")
    ((4, 0, 5), (3, 13, 0), ())
    """
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def judge_versions(versions: Mapping[str, str]) -> list[Finding]:
    """Of versions by who said it, an address or a node."""
    wanted = f"RabbitMQ {_text(OLDEST)} or later"
    findings: list[Finding] = []
    for version in sorted(set(versions.values()), key=parsed):
        subject = ", ".join(sorted(who for who, said in versions.items() if said == version))
        number = parsed(version)
        if not number:
            fix = "Ask for the version on a node: 'rabbitmqctl version'."
            findings.append(warning(_CHECK, subject, wanted, f"{version or 'no version'}", fix))
        elif number < OLDEST:
            fix = f"Upgrade the brokers to {_text(OLDEST)} or later; nothing else is supported."
            findings.append(problem(_CHECK, subject, wanted, version, fix))
        elif missing := [each for each in FEATURES if number < each.since]:
            findings.append(_lacking(subject, version, missing))
        else:
            findings.append(ok(_CHECK, subject, wanted, version))
    if len({parsed(version)[:2] for version in versions.values() if parsed(version)}) > 1:
        found = ", ".join(sorted(set(versions.values()), key=parsed))
        fix = "Finish the upgrade; until then count on what the oldest can do."
        findings.append(warning(_CHECK, "the cluster", "one version", found, fix))
    return findings


def _lacking(subject: str, version: str, missing: Iterable[Feature]) -> Finding:
    told = "; ".join(
        f"no {each.what} before {_text(each.since)}: {each.without}" for each in missing
    )
    newest = max(each.since for each in missing)
    fix = f"Upgrade the brokers to {_text(newest)} or later, or do without."
    return warning(_CHECK, subject, "every feature", f"{version}: {told}", fix)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
