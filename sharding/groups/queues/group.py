"""`ConsumerGroup` and `AioConsumerGroup`: workers that share all shards of a logical queue.

Both are fronts of one `QueueWorker`: the first runs it on a loop in a thread of its own and
handlers in threads, the second on the application's loop and handlers as tasks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput, WarrenError
from sharding.groups.handling.delivery import GroupFailed
from sharding.groups.handling.tasks import AioHandler, HandlerTasks
from sharding.groups.handling.threads import Handler, HandlerThreads
from sharding.groups.log import logger
from sharding.groups.options import GroupOptions
from sharding.groups.queues.connections import Dialer
from sharding.groups.queues.shard_reader import Runner
from sharding.groups.queues.worker import QueueWorker, exchange_of
from sharding.groups.running import SIGNALS, BlockingFront, GroupFront, OnFailure
from sharding.maps.shard_map import ShardKind, ShardMap

LEAVE_TIMEOUT = 5.0
"""For closing channels and connections, after the handlers have ended."""


class ConsumerGroup(BlockingFront):
    """Any number of these, in any number of processes, read one logical queue together.

    Each shard is read by one of them at a time; loads differ by at most one shard; the shards of a
    worker that dies go to the others. `handler` gets one `Delivery` at a time, or with `batch_size`
    above 1 a list; a message is acknowledged when it returns, and tried again when it raises.

    A queue has one group by nature: what one worker acknowledged, no other will see. For several
    independent readers of the same messages use a stream.

    It works from `with` (or `start()`) on; `run()` waits until it is stopped.
    """

    _worker: QueueWorker | None = None

    def __init__(
        self,
        topology: Topology,
        logical: str,
        handler: Handler,
        *,
        options: GroupOptions | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        super().__init__(logical, None, handler, options or GroupOptions(), on_failure)
        self.logical = logical
        self._queue = LogicalQueue(topology, logical)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def _begin(self) -> None:
        self._queue.check(self.options.dead_letters_of(self.logical))
        self._runner = HandlerThreads(self._handler, self.options, on_failure=self._fail)
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="warren-group", daemon=True
        )
        self._thread.start()
        started.wait()
        self._unsubscribe = self._queue.topology.subscribe(lambda *_: self._look_again())

    def _end(self, patience: float) -> bool:
        thread, loop, runner = self._thread, self._loop, self._runner
        if thread is None or loop is None or runner is None:
            return True
        if not thread.is_alive():
            return runner.stop(0)
        self._unsubscribe()
        # First, or a key would go on behind a dead letter that the worker stops trying to store.
        runner.wind_down()
        if self._worker is not None:
            with suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(self._worker.wind_down)
        logger.info("stopping; handlers have %g s to finish", patience)
        finished = runner.stop(patience)
        if not finished:
            logger.warning("handlers are still at work after %g s; they are left", patience)
        with suppress(RuntimeError):  # it has ended by itself
            loop.call_soon_threadsafe(self._ended.set)
        thread.join(2 * LEAVE_TIMEOUT)
        return finished

    # The thread of the I/O loop.

    def _run(self, started: threading.Event) -> None:
        try:
            asyncio.run(self._work(started))
        except BaseException as error:
            self._fail(error)
        finally:
            started.set()
            self._stop_request.ask()

    async def _work(self, started: threading.Event) -> None:
        assert self._runner is not None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._worker = self._queue.new_worker(self.worker, self._runner, self.options)
        started.set()
        working = asyncio.create_task(self._worker.run())
        ending = asyncio.create_task(self._ended.wait())
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        failed = working.done()
        for task in (working, ending):
            task.cancel()
        results = await asyncio.gather(working, ending, return_exceptions=True)
        if failed and isinstance(results[0], BaseException):
            self._fail(results[0])
            await asyncio.to_thread(self._runner.stop, self.options.stop_timeout)
        await self._worker.leave(LEAVE_TIMEOUT)

    def _look_again(self) -> None:
        if self._loop is not None and self._worker is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._worker.look_again)


class LogicalQueue:
    """What a group reads: its newest map (the last one known while the topology has none), and
    workers for it.
    """

    def __init__(self, topology: Topology, logical: str) -> None:
        exchange_of(logical)  # raises if that can't be a name
        self.topology = topology
        self._logical = logical
        self._last: ShardMap | None = None

    def check(self, dead_letters: str | None) -> None:
        """Raise unless there is a map of queues that a group can read, and a place for its dead
        letters."""
        shard_map = self._last = self.topology.shard_map(self._logical)
        if shard_map is None:
            raise InvalidInput("logical queue", "must be one that is sharded", self._logical)
        if shard_map.kind is ShardKind.STREAM:
            raise InvalidInput(
                "logical queue",
                "must be of queues; streams have StreamConsumerGroup",
                self._logical,
            )
        if shard_map.policy.queue_arguments.get("x-single-active-consumer"):
            raise InvalidInput(
                "x-single-active-consumer",
                "must not be set: such a queue has no exclusive consumer, which is a group's lock",
                self._logical,
            )
        if dead_letters is not None and self.topology.shard_map(dead_letters) is not None:
            raise InvalidInput(
                "dead_letter", "must not be a sharded name: no worker would see them", dead_letters
            )
        if dead_letters in {shard.name for shard in shard_map.shards}:
            raise InvalidInput(
                "dead_letter", "must not be a shard: they would be handled again", dead_letters
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
            self._last = self.topology.shard_map(self._logical)
        except WarrenError as error:  # too old to publish by is good enough to read by
            logger.debug("the map of %s is the one known before: %s", self._logical, error)
        return self._last

    def new_worker(self, me: str, runner: Runner, options: GroupOptions) -> QueueWorker:
        name = f"{me} of {self._logical}"
        dialer = Dialer(self.topology.connection_parameters, name, options)
        return QueueWorker(me, self.current, runner, dialer, options, self._logical)


class AioConsumerGroup(GroupFront):
    """The same as `ConsumerGroup`, with an asynchronous handler, on the application's own loop.

        async with AioConsumerGroup(topology, "images", handle) as group:
            await group.run()

    Workers of both kinds may share one logical queue. `parallelism` counts handlers that are
    awaited at one time; a handler that blocks the loop blocks the heartbeats too, and in the end
    loses its shards.
    """

    _runner: HandlerTasks | None = None
    _worker: QueueWorker | None = None

    def __init__(
        self,
        topology: Topology,
        logical: str,
        handler: AioHandler,
        *,
        options: GroupOptions | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        chosen = options or GroupOptions()
        super().__init__(logical, None, handler, chosen, on_failure, awaited=True)
        self.logical = logical
        self._queue = LogicalQueue(topology, logical)
        self._handler = handler
        self._working: asyncio.Task[None] | None = None
        self._stop_wanted = asyncio.Event()
        self._starting = asyncio.Lock()
        self._ending: asyncio.Future[bool] | None = None
        self._stopping: asyncio.Future[bool] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    async def __aenter__(self) -> AioConsumerGroup:
        await self.start()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.stop()
        if kind is None:
            self._raise_failure()

    async def start(self) -> None:
        """Begin to work, in tasks of its own; raises what stands in the way."""
        with self._first_start():
            async with self._starting:
                await self._begin()
        if self._stop_wanted.is_set():  # meanwhile
            await self.stop()

    async def _begin(self) -> None:
        dead_letters = self.options.dead_letters_of(self.logical)
        await asyncio.to_thread(self._queue.check, dead_letters)  # it may wait for the first map
        loop = asyncio.get_running_loop()
        self._runner = HandlerTasks(
            self._handler,
            self.options,
            on_failure=self._fail,
            on_interrupt=self._stop_wanted.set,
        )
        worker = self._worker = self._queue.new_worker(self.worker, self._runner, self.options)
        self._working = asyncio.create_task(worker.run())
        self._working.add_done_callback(self._on_worker_ended)

        def look_again(*_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(worker.look_again)

        self._unsubscribe = self._queue.topology.subscribe(look_again)

    async def run(self) -> None:
        """Work until `stop()`, or until SIGTERM or SIGINT in the main thread, and stop in order."""
        # First of all: a signal while it starts would end the process with shards in its hands.
        loop = asyncio.get_running_loop()
        with suppress(RuntimeError, NotImplementedError, ValueError):  # not the main thread
            for number in SIGNALS:
                loop.add_signal_handler(number, self._stop_wanted.set)
        try:
            if not self._started:
                await self.start()
            await self._stop_wanted.wait()
        finally:
            with suppress(RuntimeError, NotImplementedError, ValueError):
                for number in SIGNALS:
                    loop.remove_signal_handler(number)
            # Whatever ends the waiting, cancelling too: nobody would know that it works on.
            await self.stop()
        self._raise_failure()

    def _on_worker_ended(self, working: asyncio.Task[None]) -> None:
        if not working.cancelled():
            error = working.exception()
            if error is not None:
                self._fail(error)
        elif self._ending is None:
            self._fail(GroupFailed("somebody has cancelled the group's tasks"))

    @property
    def _is_stopping(self) -> bool:
        return self._stop_wanted.is_set()

    def _stop_by_itself(self) -> None:
        self._stopping = asyncio.ensure_future(self.stop())

    async def stop(self, timeout: float | None = None) -> bool:
        """Finish what is running, give the rest back; whether it was finished within `timeout`.

        Called in a handler it only asks for the stop, which `run()` carries out.
        """
        self._stop_wanted.set()
        if self._runner is not None and self._runner.in_handler:
            return False
        async with self._starting:  # a start that is under way comes to its end
            if self._ending is None and self._worker is not None:
                self._ending = asyncio.ensure_future(self._end(self._patience(timeout)))
        if self._ending is None:
            return True
        # Whoever stops waiting must not leave it half-way, with shards that nobody reads.
        return await asyncio.shield(self._ending)

    async def _end(self, patience: float) -> bool:
        assert self._worker is not None
        assert self._runner is not None
        assert self._working is not None
        self._unsubscribe()
        self._runner.wind_down()  # first, as a ConsumerGroup does
        self._worker.wind_down()
        logger.info("stopping; handlers have %g s to finish", patience)
        finished = await self._runner.stop(patience)
        if not finished:
            logger.warning("handlers were still at work after %g s; cancelled", patience)
        self._working.cancel()
        await asyncio.gather(self._working, return_exceptions=True)
        await self._worker.leave(LEAVE_TIMEOUT)
        return finished
