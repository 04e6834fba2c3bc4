"""Somebody throws an error into a thread for handlers, as helpers for time-outs do: at each line.

Whatever was under way, all messages are told of, each key in order, and the worker goes on.
"""

from __future__ import annotations

import linecache
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sharding.groups import Delivery, GroupOptions, Retry
from sharding.groups.handling import scheduler, threads
from sharding.groups.handling.delivery import Dead, Outcome
from sharding.groups.handling.threads import HandlerThreads
from sharding.groups.queues.shard_reader import Acknowledgements
from sharding.groups.streams.progress import Watermark
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE

OURS = {str(Path(str(module.__file__))) for module in (scheduler, threads)}


class TimeUp(BaseException):
    """Helpers throw errors of this kind, so that no handler catches them."""


class Interrupting:
    """Throws an error into the thread that it is armed on, at the n-th line of the runner's code.

    Not at a `with`: Python looks for errors from outside after calls and jumps, never between the
    end of such a block and the release of its lock.
    """

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self._left = at
        self._error = error
        self.fired = False

    def arm(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frame.f_trace = self._trace
            frame = frame.f_back
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name, line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and name in OURS:
            if linecache.getline(name, line).strip().startswith("with "):
                return self._trace
            if self._left == 0:
                self._left, self.fired = -1, True
                raise self._error
            self._left -= 1
        return self._trace


class Shop:
    """Four messages of two keys; the first meets an error when it was handled."""

    def __init__(self, at: int, error: type[BaseException], batch_size: int, fails: str) -> None:
        self.interrupting = Interrupting(at, error)
        self.told: dict[bytes, Outcome] = {}
        self.handled: list[bytes] = []
        self._fails = fails
        self._first = True
        self._all_in = threading.Event()
        options = GroupOptions(
            batch_size=batch_size,
            batch_wait=0,
            retry=Retry(attempts=2, first_delay=0.001, max_delay=0.001, jitter=0),
        )
        self.runner = HandlerThreads(self._handle, options)
        for name in (b"a1", b"b1", b"a2", b"b2"):
            self.runner.submit(name[:1], Delivery(name, "", "s"), partial(self._tell, name))
        self._all_in.set()

    def is_done(self) -> bool:
        return len(self.told) == 4

    def _handle(self, given: Any) -> None:
        assert self._all_in.wait(PATIENCE)
        batch: list[Delivery] = given if isinstance(given, list) else [given]
        first, self._first = self._first, False
        if not first:
            sys.settrace(None)
        else:
            self.interrupting.arm()
        for each in batch:
            if each.body.decode() == self._fails:
                raise ValueError("no")
            self.handled.append(each.body)

    def _tell(self, name: bytes, end: Outcome) -> None:
        self.told[name] = end
        if isinstance(end, Dead):
            end.stored()


@pytest.mark.parametrize("error", [TimeUp, RuntimeError])
@pytest.mark.parametrize(("batch_size", "fails"), [(1, ""), (1, "a1"), (3, ""), (3, "b1")])
def test_an_error_thrown_into_a_thread_stops_nothing_wherever_it_strikes(
    error: type[BaseException], batch_size: int, fails: str
) -> None:
    at, fired = 0, True
    while fired:
        shop = Shop(at, error, batch_size, fails)
        wait_until(shop.is_done, PATIENCE, partial("line {}: {}".format, at, shop.told))
        assert shop.runner.stop(PATIENCE), f"line {at}: {shop.runner.counters}"
        for key in (b"a", b"b"):
            own = list(dict.fromkeys(name for name in shop.handled if name[:1] == key))
            assert own == sorted(own), f"line {at}: {shop.handled}"
        at, fired = at + 1, shop.interrupting.fired
    assert at > 30, "it did strike"


def test_a_thread_that_is_struck_while_it_recovers_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    struck: list[Any] = []
    recover = HandlerThreads._recover

    def recover_later(runner: HandlerThreads, *left: Any) -> None:
        struck.append(left)
        if len(struck) <= 2:
            raise TimeUp
        recover(runner, *left)

    monkeypatch.setattr(HandlerThreads, "_recover", recover_later)
    shop = Shop(3, TimeUp, 1, "")
    wait_until(shop.is_done, PATIENCE)
    assert shop.runner.stop(PATIENCE)
    assert len(struck) == 3


def test_hearing_of_a_message_twice_does_no_harm() -> None:
    watermark = Watermark()
    for offset in (1, 2, 3):
        watermark.begin(offset)
    assert [watermark.handled(offset) for offset in (2, 2, 1, 1)] == [0, 0, 2, 0]
    watermark.given_back(3)
    watermark.given_back(3)
    assert (watermark.mark, watermark.in_hand) == (2, 0)
    acknowledgements = Acknowledgements()
    assert acknowledgements.settle([1, 3, 3]) == [(1, True), (3, False)]
    assert acknowledgements.settle([1, 3, 2]) == [(2, True)]
