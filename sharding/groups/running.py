"""What all groups show the application: who their worker is, what it has, how it runs and stops."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, Self

from sharding.errors import InvalidInput, WarrenError, reason
from sharding.groups.handling.delivery import check_callback, check_handler, check_returned
from sharding.groups.handling.tasks import HandlerTasks
from sharding.groups.handling.threads import Handler, HandlerThreads
from sharding.groups.log import logger
from sharding.groups.options import GroupOptions
from sharding.metrics.names import Subject

OnFailure = Callable[[BaseException], object]
_TELLER = "warren-on-failure"


def new_worker_id() -> str:
    """Who a worker is to the others: readable, and never the same twice."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Worker(Protocol):
    """What takes, reads and gives up shards; of queues or of streams."""

    @property
    def counters(self) -> Mapping[str, float]: ...

    def held(self) -> frozenset[str]: ...


class GroupFront:
    """One worker of a group, as the application has it. A queue has one group, without a name.

    Starting gives it what runs handlers and what holds shards, `_runner` first. When it becomes
    useless to go on it fails: that is logged, told to `on_failure`, kept as `failure`, and raised
    by `run()` or on leaving `with`, whichever comes first; its shards go to other workers.
    """

    options: GroupOptions
    _runner: HandlerThreads | HandlerTasks | None = None
    _worker: Worker | None = None

    def __init__(
        self,
        logical: str,
        group: str | None,
        handler: Callable[[Any], object],
        options: GroupOptions,
        on_failure: OnFailure | None,
        *,
        awaited: bool = False,
    ) -> None:
        check_handler(handler, awaited=awaited)
        if on_failure is not None:
            check_callback("on_failure", on_failure)
        options.dead_letters_of(logical)  # raises if that can't be a name
        self.options = options
        self.worker = new_worker_id()
        self.counted_as = Subject("group", {"logical": logical, "group": group or logical})
        self.failure: BaseException | None = None
        """Why it has ended by itself; None while it works, and after `stop()`."""
        self._on_failure = on_failure
        self._claiming = threading.Lock()
        self._started = False
        self._failure_is_told = False
        self._about = f"{logical!r}" if group is None else f"{group!r} of {logical!r}"

    def __repr__(self) -> str:
        shards = len(self.shards)
        return f"<{type(self).__name__} {self._about}, worker {self.worker}, {shards} shards>"

    @property
    def shards(self) -> frozenset[str]:
        """The shards (of a super stream: the partitions) that this worker holds now."""
        return self._worker.held() if self._worker is not None else frozenset()

    @property
    def counters(self) -> Mapping[str, float]:
        """What happened since the start; `in_hand`, `running` and `lost_threads` are of now."""
        if self._runner is None or self._worker is None:
            return {}
        return {**self._runner.counters, **self._worker.counters}

    @property
    def healthy(self) -> bool:
        """Whether it works: it was started, has not failed, and nobody has asked it to stop."""
        return self._runner is not None and self.failure is None and not self._is_stopping

    @property
    def _is_stopping(self) -> bool:
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        """It is useless to go on; the first reason counts."""
        with self._claiming:
            if self.failure is not None:
                return
            self.failure = error
        # Only errors of ours say all there is to say.
        trace = None if isinstance(error, WarrenError) else error
        logger.error("the worker of %s stops: %s", self._about, reason(error), exc_info=trace)
        # Nobody may be waiting in run(), and a worker that failed must hold no shard idle; not even
        # for as long as the application takes to hear of it.
        self._stop_by_itself()
        self._tell_failure(error)

    def _stop_by_itself(self) -> None:
        raise NotImplementedError

    def _tell_failure(self, error: BaseException) -> None:
        if self._on_failure is None:
            return
        try:
            check_returned(self._on_failure(error), "on_failure")
        except BaseException:  # the application's own; it must not end a thread of ours
            logger.exception("on_failure raised")

    def _raise_failure(self) -> None:
        if self.failure is not None and not self._failure_is_told:
            self._failure_is_told = True
            raise self.failure

    @contextmanager
    def _first_start(self, *, ended: bool = False) -> Iterator[None]:
        """Raises at the second one, also while the first is under way; one that failed is none."""
        with self._claiming:
            if self._started or ended:
                raise InvalidInput("start", "may be called once", self)
            self._started = True
        try:
            yield
        except BaseException:
            self._started = False
            raise

    def _patience(self, timeout: float | None) -> float:
        return self.options.stop_timeout if timeout is None else timeout


class BlockingFront(GroupFront):
    """One that works in threads of its own; whoever calls it waits."""

    _runner: HandlerThreads | None = None
    _has_begun = False
    _has_ended = False
    _has_finished = True
    """Whether the handlers ended in time."""

    def __init__(
        self,
        logical: str,
        group: str | None,
        handler: Handler,
        options: GroupOptions,
        on_failure: OnFailure | None,
    ) -> None:
        super().__init__(logical, group, handler, options, on_failure)
        self._handler = handler
        self._stop_request = StopRequest()
        self._told = threading.Event()
        self._changing = threading.Lock()
        self._changer: int | None = None
        """The thread that starts or stops it; a signal handler may interrupt that one."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop()
        if kind is None:
            self._raise_failure()

    def start(self) -> None:
        """Begin to work, in threads of its own; raises what stands in the way."""
        with self._first_start(ended=self._has_ended), self._one_at_a_time():
            self._begin()
            self._has_begun = True
        if self._stop_request.is_asked:  # meanwhile
            self.stop()

    def run(self) -> None:
        """Work until `stop()`, or until SIGTERM or SIGINT in the main thread, and stop in order.

        Raises what makes it useless to go on: too many handlers that hang, a queue without locks,
        a lost permission.
        """
        try:
            # First of all: a signal while it starts would end the process with shards in its hands.
            with stopping_on_signals(self._stop_request.ask):
                if not self._started:
                    self.start()
                self._stop_request.wait()
        finally:  # whatever ends the waiting: nobody would know that it works on
            self.stop()
        self._raise_failure()

    def stop(self, timeout: float | None = None) -> bool:
        """Finish what is running, give the rest back; whether it was finished within `timeout`.

        A handler that is still at work then is left alone, and its message goes to another worker.
        Called in a handler, or by a signal while it starts or stops, it only asks for the stop,
        which `run()` or another thread carries out.
        """
        self._stop_request.ask()
        if self._runner is not None and self._runner.in_handler:
            return False
        if self._changer == threading.get_ident():
            return False
        with self._one_at_a_time():
            if self._has_begun and not self._has_ended:
                self._has_finished = self._end(self._patience(timeout))
                self._has_ended = True  # not before: an interrupted one is finished by the next
            return self._has_finished

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        with self._changing:
            self._changer = threading.get_ident()
            try:
                yield
            finally:
                self._changer = None

    @property
    def _is_stopping(self) -> bool:
        return self._stop_request.is_asked

    def _stop_by_itself(self) -> None:
        self._stop_request.ask()
        if not _started(self.stop, "warren-stop"):
            logger.error("shards of %s are given back by run(), or on leaving with", self._about)

    def _tell_failure(self, error: BaseException) -> None:
        def tell() -> None:
            super(BlockingFront, self)._tell_failure(error)
            self._told.set()

        if not _started(tell, _TELLER):
            tell()

    def _raise_failure(self) -> None:
        # The process may end with this error, and on_failure should have been heard before.
        if self.failure is not None and threading.current_thread().name != _TELLER:
            self._told.wait(self.options.stop_timeout)
        super()._raise_failure()

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self, patience: float) -> bool:
        """Whether handlers ended in time. Called again if it was interrupted."""
        raise NotImplementedError


def _started(work: Callable[[], object], name: str) -> bool:
    """Whether a thread does it now; not where the process can have no more of them, which may be
    just what a group fails for."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        logger.error("no thread can be started: %s", error)
        return False
    return True


# Running in the foreground: until somebody asks for the stop, or a signal does.

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Somebody's wish that the worker stops, which another thread waits for.

    `ask` may be called from a signal handler: a threading.Event could be locked at that moment, by
    the very thread that the handler interrupts; a SimpleQueue is made for this.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def is_asked(self) -> bool:
        return not self._asked.empty()

    def ask(self) -> None:
        self._asked.put(None)

    def wait(self) -> None:
        self._asked.get()
        self._asked.put(None)  # for whoever waits too


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT; at the second one the process ends as usual.

    Signals reach the main thread only; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(_: int, __: FrameType | None) -> None:
        restore()
        stop()

    for number in SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()
