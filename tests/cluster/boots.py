"""Which clusters a test run booted, how long each took, and who asked for it.

A run's processes write into one file, named in the environment; without it nothing is kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "WARREN_BOOTS"
EXPECTED = "WARREN_BOOTS_EXPECTED"
"""Set while somebody may boot a cluster: the pool, and tests of clusters themselves."""


@dataclass(frozen=True)
class Boot:
    cluster: str
    nodes: int
    version: str
    seconds: float
    asked_by: str
    """The test that was running."""
    expected: bool


def note(cluster: str, nodes: int, version: str, seconds: float) -> None:
    if path := os.environ.get(VARIABLE):
        # pytest says which test runs, and in which phase, to subprocesses too.
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        expected = EXPECTED in os.environ
        line = json.dumps(asdict(Boot(cluster, nodes, version, seconds, test, expected)))
        with Path(path).open("a") as file:  # one short write, so lines do not mix
            file.write(line + "\n")


@contextmanager
def expected() -> Iterator[None]:
    before = os.environ.get(EXPECTED)
    os.environ[EXPECTED] = "yes"
    try:
        yield
    finally:
        if before is None:
            del os.environ[EXPECTED]


def noted() -> list[Boot]:
    path = os.environ.get(VARIABLE)
    if not path or not Path(path).exists():
        return []
    return [Boot(**json.loads(line)) for line in Path(path).read_text().splitlines()]
