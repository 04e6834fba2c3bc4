"""The tasks that run asynchronous handlers: what `threads` does with threads.

Everything here is called on one asyncio loop. A handler that takes longer than `handler_timeout` is
cancelled; one that does not let itself be cancelled is lost, as a thread would be.

The clock is Python's, and not the loop's: uvloop's stands still while a callback runs, however
long, and no lease would run out meanwhile.

The loop is the application's, and lets anybody cancel anything. A handler whose own task is
cancelled has failed. A task of ours that somebody else cancels is one of all tasks of the loop, the
group's others included: nothing more is begun, and `on_failure` is called.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any

from sharding.groups.handling.delivery import (
    Delivery,
    Failed,
    GivenBack,
    GroupFailed,
    OnDone,
    check_returned,
    failure_of,
)
from sharding.groups.handling.scheduler import (
    Hung,
    Job,
    NotBegun,
    OnReleased,
    Scheduler,
    Settled,
    Ticket,
)
from sharding.groups.handling.threads import end_forked_child, log_failure, tell
from sharding.groups.log import logger
from sharding.groups.options import GroupOptions

_random = random.Random()  # its own, so that nobody else's sequence of numbers changes

AioHandler = Callable[[Any], Awaitable[object]]
CANCEL_GRACE = 1.0
"""How long a handler that was cancelled may take to end."""


class HandlerTasks:
    def __init__(
        self,
        handler: AioHandler,
        options: GroupOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[GroupFailed], None] = lambda _: None,
        on_interrupt: Callable[[], None] = lambda: None,
        chance: Callable[[], float] = _random.random,
    ) -> None:
        self._handler = handler
        self._options = options
        self._clock = clock
        self._on_failure = on_failure
        self._on_interrupt = on_interrupt
        self._loop = asyncio.get_running_loop()
        self._scheduler = Scheduler(options, chance, self._on_dead_letter_stored)
        self._running: set[asyncio.Task[None]] = set()
        self._handling: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._lost = 0
        self._stopping = False
        self._cancelling = False
        self._process = os.getpid()
        self._emptied = asyncio.Event()
        self._failed = False

    @property
    def counters(self) -> Mapping[str, float]:
        return self._scheduler.counted(running=len(self._running), lost=self._lost)

    @property
    def in_handler(self) -> bool:
        """Whether a handler asks: it must not wait for itself."""
        return asyncio.current_task() in self._handling

    def submit(self, lane: Hashable, delivery: Delivery, on_done: OnDone) -> None:
        if self._stopping or self._scheduler.is_released(delivery.shard):
            on_done(GivenBack())
            return
        self._scheduler.submit(lane, delivery, on_done, self._clock())
        self._begin()

    def release(self, shard: str, on_released: OnReleased) -> None:
        settled, at_once = self._scheduler.release(shard, on_released)
        tell(settled)
        if at_once:
            on_released()

    def accept(self, shard: str) -> None:
        self._scheduler.accept(shard)

    def set_lease(self, shard: str, until: float | None) -> None:
        self._scheduler.set_lease(shard, until)
        self._begin()

    def waiting_since(self) -> Mapping[str, float]:
        return self._scheduler.waiting_since()

    def wind_down(self) -> None:
        """Begin nothing more, and give back what is not running."""
        self._stopping = True
        tell(self._scheduler.stop())

    async def stop(self, timeout: float) -> bool:
        """Give back what is not running and wait for the rest; what is left then is cancelled."""
        self.wind_down()
        finished = True
        try:
            async with asyncio.timeout(timeout):
                while self._scheduler.in_hand:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            finished = False
        self._cancelling = True
        for task in list(self._running):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        return finished

    def _begin(self) -> None:
        """Start as many handlers as may run, and look again when the next one may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while not self._stopping and len(self._running) < self._options.parallelism:
            now = self._clock()
            job = self._scheduler.next_job(now)
            if job is None:
                at = self._scheduler.next_time(now)
                if at is not None:
                    self._timer = self._loop.call_later(max(at - now, 0.001), self._begin)
                return
            task = self._loop.create_task(self._run(job))
            self._running.add(task)
            task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a handler's task failed", exc_info=task.exception())
        self._begin()

    async def _run(self, job: Job) -> None:
        handling = self._loop.create_task(self._call(job))
        self._handling.add(handling)
        handling.add_done_callback(self._handling.discard)
        try:
            end = await self._end_of(handling, job)
        except asyncio.CancelledError as error:
            handling.cancel()
            if self._cancelling:  # stop() gives up on it
                raise
            self.wind_down()
            self._fail("somebody has cancelled the group's tasks")
            end = failure_of(error)
        self._after(self._scheduler.finish(job, end, self._clock()))

    async def _end_of(
        self, handling: asyncio.Task[Any], job: Job
    ) -> Failed | Hung | NotBegun | None:
        await asyncio.wait([handling], timeout=self._options.handler_timeout)
        if not handling.done():
            limit = self._options.handler_timeout or 0.0
            await self._cancel(handling, limit)
            return Hung(limit)
        # Cancelled in the moment in which it returned: else its own call would have seen it.
        error = asyncio.CancelledError() if handling.cancelled() else handling.result()
        if error is None or type(error) is NotBegun:  # isinstance() would ask the error itself
            return error
        failed = failure_of(error)
        log_failure(job, error, failed)
        return failed

    async def _call(self, job: Job) -> BaseException | NotBegun | None:
        # A task begins when the loop comes to it, and that may have been blocked for long.
        if not self._scheduler.may_begin(job, self._clock()):
            return NotBegun()
        try:
            deliveries = job.deliveries()
            given: Any = deliveries if self._options.batch_size > 1 else deliveries[0]
            returned: object = self._handler(given)
            # A plain function has done its work when it returns.
            check_returned(await returned if inspect.isawaitable(returned) else returned)
        except KeyboardInterrupt as error:
            self._on_interrupt()
            return error
        except BaseException as error:  # SystemExit too would end the application's loop
            return error
        finally:
            end_forked_child(self._process)
        return None

    async def _cancel(self, handling: asyncio.Task[Any], limit: float) -> None:
        logger.error("a handler has not returned for %g s; it is cancelled", limit)
        handling.cancel()
        await asyncio.wait([handling], timeout=CANCEL_GRACE)
        if handling.done():
            return
        self._lost += 1
        handling.add_done_callback(self._on_found)
        if self._lost > self._options.max_lost_threads:
            self._fail(
                f"{self._lost} handlers hang, {self._options.max_lost_threads} are tolerated "
                "(max_lost_threads): none let itself be cancelled"
            )

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure(GroupFailed(why))

    def _on_found(self, _: object) -> None:
        self._lost -= 1

    def _after(self, settled: list[Settled]) -> None:
        tell(settled)
        for call in self._scheduler.take_released():
            call()
        if not self._scheduler.in_hand:
            self._emptied.set()

    def _on_dead_letter_stored(self, ticket: Ticket) -> None:
        self._scheduler.stored(ticket, self._clock())
        self._after([])
        self._begin()
