"""What a run tells its developer: which tests took the time, who worked for how long, what each
boot cost, and where the logs of a failure lie.

A run that boots more clusters than the pool has fails, and says which test asked: a test that boots
its own costs everybody half a minute for ever.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

import pytest

from tests.cluster import Cluster, boots, folders
from tests.cluster.pool import Pool
from tests.machine import PROJECT
from tests.support import scheduling, work

POOL = pytest.StashKey[Pool]()
BROKERS = pytest.StashKey[work.Brokers]()
FAILURES = PROJECT / ".failures"

_TAIL = 1_000_000
_RECORDS = 20_000
_LONGEST = 12
_WORK = "seconds of work"

_seconds: dict[str, float] = defaultdict(float)
"""How long each test took, with what was made ready for it."""
_worked: dict[str, float] = defaultdict(float)
"""How much of a core the process of each test, and what it started, took meanwhile."""


class _Recent(logging.Handler):
    """The newest records of Warren's own loggers, of the test that runs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(threadName)s %(name)s %(message)s"))
        self.lines: deque[str] = deque(maxlen=_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


_recent = _Recent()


class _Meter:
    """What this process has worked since the last reading."""

    def __init__(self) -> None:
        self._before = 0.0

    def read(self) -> float:
        now = work.done_here()
        since, self._before = now - self._before, now
        return max(since, 0.0)  # less, if something it started was left to init


_meter = _Meter()


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of the processes that a run has for its tests."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if not is_worker(config):
        shutil.rmtree(FAILURES, ignore_errors=True)
        config.stash[BROKERS] = work.Brokers(f"{config.stash[POOL].name}-")
    logging.getLogger("warren").addHandler(_recent)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not is_worker(config):
        config.stash[BROKERS].close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _meter.read()
    _recent.lines.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.user_properties.append((_WORK, _meter.read()))
    if report.failed:
        folder = FAILURES / re.sub(r"[^\w.-]+", "-", item.nodeid)
        pool = item.config.stash[POOL]
        keep_logs(folder, [*pool.in_use, *pool.failed])
        pool.failed.clear()
        report.sections.append(("logs", f"the brokers' and our own: {folder}"))
    return report


def keep_logs(folder: Path, clusters: Iterable[Cluster]) -> None:
    """The newest of what Warren logged, and what the brokers did."""
    folder.mkdir(parents=True, exist_ok=True)
    # A log may hold anything, half an emoji say, and must not end the run with that.
    text = "".join(f"{line}\n" for line in _recent.lines)
    (folder / "warren.log").write_text(text, "utf-8", "backslashreplace")
    for cluster in clusters:
        top = folders.cluster_folder(cluster.name)
        # Not all below: what brokers store comes and goes while one looks.
        for log in [*top.glob("*.log"), *top.glob("*/*.log"), *top.glob("*/log/*.log")]:
            target = folder / cluster.name / log.relative_to(top)
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                target.write_bytes(log.read_bytes()[-_TAIL:])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    for name, value in report.user_properties:
        if name == _WORK and isinstance(value, float):
            _worked[report.nodeid] += value


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not is_worker(session.config) and too_many(session.config.stash[POOL]):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    pool = terminalreporter.config.stash[POOL]
    brokers = terminalreporter.config.stash[BROKERS]
    if _seconds:
        group_of = scheduling.groups(pool)
        worked = dict(by_group(_worked, group_of))
        terminalreporter.section("longest groups: no run is shorter than its longest")
        for group, seconds in by_group(_seconds, group_of)[:_LONGEST]:
            terminalreporter.line(f"{seconds:5.0f} s, {worked[group]:4.0f} s of work  {group}")
        terminalreporter.section("work: no run is shorter than all of it on all cores")
        for who, seconds in who_worked(_worked, brokers.by_cluster()):
            terminalreporter.line(f"{seconds:5.0f} s  {who}")
    if not (booted := boots.noted()):
        return
    terminalreporter.section("clusters booted")
    for boot in booted:
        name = boot.cluster.removeprefix(f"{pool.name}-")
        nodes = f"{boot.nodes} node{'s' * (boot.nodes > 1)}"
        asked = f"{nodes} of {boot.version}, first asked for by {boot.asked_by}"
        terminalreporter.line(f"{boot.seconds:5.1f} s  {name}: {asked}")
    for lost in pool.discarded():
        name = lost.cluster.removeprefix(f"{pool.name}-")
        terminalreporter.line(f"discarded  {name}, as {lost.test} left it: {lost.reason}")
    for complaint in too_many(pool):
        terminalreporter.line(complaint, red=True)


def by_group(seconds: Mapping[str, float], group_of: Mapping[str, str]) -> list[tuple[str, float]]:
    """What the tests of each group, which run one after the other, took; the most first."""
    took: dict[str, float] = defaultdict(float)
    for test, each in seconds.items():
        took[group_of[test]] += each
    return sorted(took.items(), key=itemgetter(1), reverse=True)


def who_worked(tests: Mapping[str, float], brokers: Mapping[str, float]) -> list[tuple[str, float]]:
    """Folders of tests and clusters, the most work first, and all of it."""
    total: dict[str, float] = defaultdict(float)
    for test, seconds in tests.items():
        total["/".join(test.split("/")[:2])] += seconds
    for cluster, seconds in brokers.items():
        total[f"brokers: {cluster}"] += seconds
    return [
        *sorted(total.items(), key=itemgetter(1), reverse=True),
        ("in all", sum(total.values())),
    ]


def too_many(pool: Pool) -> list[str]:
    """Boots that the pool should have spared, each with the test that asked."""
    replaced = Counter(lost.cluster for lost in pool.discarded())
    times: Counter[str] = Counter()
    complaints = []
    for boot in boots.noted():
        times[boot.cluster] += 1
        if not boot.expected or times[boot.cluster] > 1 + replaced[boot.cluster]:
            complaints.append(
                f"{boot.cluster} was booted for {boot.asked_by}: take a cluster of the pool "
                "(fixtures cluster, nodes, harmed, …), or the fixture boots_clusters if clusters "
                "themselves are what it tests"
            )
    return complaints
