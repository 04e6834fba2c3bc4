"""Running a worker in the foreground: until it is told to stop, or a signal says so."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Somebody's wish that the worker stops, which another thread waits for.

    `ask` may be called from a signal handler: a threading.Event could be locked at that moment, by
    the very thread that the handler interrupts; a SimpleQueue is made for this.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ask(self) -> None:
        self._asked.put(None)

    def wait(self) -> None:
        self._asked.get()
        self._asked.put(None)  # for whoever waits too


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT; at the second one the process ends as usual.

    Signals reach the main thread only; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(_: int, __: FrameType | None) -> None:
        restore()
        stop()

    for number in SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()
