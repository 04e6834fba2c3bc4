"""How coroutines of `calls` run on pika's loops: step by step, and no call overtaking another.

Everything here runs on the connection's I/O loop, except where it says otherwise, and nothing
blocks it. pika's adapters differ in their loops; what they have in common is how the connection
itself calls later and from other threads, so that is what is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from pika.spec import Basic

from interceptors.method_rules import EveryShard
from sharding.errors import Unreachable

T = TypeVar("T")

Done = Callable[[], None]
Step = Callable[[Done], None]
"""A call whose turn has come; it says when the next one may have its own."""
Work = Coroutine["Answer[Any]", None, T]
"""A coroutine that waits for nothing but answers."""

_MOST_WAITING = 100_000


class Answer(Generic[T]):
    """What a coroutine waits for on the loop. The first answer counts."""

    def __init__(self) -> None:
        self._given: list[T] = []
        self._then: Callable[[], None] | None = None

    def give(self, answer: T) -> None:
        if not self._given:
            self._given.append(answer)
            if self._then is not None:
                self._then()

    def then(self, go_on: Callable[[], None]) -> None:
        self._then = go_on

    def __await__(self) -> Generator[Answer[T], None, T]:
        if not self._given:
            yield self
        return self._given[0]


class Steps:
    """Runs coroutines on a loop, each until it waits for an `Answer`, and on when that is given.

    `hop` runs a function on the loop and may be called on any thread; `call_later` is the loop's.
    """

    def __init__(
        self,
        hop: Callable[[Callable[[], None]], Any],
        call_later: Callable[[float, Callable[[], None]], Any],
    ) -> None:
        self._hop = hop
        self._call_later = call_later
        self._running: set[Work[Any]] = set()

    def run(
        self,
        work: Work[T],
        on_failure: Callable[[Exception], None],
        then: Callable[[T], None] = lambda _: None,
    ) -> None:
        """Begin with `work`. What it raises before it first waits is raised here.

        `then` gets its result, and is the caller's own: what it raises is no failure of the work.
        """
        self._running.add(work)
        self._step(work, on_failure, then, at_once=True)

    def _step(
        self,
        work: Work[T],
        on_failure: Callable[[Exception], None],
        then: Callable[[T], None],
        at_once: bool = False,
    ) -> None:
        if work not in self._running:
            return
        try:
            answer = work.send(None)
        except StopIteration as end:
            result: T = end.value
        except Exception as error:
            self._running.discard(work)
            if at_once:
                raise
            on_failure(error)
            return
        else:
            if work in self._running:
                answer.then(lambda: self._step(work, on_failure, then))
            else:  # stopped by what it did itself
                work.close()
            return
        self._running.discard(work)
        then(result)

    def stop(self) -> None:
        """The channel is gone: nothing goes on, and what was claimed is given up."""
        ended, self._running = self._running, set()
        for work in ended:
            with suppress(ValueError):  # it is at work itself, and is closed when it waits
                work.close()

    def on_loop(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop; may be called on any thread."""
        # A loop that has been closed refuses, each kind in its own way, and nobody waits there.
        with suppress(Exception):
            self._hop(call)

    async def wait(self, future: Future[T]) -> T:
        """The result of a future that another thread completes."""
        done: Answer[None] = Answer()
        future.add_done_callback(lambda _: self.on_loop(lambda: done.give(None)))
        await done
        return future.result()

    async def sleep(self, seconds: float) -> None:
        over: Answer[None] = Answer()
        self._call_later(seconds, lambda: over.give(None))
        await over


def at_once(work: Coroutine[Any, None, T]) -> T:
    """The result of a coroutine whose port blocks, so that it never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a call of a blocking channel waited")


class Wake:
    """Something may have changed: whoever waits for it goes on, and else the next who waits."""

    def __init__(self) -> None:
        self._changed = False
        self._awaited: Answer[None] | None = None

    def __call__(self) -> None:
        self._changed = True
        if self._awaited is not None:
            self._awaited.give(None)

    async def wait(self) -> None:
        if not self._changed:
            self._awaited = Answer()
            await self._awaited
        self._changed = False


class Everywhere:
    """A channel of pika's on which every shard is consumed (`calls.Everywhere`)."""

    def __init__(
        self, wish: EveryShard, is_open: Callable[[], bool], consume: Callable[[str, str], None]
    ) -> None:
        self._wish = wish
        self._consume = consume
        self.is_open = is_open
        self.wake = Wake()
        self.changed = self.wake.wait

    async def consume(self, shard: str, tag: str) -> None:
        self._consume(shard, tag)

    def on_cancel(self, frame: Any) -> None:
        if self._wish.lost(frame.method.consumer_tag):
            self.wake()


class CallOrder:
    """Lets no call overtake one that is not through yet.

    A call that has to wait for something holds all calls behind it. A call that can't be made when
    its turn comes has no caller any more to raise to; `on_failure` is told.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._waiting: deque[Step] = deque()
        self._current: object | None = None
        self._going_on = False

    @property
    def idle(self) -> bool:
        return self._current is None and not self._waiting

    def run(self, step: Step) -> None:
        """Start `step` now if nothing is before it, and then it may raise; else in its turn."""
        if self.idle:
            self._start(step)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append(step)
        else:
            raise Unreachable(f"{_MOST_WAITING} calls wait for the cluster; try again later")

    def stop(self) -> None:
        """Start nothing more, as a broker ignores what comes behind a call that it refused."""
        self._current = object()

    def drop(self) -> int:
        """Forget what waits, and what is not through; returns how many calls waited."""
        waited = len(self._waiting)
        self._waiting.clear()
        self._current = None
        return waited

    def _start(self, step: Step) -> None:
        turn = self._current = object()
        try:
            step(lambda: self._through(turn))
        except BaseException:
            self._current = None
            raise

    def _through(self, turn: object) -> None:
        if self._current is turn:
            self._current = None
            # Not deeper and deeper, where call after call is through at once.
            if not self._going_on:
                self._go_on()

    def _go_on(self) -> None:
        self._going_on = True
        try:
            while self._waiting and self._current is None:
                try:
                    self._start(self._waiting.popleft())
                except Exception as error:
                    self._on_failure(error)
        finally:
            self._going_on = False


class InTurn(Basic.Ack):
    """An acknowledgement that waits its turn behind the calls that pika holds back.

    pika sends a synchronous method only when the one before it is answered, and others at once. A
    refused `queue_bind` must not overtake the `queue_declare` before it.
    """

    synchronous: Any = True
