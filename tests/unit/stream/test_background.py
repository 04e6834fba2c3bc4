"""The threads that do things later."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from sharding.stream.connections.background import SHORT_WORKERS, Recovery
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.hand_time import HandClock


@pytest.fixture
def recovery() -> Iterator[Recovery]:
    made = Recovery(workers=2)
    yield made
    made.close()


def test_jobs_run_when_they_are_due_and_in_that_order() -> None:
    clock = HandClock()
    recovery = Recovery(clock=clock)
    ran: list[str] = []
    recovery.schedule(0.06, lambda: ran.append("late"))
    recovery.soon(0.02, lambda: ran.append("early"))
    for now, expected in ((0.019, []), (0.02, ["early"]), (0.059, ["early"])):
        clock.now = now
        looks = clock.looks + 2  # the second one begins when what the first found due was started
        wait_until(lambda enough=looks: clock.looks >= enough, PATIENCE)  # type: ignore[misc]
        wait_until(lambda wanted=expected: ran == wanted, PATIENCE)  # type: ignore[misc]
        assert recovery.waiting == 2 - len(expected)
    clock.now = 0.06
    wait_until(lambda: ran == ["early", "late"], PATIENCE)
    recovery.close(PATIENCE)


def test_a_cancelled_job_does_not_run_and_is_freed(recovery: Recovery) -> None:
    class Held:
        def job(self) -> None:
            raise AssertionError

    held = Held()
    watched = weakref.ref(held)
    timer = recovery.schedule(60, held.job)
    timer.cancel()
    del held
    gc.collect()
    assert watched() is None


def test_jobs_that_wait_do_not_hold_up_short_ones(recovery: Recovery) -> None:
    release = threading.Event()
    done = threading.Event()
    for _ in range(10):
        recovery.schedule(0, lambda: (release.wait(2 * PATIENCE), None)[1])
    recovery.soon(0.01, done.set)
    assert done.wait(PATIENCE)
    release.set()


def test_a_job_that_fails_harms_no_other(
    recovery: Recovery, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def fail() -> None:
        raise ValueError("broken")

    for _ in range(SHORT_WORKERS + 1):
        recovery.soon(0, fail)
    recovery.soon(0.01, done.set)
    assert done.wait(PATIENCE)
    assert "a background job failed" in caplog.text


def test_threads_are_bounded_and_start_when_needed() -> None:
    before = set(threading.enumerate())  # threads that others left may end meanwhile
    recovery = Recovery(workers=3)
    assert {each.name for each in set(threading.enumerate()) - before} == {"warren-timers"}
    before = set(threading.enumerate())
    release = threading.Event()
    started = threading.Semaphore(0)

    def job() -> None:
        started.release()
        release.wait(PATIENCE)

    for _ in range(50):
        recovery.schedule(0, job)
    for _ in range(3):
        assert started.acquire(timeout=PATIENCE)
    assert len(set(threading.enumerate()) - before) == 3
    release.set()
    recovery.close(PATIENCE)
    assert set(threading.enumerate()) < before


def test_callers_start_no_thread(recovery: Recovery, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal handler raises in `Thread.start` can end the new thread before it runs a line
    (3.11), and a producer that was interrupted so failed nothing in time any more."""
    by: list[str] = []
    start = threading.Thread.start

    def watched(thread: threading.Thread) -> None:
        by.append(threading.current_thread().name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched)
    ran = threading.Semaphore(0)
    jobs = (
        lambda: recovery.schedule(0, lambda: ran.release()),
        lambda: recovery.soon(0.001, lambda: ran.release()),
        lambda: recovery.beside("a node", lambda: ran.release()),
    )
    for job in jobs:
        job()
    for _ in jobs:
        assert ran.acquire(timeout=PATIENCE)
    assert by == ["warren-timers"] * 3


def test_after_close_nothing_is_started(recovery: Recovery) -> None:
    ran: list[int] = []
    recovery.schedule(60, lambda: ran.append(1))
    recovery.close()
    assert recovery.schedule(0, lambda: ran.append(2)).cancelled
    assert recovery.soon(60, lambda: ran.append(3)).cancelled
    assert (ran, recovery.waiting) == ([], 0)


def test_an_idle_thread_holds_nothing_of_its_last_job(recovery: Recovery) -> None:
    class Held:
        def __init__(self) -> None:
            self.done = threading.Event()

        def job(self) -> None:
            self.done.set()

    held = Held()
    watched = weakref.ref(held)
    recovery.schedule(0, held.job)
    assert held.done.wait(PATIENCE)
    del held
    wait_until(lambda: gc.collect() >= 0 and watched() is None, PATIENCE)


def test_a_recovery_left_open_does_not_keep_the_process_alive() -> None:
    script = (
        "import threading\n"
        "from sharding.stream.connections.background import Recovery\n"
        "r = Recovery(); e = threading.Event()\n"
        "r.schedule(0, e.set); r.schedule(3600, e.set); e.wait()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
