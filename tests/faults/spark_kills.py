"""Drivers that copy rows, and ways to kill them and their workers."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cluster import wait_until
from tests.faults.spark_driver import Copy
from tests.machine import PROJECT

RUN_TIMEOUT = 240.0
_SHAPES: Iterator[dict[str, Any]] = itertools.cycle(
    [
        {"cores": "local[2,8]", "shuffled_into": 3, "tasks": 3, "read_partitions": 1},
        {"cores": "local[1,8]", "shuffled_into": 2, "tasks": 1, "read_partitions": 5},
        {"cores": "local[3,8]", "shuffled_into": 5, "tasks": 2, "read_partitions": 4},
    ]
)


class Driver:
    """The program `spark_driver`, in a session of its own. Each start has another shape."""

    def __init__(self, copy: Copy, log: Path) -> None:
        self._copy = copy
        self._log = log

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Nothing of it is left behind."""
        shaped = replace(self._copy, **next(_SHAPES))
        command = [sys.executable, "-m", "tests.faults.spark_driver", shaped.dumps()]
        with self._log.open("ab") as output:
            process = subprocess.Popen(
                command, cwd=PROJECT, stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield process
        finally:
            _kill_session(process)

    def kill_when(self, reached: Callable[[], bool]) -> None:
        """Start it, wait for a state in the middle of its work, and kill all of it."""
        with self.started() as process:
            wait_until(lambda: reached() or process.poll() is not None, RUN_TIMEOUT)
            assert process.poll() is None, self._said()

    def finish(self) -> int:
        """Run it to its end; a batch that fails ends it, and then it is started again.

        How many starts that took.
        """
        deadline = time.monotonic() + RUN_TIMEOUT
        for starts in itertools.count(1):
            with self.started() as process:
                if process.wait(timeout=max(1.0, deadline - time.monotonic())) == 0:
                    return starts
            assert time.monotonic() < deadline, self._said()
        raise AssertionError("not reached")

    def _said(self) -> str:
        return self._log.read_text()[-4_000:]


def kill_workers(process: subprocess.Popen[bytes]) -> int:
    """Kill -9 of every process that runs tasks; how many there were."""
    killed = 0
    for pid in _python_workers(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill -9 of the driver, its JVM and its Python workers at once."""
    for pid in _members_of(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=30)


def _members_of(session: int) -> list[int]:
    """Every process of a session, also those with a group of their own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    found.append(int(entry.name))
    return found


def _python_workers(session: int) -> list[int]:
    """Children of Spark's Python daemon."""
    parents: dict[int, int] = {}
    daemons = set()
    for pid in _members_of(session):
        with suppress(OSError, IndexError):
            fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
            parents[pid] = int(fields[1])
            if b"pyspark.daemon" in (Path("/proc") / str(pid) / "cmdline").read_bytes():
                daemons.add(pid)
    return [pid for pid, parent in parents.items() if parent in daemons and pid in daemons]
