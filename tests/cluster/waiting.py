"""Waiting for a condition, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

PATIENCE = 60.0
"""After this long a thing has hung. On a machine shared with others nothing less can be told from
being slow, so no test waits for less where something has to happen."""


def wait_until(
    condition: Callable[[], Found],
    timeout: float = PATIENCE,
    explain: Callable[[], str] = lambda: "",
) -> Found:
    """Return `condition()` when it is true; after `timeout` seconds raise what `explain()` says."""
    deadline = time.monotonic() + timeout
    pause = 0.001  # what another thread does is seen at once, a broker is not asked all the time
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {explain()}")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return found
