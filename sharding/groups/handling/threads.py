"""The threads that run handlers. It knows nothing of queues and streams.

The interface, for whoever reads messages (the *owner*):

* `submit(lane, delivery, on_done)`: have the message handled. Messages of one lane of one shard
  run one after another, in the order of submission; other lanes go on meanwhile. `on_done` is
  called on a thread of the runner with `Done()`, `Dead(…)` or `GivenBack()`: once, or again where
  it was interrupted (see below), which must do no harm; it must be quick. After `Dead` the lane
  waits until the owner calls its `stored()`.
* `release(shard, on_released)`: the shard is about to be given up. What is not running is given
  back before this returns, what runs is finished (a failure is given back, not tried again), and
  then, when nothing of the shard is in hand, `on_released` is called. Deliveries submitted to it
  later are given back at once, until `accept(shard)`.
* `trim(shard)`: give back what was submitted after all that was begun. What was submitted before is
  finished, so that there is one place between what was handled here and what was not.
* `set_lease(shard, until)`: begin no message of the shard after this moment of the clock.
* `wind_down()`: begin nothing more, of any shard; what is not running is given back.
* `stop(timeout)`: the same, and wait; True if all handlers ended in time.
* `on_failure(error)` is called once, when so many handlers hang that it is useless to go on, or a
  thread can't be replaced because the process can have no more.

No bound on what may be submitted is kept here: the owner's prefetch is that bound.

A thread whose handler takes longer than `handler_timeout` is *lost*: what it does is not heard any
more, a new thread takes its place, and it ends when its handler returns. Watching for that is the
work of one more thread, which only exists where there is a timeout.

No other thread ends before its time, and no message is left unsettled with it, whatever is raised
where: by the handler, by its error while that is logged, by somebody who throws an error into a
thread from outside. Python can't put such an error off, so it may strike anywhere, also between two
steps that belong together: what follows from each other is then put right from what is known to be
in hand, and owners may hear of a message twice.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Hashable, Mapping
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
from sharding.groups.handling.scheduler import Hung, Job, OnReleased, Scheduler, Settled, Ticket
from sharding.groups.log import logger
from sharding.groups.options import GroupOptions

_random = random.Random()  # its own, so that nobody else's sequence of numbers changes

Handler = Callable[[Any], object]
"""Gets a Delivery, or where `batch_size` is above 1 a list of them. What it returns is ignored, but
an awaitable or a generator is a failure: nothing has been done."""


class HandlerThreads:
    def __init__(
        self,
        handler: Handler,
        options: GroupOptions,
        *,
        on_failure: Callable[[GroupFailed], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = _random.random,
    ) -> None:
        self._handler = handler
        self._options = options
        self._on_failure = on_failure
        self._clock = clock
        # Taken as it is: an error thrown into a thread may hit a condition's own `with`, which is
        # Python, and would leave it locked for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs = threading.Condition(self._lock)
        """What threads without a job wait for; one call for one message must wake one of them."""
        self._scheduler = Scheduler(options, chance, self._on_dead_letter_stored)
        self._running: dict[Job, int] = {}  # on which thread
        self._threads: set[int] = set()
        self._last: dict[int, Job] = {}  # by thread, what it took last
        self._process = os.getpid()
        self._lost = 0
        self._stopping = False
        self._failed = False
        for _ in range(options.parallelism):
            self._start_thread()
        if options.handler_timeout is not None:
            threading.Thread(target=self._watch, name="warren-watch", daemon=True).start()

    @property
    def counters(self) -> Mapping[str, float]:
        with self._lock:
            return self._scheduler.counted(running=len(self._running), lost=self._lost)

    @property
    def in_handler(self) -> bool:
        """Whether a handler asks: it must not wait for itself."""
        return threading.get_ident() in self._threads

    def submit(self, lane: Hashable, delivery: Delivery, on_done: OnDone) -> None:
        with self._lock:
            refused = self._stopping or self._scheduler.is_released(delivery.shard)
            if not refused:
                self._scheduler.submit(lane, delivery, on_done, self._clock())
                self._jobs.notify()
        if refused:
            on_done(GivenBack())

    def release(self, shard: str, on_released: OnReleased) -> None:
        with self._lock:
            settled, at_once = self._scheduler.release(shard, on_released)
        tell(settled)
        if at_once:
            on_released()

    def trim(self, shard: str) -> None:
        with self._lock:
            settled = self._scheduler.trim(shard)
        tell(settled)

    def accept(self, shard: str) -> None:
        with self._lock:
            self._scheduler.accept(shard)

    def set_lease(self, shard: str, until: float | None) -> None:
        with self._lock:
            self._scheduler.set_lease(shard, until)
            self._jobs.notify_all()

    def waiting_since(self) -> Mapping[str, float]:
        with self._lock:
            return self._scheduler.waiting_since()

    def wind_down(self) -> None:
        """Begin nothing more, and give back what is not running."""
        with self._lock:
            self._stopping = True
            settled = self._scheduler.stop()
            self._notify_all()
        tell(settled)

    def stop(self, timeout: float) -> bool:
        """Give back what is not running and wait for the rest; whether it ended in time."""
        self.wind_down()
        with self._lock:
            return self._changed.wait_for(lambda: not self._scheduler.in_hand, timeout)

    # The threads.

    def _add_thread(self, *left: Job | None) -> None:
        try:
            self._start_thread(*left)
        except RuntimeError as error:  # there is a limit to what a process may have
            self._fail(f"a thread for handlers can't be replaced: {error}")

    def _start_thread(self, *left: Job | None) -> None:
        """`left` is what another thread took last that has ended before its time."""
        threading.Thread(target=self._work, args=left, name="warren-handler", daemon=True).start()

    def _work(self, *left: Job | None) -> None:
        me = threading.get_ident()
        self._threads.add(me)
        try:
            if left:
                self._recover(left[0], Failed("a thread for handlers has ended"))
                left = ()
            while not self._work_on_jobs(me):
                continue
        except BaseException as error:  # while it dealt with another one
            logger.error("a thread for handlers is replaced after %s", failure_of(error).error)
            self._add_thread(*(left or (self._last.get(me),)))
        finally:
            self._threads.discard(me)

    def _work_on_jobs(self, me: int) -> bool:
        """Whether that came to its end; else somebody threw an error into this thread.

        Helpers for time-outs do, and the error may come when the handler has long returned.
        """
        try:
            job = self._next_job(me)
            while job is not None and self._finish(job, self._handle(job)):
                job = self._next_job(me)
        except BaseException as error:
            failed = failure_of(error)
            logger.error("a thread for handlers goes on after %s", failed.error)
            self._recover(self._last.get(me), failed)
            return False
        return True

    def _next_job(self, me: int) -> Job | None:
        with self._lock:
            while not self._stopping:
                now = self._clock()
                job = self._scheduler.next_job(now)
                if job is not None:
                    self._last[me] = job
                    self._running[job] = me
                    return job
                at = self._scheduler.next_time(now)
                self._jobs.wait(None if at is None else max(at - now, 0.001))
        return None

    def _handle(self, job: Job) -> BaseException | None:
        """What the handler raised."""
        try:
            deliveries = job.deliveries()
            given = deliveries if self._options.batch_size > 1 else deliveries[0]
            check_returned(self._handler(given))
        except BaseException as error:  # also SystemExit: the message must be settled
            return error
        finally:
            end_forked_child(self._process)
        return None

    def _finish(self, job: Job, error: BaseException | None) -> bool:
        """Whether this thread goes on: one that was given up for lost ends here."""
        with self._lock:
            if job.abandoned:
                self._lost -= 1
                return False
        failed = None if error is None else failure_of(error)
        if error is not None and failed is not None:
            log_failure(job, error, failed)
        with self._lock:
            if job.abandoned:  # just now
                self._lost -= 1
                return False
            settled = self._settle(job, failed)
        self._after(settled)
        return True

    def _recover(self, left: Job | None, failed: Failed) -> None:
        """Go on where a thread was interrupted, wherever that was; may be done again."""
        with self._lock:
            if left is not None and left.abandoned:
                left = None  # it was settled when it was given up
            running = [job for job in self._running if job is not left]
            settled = self._scheduler.recover(left, running, failed, self._clock())
            if left is not None:
                self._running.pop(left, None)
        self._after(settled)

    def _settle(self, job: Job, end: Failed | Hung | None) -> list[Settled]:
        settled = self._scheduler.finish(job, end, self._clock())
        self._running.pop(job, None)
        return settled

    def _after(self, settled: list[Settled]) -> None:
        tell(settled)
        with self._lock:
            released = self._scheduler.take_released()
            self._notify_all()
        for call in released:
            call()

    def _notify_all(self) -> None:
        self._jobs.notify_all()
        self._changed.notify_all()

    def _on_dead_letter_stored(self, ticket: Ticket) -> None:
        with self._lock:
            self._scheduler.stored(ticket, self._clock())
        self._after([])

    # Handlers that hang.

    def _watch(self) -> None:
        limit = self._options.handler_timeout
        assert limit is not None
        while True:
            with self._lock:
                now = self._clock()
                hung = [job for job in self._running if now - job.begun >= limit]
                if not hung:
                    if self._stopping and not self._running:
                        return
                    began = min((job.begun for job in self._running), default=now)
                    self._changed.wait(min(max(began + limit - now, 0.001), limit / 2))
                    continue
            for job in hung:
                self._give_up(job, limit)

    def _give_up(self, job: Job, limit: float) -> None:
        with self._lock:
            if job not in self._running:
                return
            job.abandoned = True
            self._lost = lost = self._lost + 1
            settled = self._settle(job, Hung(limit))
        most = self._options.max_lost_threads
        too_many = lost > most
        logger.error(
            "a handler has not returned for %g s; its thread is lost, the %d. of at most %d",
            limit,
            lost,
            most,
        )
        self._after(settled)
        if not too_many:
            self._add_thread()
        else:
            self._fail(
                f"{lost} handlers hang, {most} are tolerated "
                f"(max_lost_threads): none returned within {limit:g} s (handler_timeout)"
            )

    def _fail(self, why: str) -> None:
        with self._lock:
            is_first, self._failed = not self._failed, True
        if is_first:
            self._on_failure(GroupFailed(why))


def end_forked_child(process: int) -> None:
    """End the process if it is another one: a handler has forked, and its child came back.

    It has a copy of all that is in hand and of every connection. What it did with them would be
    done twice, and its parent goes on with the message.
    """
    if os.getpid() != process:
        logger.error("a handler has forked and its child returned; the child is ended")
        os._exit(1)


def log_failure(job: Job, error: BaseException, failed: Failed) -> None:
    """Say that a handler failed; how, only the first time."""
    shards = ", ".join(sorted({ticket.delivery.shard for ticket in job.tickets}))
    first = job.tickets[0]
    what = (
        f"key {first.delivery.key!r}" if len(job.tickets) == 1 else f"{len(job.tickets)} messages"
    )
    logger.warning(
        "a handler failed on %s of %s, attempt %d: %s",
        what,
        shards,
        first.tries,
        failed.error,
        exc_info=error if first.tries == 1 else None,
    )


def tell(settled: list[Settled]) -> None:
    """Call the owner, outside of any lock; what it raises must not end a thread of ours.

    It is asked once more then, since the error may have been thrown in from outside: to hear of a
    message twice does no harm, and of one that nobody heard of, it waits for ever.
    """
    for ticket, outcome in settled:
        for _ in range(2):
            try:
                ticket.on_done(outcome)
                break
            except Exception as error:
                logger.error("the owner of a message failed to settle it", exc_info=error)
        ticket.told = True
