"""Whatever a handler is or does: its message is handled or failed, and nothing of ours ends."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import io
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from sharding.errors import InvalidInput
from sharding.groups import BatchFailed, GroupFailed, GroupOptions, Retry
from sharding.groups.handling.delivery import (
    Dead,
    Delivery,
    Done,
    GivenBack,
    Outcome,
    check_handler,
)
from sharding.groups.handling.tasks import HandlerTasks
from sharding.groups.handling.threads import HandlerThreads
from tests.cluster.waiting import PATIENCE
from tests.support.hand_time import run_without_waiting

ONCE = GroupOptions(retry=Retry(attempts=1))


@pytest.fixture(autouse=True)
def _without_logs(caplog: pytest.LogCaptureFixture) -> None:
    """They hold text that pytest's processes can't send each other."""
    caplog.set_level(logging.CRITICAL, "warren.groups")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("can't be said")

    __repr__ = __str__


class Unclassed(Exception):
    """Asked by isinstance()."""

    @property  # type: ignore[misc]  # that is the point
    def __class__(self) -> Any:
        raise SystemExit("no class")


class Unshowable(Exception):
    """Asked when its traceback is written."""

    @property
    def __notes__(self) -> NoReturn:  # type: ignore[override]
        raise SystemExit("no notes")


class Untraceable(Exception):
    """Asked by logging itself."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise SystemExit(name)


class Undecided(BatchFailed):
    def __init__(self) -> None:
        Exception.__init__(self)

    @property
    def done(self) -> NoReturn:  # type: ignore[override]
        raise SystemExit("done?")


def raising(error: Callable[[], BaseException]) -> Callable[[Any], NoReturn]:
    def handle(_: Any) -> NoReturn:
        raise error()

    return handle


def endless(_: Any) -> None:
    endless(_)


async def asynchronous(_: Any) -> None: ...


def yielding(_: Any) -> Iterator[None]:
    yield


async def yielding_asynchronously(_: Any) -> AsyncIterator[None]:
    yield


class Asynchronous:
    async def __call__(self, _: Any) -> None: ...

    async def method(self, _: Any) -> None: ...

    @staticmethod
    async def static(_: Any) -> None: ...


class Yielding:
    def __call__(self, _: Any) -> Iterator[None]:
        yield


FAILING: dict[str, Callable[[Any], object]] = {
    **{
        error.__name__: raising(error)
        for error in (
            ValueError,
            Unspeakable,
            Unclassed,
            Unshowable,
            Untraceable,
            Undecided,
            StopIteration,
            StopAsyncIteration,
            GeneratorExit,
            KeyboardInterrupt,
            asyncio.CancelledError,
            TimeoutError,
            MemoryError,
        )
    },
    "exit": lambda _: sys.exit("bad input"),
    "group": raising(lambda: BaseExceptionGroup("many", [SystemExit(), Unspeakable()])),
    "text that is no UTF-8": raising(lambda: ValueError("\ud800")),
    "recursion": endless,
    "a hidden generator": lambda given: yielding(given),
    "a hidden asynchronous generator": lambda given: yielding_asynchronously(given),
    "wrong arguments": lambda _: dict(1, 2),  # type: ignore[call-overload]  # that is the point
}
NOT_AWAITED: dict[str, Callable[[Any], Awaitable[None]]] = {
    "a hidden coroutine": lambda given: asynchronous(given),
    "a decorated coroutine": functools.wraps(asynchronous)(lambda given: asynchronous(given)),
}


@pytest.mark.parametrize("name", [*FAILING, *NOT_AWAITED])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_on_threads_it_is_a_failure_and_the_next_message_is_handled(name: str) -> None:
    handler = {**FAILING, **NOT_AWAITED}[name]
    told: queue.Queue[Outcome] = queue.Queue()
    runner = HandlerThreads(lambda each: handler(each) if each.body else None, ONCE)
    for body in (b"odd", b""):
        runner.submit(body, Delivery(body, "", "s"), told.put)
    first = told.get(timeout=PATIENCE)
    assert isinstance(first, Dead)
    first.stored()
    assert told.get(timeout=PATIENCE) == Done()
    assert runner.stop(PATIENCE)


@contextmanager
def written_log(raises: bool) -> Iterator[None]:
    """A log as applications have it, which writes tracebacks; or one with a filter that raises."""

    def refuse(_: object) -> NoReturn:
        raise ValueError("a filter of the application's")

    log, written = logging.getLogger("warren.groups"), logging.StreamHandler(io.StringIO())
    log.addHandler(written)
    if raises:
        log.addFilter(refuse)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeFilter(refuse)
        log.removeHandler(written)


@pytest.mark.parametrize("log_raises", [False, True])
@pytest.mark.parametrize("error", [ValueError, Unspeakable, Unclassed, Unshowable, Untraceable])
def test_an_error_that_can_not_be_logged_holds_up_nobody(
    error: type[Exception], log_raises: bool
) -> None:
    def handle(given: Delivery) -> None:
        if given.body:
            raise error

    on_tasks: list[Outcome] = []

    async def main() -> None:
        told: asyncio.Queue[Outcome] = asyncio.Queue()
        runner = HandlerTasks(
            handle,  # type: ignore[arg-type]  # no awaitable
            ONCE,
            clock=asyncio.get_running_loop().time,
        )
        for body in (b"odd", b""):
            runner.submit(body, Delivery(body, "", "s"), told.put_nowait)
        async with asyncio.timeout(PATIENCE):
            on_tasks.extend([await told.get() for _ in range(2)])

    with written_log(log_raises):
        told: queue.Queue[Outcome] = queue.Queue()
        runner = HandlerThreads(handle, ONCE)
        for body in (b"odd", b""):
            runner.submit(body, Delivery(body, "", "s"), told.put)
        on_threads = [told.get(timeout=PATIENCE) for _ in range(2)]
        run_without_waiting(main())
        for first, second in (on_threads, on_tasks):
            assert isinstance(first, Dead)
            assert second == Done()


def test_an_error_thrown_into_a_thread_too_late_ends_it_not() -> None:
    """As helpers for time-outs do: the handler they meant has returned."""
    told: queue.Queue[Outcome] = queue.Queue()
    threads: queue.Queue[int] = queue.Queue()
    runner = HandlerThreads(lambda _: threads.put(threading.get_ident()), ONCE)
    for _ in range(3):
        runner.submit("key", Delivery(b"", "", "s"), told.put)
        assert told.get(timeout=PATIENCE) == Done()
        thread = ctypes.c_ulong(threads.get(timeout=PATIENCE))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeoutError))
    assert runner.stop(PATIENCE)


def test_the_child_of_a_handler_that_forks_handles_nothing() -> None:
    told: queue.Queue[Outcome] = queue.Queue()
    parent, (read, write) = os.getpid(), os.pipe()

    def handle(given: Delivery) -> None:
        if given.body and (child := os.fork()):
            os.waitpid(child, 0)
        elif os.getpid() != parent and not given.body:
            os.write(write, b"handled by the child")

    runner = HandlerThreads(handle, ONCE)
    for body in (b"fork", b""):
        runner.submit("key", Delivery(body, "", "s"), told.put)
    assert [told.get(timeout=PATIENCE) for _ in range(2)] == [Done(), Done()]
    os.close(write)
    assert os.read(read, 100) == b""
    os.close(read)


def test_an_idle_thread_begins_a_message_though_others_wait_for_something_else() -> None:
    """Who watches for handlers that hang waits too, and a call for a handler must not go there."""
    told: queue.Queue[Outcome] = queue.Queue()
    runner = HandlerThreads(lambda _: None, GroupOptions(handler_timeout=100 * PATIENCE))
    for _ in range(100):
        runner.set_lease("t", None)  # wakes all,
        time.sleep(0.001)  # and they wait again, in any order
        runner.submit("key", Delivery(b"", "", "s"), told.put)
        assert told.get(timeout=PATIENCE) == Done()
    assert runner.stop(PATIENCE)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_handler_that_cancels_its_own_task_has_failed(is_awaited: bool) -> None:
    async def handle(given: Delivery) -> None:
        task = asyncio.current_task()
        if given.body and task is not None:
            task.cancel()
            if is_awaited:
                await asyncio.sleep(0)

    async def main() -> None:
        told: asyncio.Queue[Outcome] = asyncio.Queue()
        runner = HandlerTasks(handle, ONCE, clock=asyncio.get_running_loop().time)
        for body in (b"cancel", b""):
            runner.submit("key", Delivery(body, "", "s"), told.put_nowait)
        async with asyncio.timeout(PATIENCE):
            first = await told.get()
            assert isinstance(first, Dead)
            assert first.error == "CancelledError"
            first.stored()
            assert await told.get() == Done()
        assert await runner.stop(PATIENCE)

    run_without_waiting(main())


def test_a_handler_that_cancels_all_tasks_ends_the_group_with_an_error() -> None:
    failures: list[GroupFailed] = []

    async def main() -> None:
        me = asyncio.current_task()

        async def handle(_: Delivery) -> None:
            for task in asyncio.all_tasks() - {me}:
                task.cancel()
            await asyncio.sleep(0)

        told: asyncio.Queue[Outcome] = asyncio.Queue()
        clock = asyncio.get_running_loop().time
        runner = HandlerTasks(handle, ONCE, clock=clock, on_failure=failures.append)
        for _ in range(2):
            runner.submit("key", Delivery(b"", "", "s"), told.put_nowait)
        async with asyncio.timeout(PATIENCE):
            assert [await told.get() for _ in range(2)] == [GivenBack(), GivenBack()]
        assert await runner.stop(PATIENCE)

    run_without_waiting(main())
    assert [str(each) for each in failures] == ["somebody has cancelled the group's tasks"]


@pytest.mark.parametrize("is_coroutine", [False, True])
@pytest.mark.parametrize("name", FAILING)
def test_on_tasks_it_is_a_failure_and_the_next_message_is_handled(
    name: str, is_coroutine: bool
) -> None:
    interrupted: list[str] = []

    def call(given: Delivery) -> object:
        return FAILING[name](given) if given.body else None

    async def coroutine(given: Delivery) -> object:
        await asyncio.sleep(0)
        return call(given)

    async def main() -> None:
        told: asyncio.Queue[Outcome] = asyncio.Queue()
        runner = HandlerTasks(
            coroutine if is_coroutine else call,  # type: ignore[arg-type]  # no awaitable
            ONCE,
            clock=asyncio.get_running_loop().time,
            on_interrupt=lambda: interrupted.append(name),
        )
        for body in (b"odd", b""):
            runner.submit(body, Delivery(body, "", "s"), told.put_nowait)
        first = await told.get()
        assert isinstance(first, Dead)
        first.stored()
        assert await told.get() == Done()
        assert await runner.stop(PATIENCE)

    run_without_waiting(main())
    assert interrupted == (["KeyboardInterrupt"] if name == "KeyboardInterrupt" else [])


@pytest.mark.parametrize(
    "handler",
    [
        asynchronous,
        functools.partial(functools.partial(asynchronous), b""),
        Asynchronous(),
        Asynchronous().method,
        Asynchronous.static,
    ],
)
def test_a_coroutine_function_is_for_those_who_await_it(handler: object) -> None:
    check_handler(handler, awaited=True)
    with pytest.raises(InvalidInput, match=r"must not be asynchronous.*AioConsumerGroup"):
        check_handler(handler, awaited=False)


@pytest.mark.parametrize(
    "handler", [yielding, yielding_asynchronously, Yielding(), functools.partial(yielding, 1)]
)
@pytest.mark.parametrize("awaited", [False, True])
def test_a_function_with_a_yield_is_for_nobody(handler: object, awaited: bool) -> None:
    with pytest.raises(InvalidInput, match="must not have a yield"):
        check_handler(handler, awaited=awaited)


@pytest.mark.parametrize("handler", [print, len, Yielding, functools.partial(print), [].append])
def test_anything_else_that_can_be_called_is_taken(handler: object) -> None:
    check_handler(handler, awaited=False)
    check_handler(handler, awaited=True)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must be callable"):
        check_handler("handle", awaited=False)
