"""Time that a test moves by hand, so that no machine is too slow for it.

What a test only waits for, another thread's next step, it waits for with `PATIENCE`: only a hang
takes as long, and it is told as a failure.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any


class HandClock:
    """Stands still until a test moves it; `looks` counts how often it was read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            self.looks += 1
            return self.now


@dataclass
class HandTimer:
    due: float
    job: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class HandRecovery:
    """In place of a `Recovery`: runs its jobs when a test lets time pass, on the test's thread."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[HandTimer] = []

    def clock(self) -> float:
        return self.now

    def schedule(self, delay: float, job: Callable[[], None]) -> HandTimer:
        timer = HandTimer(self.now + delay, job)
        self._timers.append(timer)
        return timer

    soon = schedule

    def beside(self, _node: object, job: Callable[[], None]) -> None:
        self.schedule(0, job)

    def run(self, seconds: float = 0.0) -> None:
        """Do what is due, and what becomes due within the next seconds."""
        until = self.now + seconds
        while due := [timer for timer in self._timers if timer.due <= until]:
            timer = min(due, key=lambda each: each.due)
            self._timers.remove(timer)
            self.now = max(self.now, timer.due)
            if not timer.cancelled:
                timer.job()
        self.now = until


class _NoWaiting(selectors.DefaultSelector):
    """Says at once that the time to wait has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += max(timeout or 0.0, 0.0)
        found: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        return found


def run_without_waiting(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` on a loop whose clock jumps to the next thing that is due.

    However long the machine takes, no time passes while there is something to do.
    """
    selector = _NoWaiting()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main)
