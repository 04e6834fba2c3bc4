"""A run that boots more clusters than its pool has says which test asked."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, boots
from tests.cluster.pool import Discarded, Pool
from tests.cluster.waiting import wait_until
from tests.support import work
from tests.support.run_report import by_group, keep_logs, too_many, who_worked


@dataclass
class FakePool:
    """What a run's pool knows of clusters that could not be healed."""

    lost: list[Discarded] = field(default_factory=list)

    def discarded(self) -> list[Discarded]:
        return self.lost


def complaints(*lost: Discarded) -> list[str]:
    pool: Any = FakePool(list(lost))
    return too_many(pool)


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(boots.VARIABLE, str(tmp_path / "boots"))
    monkeypatch.delenv(boots.EXPECTED, raising=False)


def boot(cluster: str, monkeypatch: pytest.MonkeyPatch, test: str) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{test} (setup)")
    boots.note(cluster, 3, "4.0.5", 12.5)


def test_cluster_of_the_pool_may_be_booted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with boots.expected():
        boot("pool-healthy", monkeypatch, "tests/a.py::test_first")
        assert complaints() == []
        boot("pool-healthy", monkeypatch, "tests/a.py::test_second")
    (complaint,) = complaints()
    assert "pool-healthy was booted for tests/a.py::test_second" in complaint


def test_cluster_that_was_discarded_may_be_booted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with boots.expected():
        boot("pool-harmed", monkeypatch, "tests/a.py::test_first")
        boot("pool-harmed", monkeypatch, "tests/a.py::test_second")
    assert complaints(Discarded("pool-harmed", "test_first", "no leader")) == []


def test_boot_by_a_test_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    boot("run-1234", monkeypatch, "tests/a.py::test_of_its_own")
    (complaint,) = complaints()
    assert "tests/a.py::test_of_its_own" in complaint
    assert "boots_clusters" in complaint
    assert boots.noted()[0].seconds == 12.5


def test_cluster_that_a_fixture_could_not_make_ready_is_one_whose_logs_are_kept() -> None:
    pool, cluster = Pool("pool-1-1"), Cluster("somebody", "environment", None)
    using = pool._used(cluster)
    assert using.__enter__() in pool.in_use
    assert not using.__exit__(RuntimeError, RuntimeError("no virtual host"), None)
    assert (pool.in_use, pool.failed) == ([], [cluster])


def test_groups_are_told_by_what_all_their_tests_took() -> None:
    group_of = {"a": "harm", "b": "harm", "c": "spark", "d": "unit/x.py"}
    seconds = {"a": 2.0, "b": 3.0, "c": 4.0, "d": 0.5}
    assert by_group(seconds, group_of) == [("harm", 5.0), ("spark", 4.0), ("unit/x.py", 0.5)]


def test_work_is_told_by_folder_and_by_cluster() -> None:
    tests = {"tests/unit/x.py::a": 1.0, "tests/unit/maps/y.py::b": 2.0, "tests/spark/z.py::c": 5.0}
    assert who_worked(tests, {"healthy-4.0": 4.0}) == [
        ("tests/spark", 5.0),
        ("brokers: healthy-4.0", 4.0),
        ("tests/unit", 3.0),
        ("in all", 12.0),
    ]


def test_work_of_a_child_counts_while_it_runs_and_after() -> None:
    def worked() -> float:
        return work.done_here() - before

    before = work.done_here()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        here = time.process_time()
        wait_until(lambda: worked() - (time.process_time() - here) > 0.1)
    finally:
        busy.kill()
        at_the_end = worked()
        busy.wait()
    assert worked() >= at_the_end


def test_logs_are_kept_whatever_they_hold(tmp_path: Path) -> None:
    logging.getLogger("warren.test").warning("unknown customer %s", "Ann \ud83d")
    keep_logs(tmp_path / "kept", [])
    assert "customer Ann \\ud83d" in (tmp_path / "kept" / "warren.log").read_text()
