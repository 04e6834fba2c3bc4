"""What a handler gets, what it may raise, and what becomes of each message in the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any

from sharding.errors import InvalidInput, WarrenError, kind_of, words_of

NO_HEADERS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message, as a handler sees it."""

    body: bytes
    key: str
    """The routing key that it was published with."""
    shard: str
    """The queue or stream that it was read from."""
    headers: Mapping[str, Any] = field(default_factory=lambda: NO_HEADERS)
    properties: Any = None
    """What the client that read it has for the rest: pika's properties, say."""
    redelivered: bool = False
    """Whether somebody may have had it before: a worker that died, say."""
    offset: int | None = None
    """Its place in a stream; None in a queue."""
    attempt: int = 1
    """How often a handler of this worker gets it now, from 1."""


class BatchFailed(WarrenError):
    """Raised by a batch handler: the first `done` messages are handled, the rest is not."""

    def __init__(self, done: int, reason: str = "") -> None:
        if not isinstance(done, int) or isinstance(done, bool) or done < 0:
            raise InvalidInput("done", "must be a whole number from 0", done)
        self.done = done
        super().__init__(reason or f"the batch failed after {done} messages")

    def __reduce__(self) -> tuple[type[BatchFailed], tuple[int, str]]:
        return type(self), (self.done, str(self))


class GroupFailed(WarrenError):
    """A worker can't go on and has given its shards back; the text says why."""


class Why(StrEnum):
    """Why a message is a dead letter."""

    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Done:
    """The handler returned: acknowledge it."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """No handler will have it here: it was not begun, or is not tried again. Another may get it."""


@dataclass(frozen=True, slots=True)
class Dead:
    """It failed for the last time: store it as a dead letter, then acknowledge it.

    Its key waits until `stored()` is called (from any thread, once), so that a message which could
    not be stored, and comes back, is not handled after its successors.
    """

    why: Why
    error: str
    """The exception's type and the first line of its text."""
    attempts: int
    stored: Callable[[], None]


# Whatever a handler is and does: its message is acknowledged because the work is done, or it counts
# as failed. Python has functions whose call does nothing yet, coroutine functions and those with a
# `yield`. Such a handler is refused where that can be seen; where it can't, behind a decorator say,
# what comes back shows it.

_ASYNCHRONOUS = "must not be asynchronous: nobody would await it"
_FOR_QUEUES = f"{_ASYNCHRONOUS}; for queues use AioConsumerGroup"
_YIELDS = "must not have a yield: calling it does nothing"


def check_handler(handler: object, *, awaited: bool) -> None:
    """Raise if it would do nothing; `awaited` says whether what it returns is awaited."""
    _check_callable("handler", handler, None if awaited else _FOR_QUEUES)


def check_callback(field: str, callback: object) -> None:
    """The same for what is only called."""
    _check_callable(field, callback, _ASYNCHRONOUS)


def _check_callable(field: str, function: object, asynchronous: str | None) -> None:
    if not callable(function):
        raise InvalidInput(field, "must be callable", function)
    while isinstance(function, partial):
        function = function.func
    for called in (function, type(function).__call__):
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise InvalidInput(field, _YIELDS, function)
        if inspect.iscoroutinefunction(called) and asynchronous is not None:
            raise InvalidInput(field, asynchronous, function)


def check_returned(returned: object, field: str = "handler") -> None:
    """Raise if a handler that returned this has not done its work."""
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        raise InvalidInput(field, _YIELDS, returned)
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()  # else Python warns that nobody awaited it
        raise InvalidInput(field, _ASYNCHRONOUS, returned)


# An error is the application's too, and to ask it something runs the application's code: for its
# text, for what of a batch is done, even for its class. So it is asked once, where nothing is
# locked, and whatever it does then it has only failed. Decisions are made by what it said.


@dataclass(frozen=True, slots=True)
class Failed:
    """How a handler's call ended that raised."""

    error: str
    """The exception's type and the first line of its text."""
    done: int = 0
    """How many messages of the batch are handled all the same."""


def failure_of(error: BaseException) -> Failed:
    return Failed(first_line(error), _done_by(error))


def _done_by(error: BaseException) -> int:
    """How many messages of a batch are handled; none where the error was made to say something
    else."""
    if not issubclass(type(error), BatchFailed):  # isinstance() would ask the error itself
        return 0
    try:
        done = error.done  # type: ignore[attr-defined]
    except BaseException:
        return 0
    return done if type(done) is int and done > 0 else 0


Outcome = Done | GivenBack | Dead
OnDone = Callable[[Outcome], None]


def first_line(error: BaseException, limit: int = 300) -> str:
    """An exception as a header shows it."""
    lines = words_of(error).strip().splitlines()
    text = f"{kind_of(error)}: {lines[0]}" if lines else kind_of(error)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
