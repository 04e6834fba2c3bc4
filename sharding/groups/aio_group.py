"""`AioConsumerGroup`: a worker of a queue group on the application's own asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput
from sharding.groups.aio_transport import open_with_aio_pika
from sharding.groups.aio_workshop import AioHandler, AioWorkshop
from sharding.groups.membership import exchange_of
from sharding.groups.options import GroupOptions
from sharding.groups.queue_group import LEAVE_TIMEOUT, Maps, new_steward, new_worker_id
from sharding.groups.steward import Steward
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
        self._workshop: AioWorkshop | None = None
        self._steward: Steward | None = None
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
        return self._steward.held() if self._steward is not None else frozenset()

    @property
    def counters(self) -> Mapping[str, float]:
        if self._workshop is None or self._steward is None:
            return {}
        return {**self._workshop.counters, **self._steward.counters}

    async def start(self) -> None:
        """Begin to work, in tasks of its own."""
        if self._steward is not None:
            raise InvalidInput("start", "may be called once", self)
        await asyncio.to_thread(self._maps.check)  # it may wait for the first map
        loop = asyncio.get_running_loop()
        self._workshop = AioWorkshop(
            self._handler, self.options, clock=loop.time, on_failure=self._stop_wanted.set
        )
        steward = self._steward = new_steward(
            self._topology,
            self._maps,
            self._workshop,
            self.worker,
            self.options,
            open_with_aio_pika,
            loop.time,
        )
        self._working = asyncio.create_task(steward.run())
        self._working.add_done_callback(lambda _: self._stop_wanted.set())

        def look_again(*_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(steward.look_again)

        self._unsubscribe = self._topology.subscribe(look_again)

    async def run(self) -> None:
        """Work until `stop()`, or until SIGTERM or SIGINT in the main thread, and stop in order."""
        if self._steward is None:
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
        if self._workshop is not None and self._workshop.failure is not None:
            raise self._workshop.failure

    async def stop(self, timeout: float | None = None) -> bool:
        """Finish what is running, give the rest back; whether it was finished within `timeout`.

        Called in a handler it only asks for the stop, which `run()` carries out.
        """
        self._stop_wanted.set()
        if self._workshop is not None and self._workshop.in_handler:
            return False
        async with self._stopping:
            if self._steward is None or self._workshop is None or self._working is None:
                return True
            if self._left:
                return True
            self._left = True
            self._unsubscribe()
            self._steward.wind_down()
            patience = self.options.stop_timeout if timeout is None else timeout
            self._workshop.wind_down()
            logger.info("stopping; handlers have %g s to finish", patience)
            finished = await self._workshop.stop(patience)
            if not finished:
                logger.warning("handlers were still at work after %g s; cancelled", patience)
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
            await self._steward.leave(LEAVE_TIMEOUT)
            return finished
