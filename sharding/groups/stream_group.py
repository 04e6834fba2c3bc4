"""`StreamConsumerGroup`: workers that share the partitions of a super stream, or one stream.

    with StreamConsumerGroup(environment, "invoices", handle, group="billing") as group:
        group.run()                # until stop(), or SIGTERM or SIGINT in the main thread

Two threads besides those of the parts: one looks what this worker should hold (`stream_steward`),
one asks now and then which partitions there are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from sharding.errors import InvalidInput
from sharding.groups.options import GroupOptions
from sharding.groups.queue_group import new_worker_id
from sharding.groups.running import StopRequest, stopping_on_signals
from sharding.groups.stream_counts import Counts
from sharding.groups.stream_dead_letters import DeadLetters
from sharding.groups.stream_members import StreamMembers, members_stream
from sharding.groups.stream_options import for_streams
from sharding.groups.stream_partition import Shared, passes
from sharding.groups.stream_steward import StreamSteward
from sharding.groups.workshop import Handler, Workshop
from sharding.metrics.sources import Subject
from sharding.stream.environment import StreamEnvironment
from sharding.stream.errors import NotSupported, StreamNotFound
from sharding.stream.network.access import Access

logger = logging.getLogger("warren.groups")

FIRST_VERSION = (3, 11)
LOOK_INTERVAL = 0.25
_LEAVE_TIMEOUT = 3.0
_COUNTED = ("taken", "released", "lost", "late_handovers", "losses", "stores", "dead_lettered")


class StreamConsumerGroup:
    """Any number of these with one `group` name, in any processes, read one stream together.

    Each partition is read by one of them at a time; loads differ by at most one partition; those of
    a worker that dies go to the others. Of a plain stream one worker reads, the others wait.
    `handler` gets one `Delivery` at a time, or with `batch_size` above 1 a list; the group's offset
    passes a message when it returns, and it is tried again when it raises.

    A stream may have any number of groups: each has offsets of its own and sees every message. The
    members of a group have to be workers of Warren. Needs RabbitMQ 3.11 or later.

    It works from `with` (or `start()`) on; `run()` waits until it is stopped.
    """

    def __init__(
        self,
        environment: StreamEnvironment,
        stream: str,
        handler: Handler,
        *,
        group: str,
        options: GroupOptions | None = None,
    ) -> None:
        if not callable(handler):
            raise InvalidInput("handler", "must be callable", handler)
        self.stream = stream
        self.group = group
        self.worker = new_worker_id()
        self.options = for_streams(options)
        self._reading = self.options.reading(group)
        self.options.dead_letters_of(stream)
        members_stream(stream)
        self.counted_as = Subject("group", {"logical": stream, "group": group})
        self._environment = environment
        self._access: Access
        self._handler = handler
        self._counts = Counts(_COUNTED)
        self._parts: _Parts | None = None
        self._streams: tuple[str, ...] = ()
        self._is_super_stream = True
        self._failure: Exception | None = None
        self._request = StopRequest()
        self._ending = threading.Lock()
        self._news = threading.Condition()
        self._look_again = False
        self._closed = False
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for work, name in ((self._look, "warren-group"), (self._follow, "warren-partitions"))
        ]

    def __enter__(self) -> StreamConsumerGroup:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        about = f"{self.group!r} of {self.stream!r}, worker {self.worker}"
        return f"<StreamConsumerGroup {about}, {len(self.shards)} shards>"

    @property
    def shards(self) -> frozenset[str]:
        """The partitions this worker reads now."""
        return self._parts.steward.held() if self._parts is not None else frozenset()

    @property
    def counters(self) -> Mapping[str, float]:
        """What happened since the start, and what is so now (`in_hand`, `running`, …)."""
        if self._parts is None:
            return {}
        return {**self._parts.workshop.counters, **self._counts.all()}

    def start(self) -> None:
        """Begin to work, in threads of its own; raises what stands in the way."""
        if self._parts is not None or self._closed:
            raise InvalidInput("start", "may be called once", self)
        version = self._environment.server_version
        if version < FIRST_VERSION:
            found = ".".join(map(str, version))
            raise NotSupported(
                f"consumer groups over streams need RabbitMQ 3.11 or later, not {found}: older "
                "brokers know no single active consumer"
            )
        self._access = self._environment.lend(self)
        self._find_partitions()
        self._parts = parts = _Parts(self)
        try:
            parts.members.start()
        except BaseException:
            self._parts = None
            parts.end(0)
            raise
        for thread in self._threads:
            thread.start()

    def run(self) -> None:
        """Work until `stop()`, or until SIGTERM or SIGINT in the main thread, and stop in order.

        Raises what makes it useless to go on: too many handlers that hang, a lost permission.
        """
        # First of all: a signal while it starts would end the process with partitions in its hands.
        with stopping_on_signals(self._request.ask):
            if self._parts is None:
                self.start()
            self._request.wait()
        self.stop()
        assert self._parts is not None
        failure = self._failure or self._parts.workshop.failure
        if failure is not None:
            raise failure

    def stop(self, timeout: float | None = None) -> bool:
        """Finish what is running, hand over the rest; whether it was finished within `timeout`.

        A handler that is still at work then is left alone, and its message goes to another worker.
        Called in a handler it only asks for the stop, which `run()` or another thread carries out.
        """
        self._request.ask()
        if self._parts is not None and self._parts.workshop.in_handler:
            return False
        with self._ending:
            if self._closed:
                return True
            self._closed = True
            self.look_again()
            if self._parts is None:
                return True
            self._threads[0].join(_LEAVE_TIMEOUT)  # it must take nothing any more
            patience = self.options.stop_timeout if timeout is None else timeout
            logger.info("stopping; handlers have %g s to finish", patience)
            return self._parts.end(patience)

    close = stop

    def look_again(self) -> None:
        """Something changed: have it looked at soon."""
        with self._news:
            self._look_again = True
            self._news.notify_all()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if not self._closed:
                logger.error("the worker stops: %s", error)
                self._failure = self._failure or error
                self._request.ask()

    def _look(self) -> None:
        parts = self._parts
        assert parts is not None
        announced = frozenset[str]()
        while not self._closed:
            if parts.members.settled:
                parts.steward.look(self._streams, parts.members.others())
            if parts.steward.held() != announced:
                announced = parts.steward.held()
                parts.members.announce()
            with self._news:
                self._news.wait_for(lambda: self._look_again, LOOK_INTERVAL)
                self._look_again = False

    def _follow(self) -> None:
        """Partitions may be added and deleted; ask the cluster, not our memory of it."""
        while not self._closed:
            with self._news:
                self._news.wait_for(lambda: self._closed, self.options.follow_interval)
            if self._is_super_stream and not self._closed:
                try:
                    self._find_partitions()
                except Exception as error:
                    if not passes(error) and not isinstance(error, StreamNotFound):
                        raise
                    logger.warning("%s: %s", self.stream, error)

    def _find_partitions(self) -> None:
        routes, timeout = self._access.routes, self.options.answer_timeout
        routes.suspect(self.stream, "looked for partitions")
        try:
            self._streams = routes.partitions(self.stream, timeout)
        except StreamNotFound:
            if self._streams:
                raise
            routes.route(self.stream, timeout)  # raises if there is no such stream either
            self._streams, self._is_super_stream = (self.stream,), False


class _Parts:
    """What a running group is made of."""

    def __init__(self, group: StreamConsumerGroup) -> None:
        environment, options, access = group._environment, group.options, group._access
        self.workshop = Workshop(group._handler, options, on_failure=group._request.ask)
        dead = options.dead_letters_of(group.stream)
        self.letters = DeadLetters(environment, dead, group.group, group._counts)
        shared = Shared(
            access,
            options,
            group._reading,
            self.workshop,
            self.letters,
            group._counts,
            group.look_again,
        )
        self.steward = StreamSteward(group.worker, shared)
        self.members = StreamMembers(
            environment,
            group.stream,
            group.group,
            group.worker,
            options,
            access.clock,
            self.steward.held,
            group.look_again,
        )
        self._clock = access.clock

    def end(self, timeout: float) -> bool:
        """In this order: what hands over needs handlers to end and letters to be stored."""
        handed_over = self.steward.leave_all(self._clock() + timeout)
        finished = self.workshop.stop(0) and handed_over
        self.letters.close(1)
        self.members.close(_LEAVE_TIMEOUT)
        return finished
