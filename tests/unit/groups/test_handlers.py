"""Whatever a handler is or does: its message is handled or failed, and nothing of ours ends."""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NoReturn

import pytest

from sharding.errors import InvalidInput
from sharding.groups import GroupOptions, Retry
from sharding.groups.handling.delivery import Dead, Delivery, Done, Outcome, check_handler
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
