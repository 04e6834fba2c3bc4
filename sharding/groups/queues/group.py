"""`ConsumerGroup` and `AioConsumerGroup`: workers that share all shards of a logical queue.

Both are fronts of one `QueueWorker`: the first runs it on a loop in a thread of its own and
handlers in threads, the second on the application's loop and handlers as tasks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput, WarrenError
from sharding.groups.handling.tasks import AioHandler, HandlerTasks
from sharding.groups.handling.threads import Handler, HandlerThreads
from sharding.groups.options import GroupOptions
from sharding.groups.queues.connections import Dialer
from sharding.groups.queues.shard_reader import Runner
from sharding.groups.queues.worker import QueueWorker, exchange_of
from sharding.groups.running import SIGNALS, StopRequest, stopping_on_signals
from sharding.maps.shard_map import ShardKind, ShardMap
from sharding.metrics.sources import Subject

logger = logging.getLogger("warren.groups")

LEAVE_TIMEOUT = 5.0
"""For closing channels and connections, after the handlers have ended."""


class ConsumerGroup:
    """Any number of these, in any number of processes, read one logical queue together.

    Each shard is read by one of them at a time; loads differ by at most one shard; the shards of a
    worker that dies go to the others. `handler` gets one `Delivery` at a time, or with `batch_size`
    above 1 a list; a message is acknowledged when it returns, and tried again when it raises.

    A queue has one group by nature: what one worker acknowledged, no other will see. For several
    independent readers of the same messages use a stream.

    It works from `with` (or `start()`) on; `run()` waits until it is stopped.
    """

    def __init__(
        self,
        topology: Topology,
        logical: str,
        handler: Handler,
        *,
        options: GroupOptions | None = None,
    ) -> None:
        if not callable(handler):
            raise InvalidInput("handler", "must be callable", handler)
        self._topology = topology
        self.logical = logical
        self._handler = handler
        self.options = options or GroupOptions()
        self.options.dead_letters_of(logical)
        exchange_of(logical)
        self._maps = Maps(topology, logical)
        self.worker = new_worker_id()
        self.counted_as = Subject("group", {"logical": logical, "group": logical})
        self._runner: HandlerThreads | None = None
        self._worker: QueueWorker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._stop_request = StopRequest()
        self._stopping = threading.Lock()
        self._failure: BaseException | None = None

    def __enter__(self) -> ConsumerGroup:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<ConsumerGroup {self.logical!r}, worker {self.worker}, {len(self.shards)} shards>"

    @property
    def shards(self) -> frozenset[str]:
        """The shards this worker holds now."""
        return self._worker.held() if self._worker is not None else frozenset()

    @property
    def counters(self) -> Mapping[str, float]:
        """What happened since the start; `in_hand`, `running` and `lost_threads` are of now."""
        if self._runner is None or self._worker is None:
            return {}
        return {**self._runner.counters, **self._worker.counters}

    def start(self) -> None:
        """Begin to work, in threads of its own."""
        if self._thread is not None:
            raise InvalidInput("start", "may be called once", self)
        self._maps.check()
        self._runner = HandlerThreads(
            self._handler, self.options, on_failure=self._stop_request.ask
        )
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="warren-group", daemon=True
        )
        self._thread.start()
        started.wait()
        self._unsubscribe = self._topology.subscribe(lambda *_: self._look_again())

    def run(self) -> None:
        """Work until `stop()`, or until SIGTERM or SIGINT in the main thread, and stop in order.

        Raises what makes it useless to go on: too many handlers that hang, a queue without locks.
        """
        with stopping_on_signals(self._stop_request.ask):
            if self._thread is None:
                self.start()
            self._stop_request.wait()
        self.stop()
        failure = self._failure or (self._runner.failure if self._runner else None)
        if failure is not None:
            raise failure

    def stop(self, timeout: float | None = None) -> bool:
        """Finish what is running, give the rest back; whether it was finished within `timeout`.

        A handler that is still at work then is left alone, and its message goes to another worker.
        Called in a handler it only asks for the stop, which `run()` or another thread carries out.
        """
        self._stop_request.ask()
        if self._runner is not None and self._runner.in_handler:
            return False
        with self._stopping:
            thread, loop, runner = self._thread, self._loop, self._runner
            if thread is None or loop is None or runner is None or not thread.is_alive():
                return True
            self._unsubscribe()
            if self._worker is not None:
                with suppress(RuntimeError):  # it has ended by itself
                    loop.call_soon_threadsafe(self._worker.wind_down)
            patience = self.options.stop_timeout if timeout is None else timeout
            runner.wind_down()
            logger.info("stopping; handlers have %g s to finish", patience)
            finished = runner.stop(patience)
            if not finished:
                logger.warning("handlers are still at work after %g s; they are left", patience)
            with suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(self._end.set)
            thread.join(2 * LEAVE_TIMEOUT)
            return finished

    # The thread of the I/O loop.

    def _run(self, started: threading.Event) -> None:
        try:
            asyncio.run(self._work(started))
        except BaseException as error:
            self._failure = error
            if not isinstance(error, WarrenError):
                logger.exception("the worker of %s has ended", self.logical)
        finally:
            started.set()
            self._stop_request.ask()

    async def _work(self, started: threading.Event) -> None:
        assert self._runner is not None
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._worker = new_worker(
            self._topology, self._maps, self._runner, self.worker, self.options
        )
        started.set()
        working = asyncio.create_task(self._worker.run())
        ending = asyncio.create_task(self._end.wait())
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        failed = working.done()
        for task in (working, ending):
            task.cancel()
        results = await asyncio.gather(working, ending, return_exceptions=True)
        if failed:
            await asyncio.to_thread(self._runner.stop, self.options.stop_timeout)
        await self._worker.leave(LEAVE_TIMEOUT)
        if failed and isinstance(results[0], BaseException):
            raise results[0]

    def _look_again(self) -> None:
        if self._loop is not None and self._worker is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._worker.look_again)


class Maps:
    """The newest map of one logical queue; the last one known while the topology has none."""

    def __init__(self, topology: Topology, logical: str) -> None:
        self._topology = topology
        self.logical = logical
        self._last: ShardMap | None = None

    def check(self) -> None:
        """Raise unless there is a map of queues that a group can read."""
        shard_map = self._last = self._topology.shard_map(self.logical)
        if shard_map is None:
            raise InvalidInput("logical queue", "must be one that is sharded", self.logical)
        if shard_map.kind is ShardKind.STREAM:
            raise InvalidInput(
                "logical queue", "must be of queues; streams have StreamConsumerGroup", self.logical
            )
        kind = shard_map.policy.queue_arguments.get("x-queue-type", "classic")
        if kind != "classic":
            raise InvalidInput(
                "x-queue-type",
                "must be classic: other queues do not know exclusive consumers",
                kind,
            )

    def current(self) -> ShardMap | None:
        try:
            self._last = self._topology.shard_map(self.logical)
        except WarrenError as error:  # too old to publish by is good enough to read by
            logger.debug("the map of %s is the one known before: %s", self.logical, error)
        return self._last


def new_worker_id() -> str:
    """Who a worker is to the others: readable, and never the same twice."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def new_worker(
    topology: Topology,
    maps: Maps,
    runner: Runner,
    worker: str,
    options: GroupOptions,
    clock: Callable[[], float] = time.monotonic,
) -> QueueWorker:
    name = f"{worker} of {maps.logical}"
    dialer = Dialer(topology.connection_parameters, name, options)
    return QueueWorker(worker, maps.current, runner, dialer, options, maps.logical, clock)


class AioConsumerGroup:
    """The same as `ConsumerGroup`, with an asynchronous handler, on the application's own loop.

        async with AioConsumerGroup(topology, "images", handle) as group:
            await group.run()

    Workers of both kinds may share one logical queue. `parallelism` counts handlers that are
    awaited at one time; a handler that blocks the loop blocks the heartbeats too, and in the end
    loses its shards.
    """

    def __init__(
        self,
        topology: Topology,
        logical: str,
        handler: AioHandler,
        *,
        options: GroupOptions | None = None,
    ) -> None:
        if not callable(handler):
            raise InvalidInput("handler", "must be callable", handler)
        self._topology = topology
        self.logical = logical
        self._handler = handler
        self.options = options or GroupOptions()
        self.options.dead_letters_of(logical)
        exchange_of(logical)
        self._maps = Maps(topology, logical)
        self.worker = new_worker_id()
        self.counted_as = Subject("group", {"logical": logical, "group": logical})
        self._runner: HandlerTasks | None = None
        self._worker: QueueWorker | None = None
        self._working: asyncio.Task[None] | None = None
        self._left = False
        self._stop_wanted = asyncio.Event()
        self._stopping = asyncio.Lock()
        self._unsubscribe: Callable[[], None] = lambda: None

    async def __aenter__(self) -> AioConsumerGroup:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __repr__(self) -> str:
        shards = len(self.shards)
        return f"<AioConsumerGroup {self.logical!r}, worker {self.worker}, {shards} shards>"

    @property
    def shards(self) -> frozenset[str]:
        """The shards this worker holds now."""
        return self._worker.held() if self._worker is not None else frozenset()

    @property
    def counters(self) -> Mapping[str, float]:
        if self._runner is None or self._worker is None:
            return {}
        return {**self._runner.counters, **self._worker.counters}

    async def start(self) -> None:
        """Begin to work, in tasks of its own."""
        if self._worker is not None:
            raise InvalidInput("start", "may be called once", self)
        await asyncio.to_thread(self._maps.check)  # it may wait for the first map
        loop = asyncio.get_running_loop()
        self._runner = HandlerTasks(
            self._handler, self.options, clock=loop.time, on_failure=self._stop_wanted.set
        )
        worker = self._worker = new_worker(
            self._topology,
            self._maps,
            self._runner,
            self.worker,
            self.options,
            loop.time,
        )
        self._working = asyncio.create_task(worker.run())
        self._working.add_done_callback(lambda _: self._stop_wanted.set())

        def look_again(*_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(worker.look_again)

        self._unsubscribe = self._topology.subscribe(look_again)

    async def run(self) -> None:
        """Work until `stop()`, or until SIGTERM or SIGINT in the main thread, and stop in order."""
        if self._worker is None:
            await self.start()
        loop = asyncio.get_running_loop()
        with suppress(RuntimeError, NotImplementedError, ValueError):  # not the main thread
            for number in SIGNALS:
                loop.add_signal_handler(number, self._stop_wanted.set)
        try:
            await self._stop_wanted.wait()
        finally:
            with suppress(RuntimeError, NotImplementedError, ValueError):
                for number in SIGNALS:
                    loop.remove_signal_handler(number)
        failed = self._working is not None and self._working.done()
        await self.stop()
        if failed and self._working is not None and not self._working.cancelled():
            self._working.result()
        if self._runner is not None and self._runner.failure is not None:
            raise self._runner.failure

    async def stop(self, timeout: float | None = None) -> bool:
        """Finish what is running, give the rest back; whether it was finished within `timeout`.

        Called in a handler it only asks for the stop, which `run()` carries out.
        """
        self._stop_wanted.set()
        if self._runner is not None and self._runner.in_handler:
            return False
        async with self._stopping:
            if self._worker is None or self._runner is None or self._working is None:
                return True
            if self._left:
                return True
            self._left = True
            self._unsubscribe()
            self._worker.wind_down()
            patience = self.options.stop_timeout if timeout is None else timeout
            self._runner.wind_down()
            logger.info("stopping; handlers have %g s to finish", patience)
            finished = await self._runner.stop(patience)
            if not finished:
                logger.warning("handlers were still at work after %g s; cancelled", patience)
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
            await self._worker.leave(LEAVE_TIMEOUT)
            return finished
