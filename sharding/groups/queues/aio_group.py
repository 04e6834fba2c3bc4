"""`AioConsumerGroup`: a worker of a queue group on the application's own asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput
from sharding.groups.handling.tasks import AioHandler, HandlerTasks
from sharding.groups.options import GroupOptions
from sharding.groups.queues.aio_transport import open_with_aio_pika
from sharding.groups.queues.group import LEAVE_TIMEOUT, Maps, new_worker, new_worker_id
from sharding.groups.queues.worker import QueueWorker, exchange_of
from sharding.metrics.sources import Subject

logger = logging.getLogger("warren.groups")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class AioConsumerGroup:
    """The same as `ConsumerGroup`, with an asynchronous handler, over aio-pika.

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
            open_with_aio_pika,
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
