"""`StreamConsumerGroup`: workers that share the partitions of a super stream, or one stream.

    with StreamConsumerGroup(environment, "invoices", handle, group="billing") as group:
        group.run()                # until stop(), or SIGTERM or SIGINT in the main thread

Any number of groups may read a stream, each with offsets of its own; the workers of a group, in any
processes, are told apart from those of others by the group's name alone. Every worker is in line
for every partition. The broker lets one of them read it at a time (its single active consumer,
RabbitMQ 3.11 and later) and deals the partitions out evenly; of a plain stream one worker reads and
the others wait. See `stream_partition` for how a partition changes hands, `stream_door` for how the
dealing is kept even.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from types import TracebackType

from sharding.errors import InvalidInput, LocalError
from sharding.groups.options import GroupOptions
from sharding.groups.running import StopRequest, stopping_on_signals
from sharding.groups.stream_counts import Counts
from sharding.groups.stream_dead_letters import DeadLetters
from sharding.groups.stream_door import MAX_GROUP_BYTES
from sharding.groups.stream_lines import Lines
from sharding.groups.stream_options import for_streams
from sharding.groups.stream_partition import Shared, passes
from sharding.groups.workshop import Handler, Workshop
from sharding.stream.environment import StreamEnvironment
from sharding.stream.errors import NotSupported, StreamNotFound
from sharding.stream.network.access import Access

logger = logging.getLogger("warren.groups")

_COUNTED = ("taken", "released", "lost", "late_handovers", "losses", "stores", "dead_lettered")


class StreamConsumerGroup:
    """One worker of the group. `handler` gets a `Delivery`, or a list of them in batches."""

    def __init__(
        self,
        environment: StreamEnvironment,
        stream: str,
        handler: Handler,
        *,
        group: str,
        options: GroupOptions | None = None,
    ) -> None:
        if not 0 < len(group.encode()) <= MAX_GROUP_BYTES:
            raise InvalidInput("group", f"must have 1 to {MAX_GROUP_BYTES} bytes", group)
        self.stream = stream
        self.group = group
        self.options = for_streams(options)
        self.failure: Exception | None = None
        """Why the worker stopped, if nobody asked for it."""
        self._environment = environment
        self._handler = handler
        self._counts = Counts(_COUNTED)
        self._request = StopRequest()
        self._stopping = threading.Event()
        self._wanted = threading.Condition()
        self._news = False
        self._lock = threading.Lock()
        self._access: Access
        self._super_stream: str | None = None
        self._lines: Lines | None = None
        self._workshop: Workshop | None = None
        self._burials: DeadLetters | None = None
        self._follower = threading.Thread(target=self._follow, name="warren-group", daemon=True)

    def __repr__(self) -> str:
        return f"<StreamConsumerGroup {self.group!r} of {self.stream}: {len(self.shards)} active>"

    @property
    def shards(self) -> tuple[str, ...]:
        """The partitions that this worker reads now."""
        return self._lines.active if self._lines is not None else ()

    @property
    def counters(self) -> Mapping[str, float]:
        """How many messages ended in which way, and how often partitions came and went."""
        made = self._workshop.counters if self._workshop is not None else {}
        lines = len(self._lines) if self._lines is not None else 0
        return {**made, **self._counts.all(), "lines": lines}

    def start(self) -> None:
        """Get in line for every partition; raises what stands in the way. Done once."""
        with self._lock:
            if self._workshop is not None:
                return
            if self._stopping.is_set():
                raise LocalError("a consumer group that was stopped can't be started again")
            try:
                self._begin()
            except NotSupported as error:
                self._end(0)
                raise NotSupported(f"consumer groups over streams can't work: {error}") from None
            except BaseException:
                self._end(0)
                raise
            self._follower.start()

    def run(self) -> None:
        """Work until `stop` is called, or a signal comes; raises what the worker stopped for."""
        self.start()
        with stopping_on_signals(self._request.ask):
            self._request.wait()
        self.stop()
        if self.failure is not None:
            raise self.failure

    def stop(self, timeout: float | None = None) -> None:
        """Finish what is in hand, within `timeout` (`stop_timeout`), and hand over the rest."""
        self._stopping.set()
        self._request.ask()
        self._on_change()
        with self._lock:
            if self._follower.is_alive() and self._follower is not threading.current_thread():
                self._follower.join()
            self._end(self.options.stop_timeout if timeout is None else timeout)

    close = stop

    def __enter__(self) -> StreamConsumerGroup:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _begin(self) -> None:
        self._access = self._environment.lend(self)
        self._workshop = Workshop(self._handler, self.options, on_failure=self._on_failure)
        dead = self.options.dead_letters_of(self.stream)
        self._burials = DeadLetters(self._environment, dead, self.group, self._counts)
        self._super_stream = self._find_super_stream()
        shared = Shared(
            self._access,
            self.options,
            self.options.reading(self.group),
            self._super_stream,
            self._workshop,
            self._burials,
            self._counts,
            self._on_change,
        )
        self._lines = Lines(shared, self.group)
        self._lines.follow(self._streams())

    def _end(self, timeout: float) -> None:
        """In this order: what hands over needs handlers to end and letters to be stored."""
        deadline = self._access.clock() + timeout
        if self._lines is not None:
            self._lines.leave_all(deadline)
        if self._workshop is not None:
            self._workshop.stop(0)
        if self._burials is not None:
            self._burials.close(1)

    def _find_super_stream(self) -> str | None:
        routes, timeout = self._access.routes, self.options.answer_timeout
        try:
            routes.partitions(self.stream, timeout)
        except StreamNotFound:
            routes.route(self.stream, timeout)  # raises if there is no such stream either
            return None
        return self.stream

    def _streams(self) -> tuple[str, ...]:
        """The partitions there are now, as the cluster says and not as we remember."""
        if self._super_stream is None:
            return (self.stream,)
        self._access.routes.suspect(self.stream, "looked for partitions")
        return self._access.routes.partitions(self.stream, self.options.answer_timeout)

    # The group's thread.

    def _follow(self) -> None:
        assert self._lines is not None
        while not self._stopping.is_set():
            try:
                self._lines.follow(self._streams())
            except Exception as error:
                if not passes(error) and not isinstance(error, StreamNotFound):
                    self._fail(error)
                    return
                logger.warning("%s: %s", self.stream, error)
            with self._wanted:
                self._wanted.wait_for(lambda: self._news, self._pause())
                self._news = False

    def _pause(self) -> float:
        again_at = self._lines.again_at if self._lines is not None else None
        longest = self.options.follow_interval
        if again_at is None:
            return longest
        return min(longest, max(0.0, again_at - self._access.clock()))

    def _on_change(self) -> None:
        with self._wanted:
            self._news = True
            self._wanted.notify_all()

    def _on_failure(self) -> None:
        assert self._workshop is not None
        self._fail(self._workshop.failure or LocalError("the handlers' threads ended"))

    def _fail(self, error: Exception) -> None:
        logger.error("the worker stops: %s", error)
        self.failure = self.failure or error
        self._request.ask()
