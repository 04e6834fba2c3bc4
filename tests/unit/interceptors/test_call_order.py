"""Coroutines on a loop of callbacks: step by step, and closed with their channel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from interceptors.call_order import Answer, Steps, Wake, at_once


class Loop:
    """A loop that runs when it is told to."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], None]] = []
        self.failures: list[Exception] = []
        self.steps = Steps(self.ready.append, lambda _, call: self.ready.append(call))

    def run(self, work: Any, then: Callable[[Any], None] = lambda _: None) -> None:
        self.steps.run(work, self.failures.append, then)

    def turn(self) -> None:
        waiting, self.ready[:] = list(self.ready), []
        for call in waiting:
            call()


def test_work_goes_on_when_its_answer_is_given() -> None:
    loop, asked, results = Loop(), Answer[str](), list[str]()

    async def work() -> str:
        return await asked + await asked

    loop.run(work(), results.append)
    assert results == []
    asked.give("x")
    asked.give("the first one counts")
    assert results == ["xx"]


def test_a_future_of_another_thread_is_waited_for_on_the_loop() -> None:
    loop, future, results = Loop(), Future[int](), list[int]()
    loop.run(loop.steps.wait(future), results.append)
    future.set_result(7)
    assert results == []  # not on the thread that completed it
    loop.turn()
    assert results == [7]


def test_what_fails_before_it_waits_is_raised_and_later_it_is_told() -> None:
    loop, asked = Loop(), Answer[None]()

    async def work(waits: bool) -> None:
        if waits:
            await asked
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.run(work(False))
    loop.run(work(True))
    asked.give(None)
    assert [str(error) for error in loop.failures] == ["no"]


def test_what_the_caller_does_with_the_result_is_no_failure_of_the_work() -> None:
    loop, asked = Loop(), Answer[None]()

    async def work() -> None:
        await asked

    def broken(_: None) -> None:
        raise ValueError("the application's")

    loop.run(work(), broken)
    with pytest.raises(ValueError, match="the application's"):
        asked.give(None)
    assert loop.failures == []


def test_work_that_waits_is_closed_with_its_channel() -> None:
    loop, asked, given_up = Loop(), Answer[None](), list[bool]()

    async def work() -> None:
        try:
            await asked
        finally:
            given_up.append(True)

    loop.run(work())
    loop.steps.stop()
    assert given_up == [True]
    asked.give(None)  # too late, and nobody minds
    assert loop.failures == []


def test_work_may_close_its_own_channel() -> None:
    loop, given_up = Loop(), list[bool]()

    async def work() -> None:
        try:
            loop.steps.stop()
            await Answer[None]()
        finally:
            given_up.append(True)

    loop.run(work())
    assert given_up == [True]


def test_a_loop_that_is_closed_is_no_error_of_the_thread_that_answers() -> None:
    def refuse(_: Callable[[], None]) -> None:
        raise RuntimeError("the loop is closed")

    steps, future, failures = Steps(refuse, lambda *_: None), Future[None](), list[Exception]()
    steps.run(steps.wait(future), failures.append)
    future.set_result(None)
    steps.stop()
    assert failures == []


def test_a_change_before_anybody_waits_is_not_missed() -> None:
    loop, wake, seen = Loop(), Wake(), list[int]()

    async def work() -> None:
        for number in range(3):
            await wake.wait()
            seen.append(number)

    wake()
    loop.run(work())
    assert seen == [0]
    wake()
    assert seen == [0, 1]


def test_a_blocking_call_that_would_wait_says_so() -> None:
    async def work() -> int:
        return 7

    async def waits() -> None:
        await Answer[None]()

    assert at_once(work()) == 7
    with pytest.raises(AssertionError, match="waited"):
        at_once(waits())
