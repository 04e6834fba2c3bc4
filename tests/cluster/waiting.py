"""Waiting for a condition, with a deadline and a reason."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], timeout: float, explain: Callable[[], str] = lambda: ""
) -> None:
    """Return when `condition()` is true; after `timeout` seconds raise what `explain()` says."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {explain()}")
        time.sleep(0.1)
