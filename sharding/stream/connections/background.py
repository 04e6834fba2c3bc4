"""The threads of an environment that do things later: a timer, and a few workers for its jobs.

One `Recovery` serves every producer and consumer of an environment, so that a thousand of them
cost a handful of threads. A job goes into one of these lanes, which never wait for each other:

* `schedule`: work that may wait for the network, such as connecting again. It shares `workers`
  threads.
* `soon`: short work, such as failing what is overdue. It shares two threads.
* `beside`: writing to a node, which may not read. Each node has a thread of its own, so that one
  that hangs holds up nobody's writes but its own.

Threads are daemons: an environment that was left open does not keep the process alive. That of the
timers is there from the beginning and starts the others when they are first needed. Callers do not:
what a signal handler raises there can end a thread that was just started, and nobody would know.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient

logger = logging.getLogger("warren.stream.recovery")

Job = Callable[[], None]
WORKERS = 4
SHORT_WORKERS = 2


class Timer:
    """A job that is due at `due`, in a lane."""

    __slots__ = ("_lane", "cancelled", "due", "job")

    def __init__(self, due: float, job: Job, lane: _Lane) -> None:
        self.due = due
        self.job = job
        self._lane = lane
        self.cancelled = False

    def cancel(self) -> None:
        """Do not start the job any more. One that runs already is not stopped."""
        self.cancelled = True
        self.job = _nothing  # the heap holds the timer until it is due, but not what the job holds

    def start(self) -> _Lane | None:
        """Hand the job to its lane; returns it if it needs another thread."""
        return self._lane if not self.cancelled and self._lane.add(self) else None


class Recovery:
    """Runs jobs later, and apart from the caller.

    A job that raises is logged and harms nothing else. After `close()` nothing is started.
    """

    def __init__(
        self, workers: int = WORKERS, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._closed = False
        self._long = _Lane("warren-recovery", workers)
        self._short = _Lane("warren-timer", SHORT_WORKERS)
        self._nodes: dict[object, _Lane] = {}
        self._short_of_threads: list[_Lane] = []
        self._thread = threading.Thread(target=self._run, name="warren-timers", daemon=True)
        self._thread.start()

    def schedule(self, delay: float, job: Job) -> Timer:
        """Run `job` in `delay` seconds on a thread that may wait; returns what can cancel it."""
        return self._add(Timer(self._clock() + delay, job, self._long))

    def soon(self, delay: float, job: Job) -> Timer:
        """Run the short `job` in `delay` seconds; it must not wait for an answer."""
        return self._add(Timer(self._clock() + delay, job, self._short))

    def beside(self, node: object, job: Job) -> None:
        """Run `job` now, on the thread of this node."""
        with self._changed:
            if self._closed:
                return
            lane = self._nodes.get(node)
            if lane is None:
                lane = self._nodes[node] = _Lane(f"warren-writes-{node}", 1)
        self._start(Timer(0, job, lane))

    def close(self, timeout: float = 5) -> None:
        """Start nothing any more, and wait up to `timeout` for what runs."""
        deadline = self._clock() + timeout
        with self._changed:
            self._closed = True
            self._timers.clear()
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - self._clock()))
        for lane in (self._long, self._short, *self._nodes.values()):
            lane.close(lambda: max(0.0, deadline - self._clock()))

    @property
    def waiting(self) -> int:
        """How many timers are set."""
        with self._changed:
            return len(self._timers)

    def _add(self, timer: Timer) -> Timer:
        if timer.due <= self._clock():
            with self._changed:
                if self._closed:
                    timer.cancel()
            self._start(timer)
            return timer
        with self._changed:
            if self._closed:
                timer.cancel()
                return timer
            heapq.heappush(self._timers, (timer.due, next(self._order), timer))
            if self._timers[0][2] is timer:
                self._changed.notify()
        return timer

    def _start(self, timer: Timer) -> None:
        lane = timer.start()
        if lane is not None:
            with self._changed:
                self._short_of_threads.append(lane)
                self._changed.notify()

    def _run(self) -> None:
        while True:
            due: list[Timer] = []
            with self._changed:
                if self._closed:
                    return
                now = self._clock()
                while self._timers and self._timers[0][0] <= now:
                    due.append(heapq.heappop(self._timers)[2])
                lanes, self._short_of_threads = self._short_of_threads, []
                if not (due or lanes):
                    self._changed.wait(self._timers[0][0] - now if self._timers else None)
            for lane in [*lanes, *filter(None, (timer.start() for timer in due))]:
                lane.grow()


class _Lane:
    """A queue of jobs and the threads that run them, started one by one as jobs wait."""

    def __init__(self, name: str, workers: int) -> None:
        self._name = name
        self._workers = workers
        self._changed = threading.Condition()
        self._jobs: deque[Timer] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def add(self, timer: Timer) -> bool:
        """Returns whether another thread should be started for it (`grow`)."""
        with self._changed:
            if self._closed:
                return False
            self._jobs.append(timer)
            self._changed.notify()
            return self._is_short

    @property
    def _is_short(self) -> bool:
        return self._idle < len(self._jobs) and len(self._threads) < self._workers

    def grow(self) -> None:
        with self._changed:
            if self._closed or not self._is_short:
                return
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, remaining: Callable[[], float]) -> None:
        with self._changed:
            self._closed = True
            self._jobs.clear()
            threads = list(self._threads)
            self._changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(remaining())

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._closed:
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                timer = self._jobs.popleft()
            try:
                timer.job()
            except Exception:
                logger.exception("a background job failed")
            # An idle thread must not keep what its last job held.
            del timer


def _nothing() -> None:
    return


T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """What `work` will return or raise. It is not cancelled when nobody waits any more."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def close_all(clients: Iterable[StreamClient], timeout: float) -> None:
    """Close all at the same time: one that hangs must not take the time of the others."""
    deadline = time.monotonic() + timeout
    threads = [
        threading.Thread(target=client.close, args=(timeout,), name="warren-close", daemon=True)
        for client in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
