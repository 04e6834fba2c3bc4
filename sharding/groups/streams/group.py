"""`StreamConsumerGroup`: workers that share the partitions of a super stream, or one stream.

    with StreamConsumerGroup(environment, "invoices", handle, group="billing") as group:
        group.run()                # until stop(), or SIGTERM or SIGINT in the main thread

Two threads besides those of the parts: one looks what this worker should hold, one
asks now and then which partitions there are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from sharding.errors import InvalidInput
from sharding.groups.handling.threads import Handler, HandlerThreads
from sharding.groups.options import GroupOptions
from sharding.groups.queues.group import new_worker_id
from sharding.groups.running import StopRequest, stopping_on_signals
from sharding.groups.sharing.assignment import decide, in_hashed_order
from sharding.groups.streams.dead_letters import DeadLetters
from sharding.groups.streams.members import StreamMembers, members_stream
from sharding.groups.streams.options import for_streams
from sharding.groups.streams.partition import PartitionReader, Shared, passes
from sharding.groups.streams.progress import Counts
from sharding.metrics.sources import Subject
from sharding.stream.connections.access import Access
from sharding.stream.environment import StreamEnvironment
from sharding.stream.errors import NotSupported, StreamNotFound

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
        return self._parts.assignment.held() if self._parts is not None else frozenset()

    @property
    def counters(self) -> Mapping[str, float]:
        """What happened since the start, and what is so now (`in_hand`, `running`, …)."""
        if self._parts is None:
            return {}
        return {**self._parts.runner.counters, **self._counts.all()}

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
        failure = self._failure or self._parts.runner.failure
        if failure is not None:
            raise failure

    def stop(self, timeout: float | None = None) -> bool:
        """Finish what is running, hand over the rest; whether it was finished within `timeout`.

        A handler that is still at work then is left alone, and its message goes to another worker.
        Called in a handler it only asks for the stop, which `run()` or another thread carries out.
        """
        self._request.ask()
        if self._parts is not None and self._parts.runner.in_handler:
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
                parts.assignment.look(self._streams, parts.members.others())
            if parts.assignment.held() != announced:
                announced = parts.assignment.held()
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
        self.runner = HandlerThreads(group._handler, options, on_failure=group._request.ask)
        dead = options.dead_letters_of(group.stream)
        self.letters = DeadLetters(environment, dead, group.group, group._counts)
        shared = Shared(
            access,
            options,
            group._reading,
            self.runner,
            self.letters,
            group._counts,
            group.look_again,
        )
        self.assignment = PartitionAssignment(group.worker, shared)
        self.members = StreamMembers(
            environment,
            group.stream,
            group.group,
            group.worker,
            options,
            access.clock,
            self.assignment.held,
            group.look_again,
        )
        self._clock = access.clock

    def end(self, timeout: float) -> bool:
        """In this order: what hands over needs handlers to end and letters to be stored."""
        handed_over = self.assignment.leave_all(self._clock() + timeout)
        finished = self.runner.stop(0) and handed_over
        self.letters.close(1)
        self.members.close(_LEAVE_TIMEOUT)
        return finished


# Which partitions a worker of a stream group reads, gets in line for and gives up.
#
# The broker's single active consumer is the lock: of all that are in line for a partition, the
# first one reads it. Only who should have a partition gets in line, as `assignment` decides from
# what the workers announce; so the lock is free, or will be when its holder has given up or died.
#
# Why not leave the dealing to the broker, which deals the partitions of a super stream out to all
# consumers in line: each partition has a line of its own, and workers that start together or come
# back after a lost connection stand in a different place in each, so loads were 1, 1, 2, 4, 4 of
# 12; and after a node's death 4 of 12 partitions were given to nobody any more, because the broker
# waits for a consumer to step down that died with the node (both seen on 4.0.5).


class PartitionAssignment:
    """One reader for each partition that is held or waited for. One thread at a time may look."""

    def __init__(self, me: str, shared: Shared) -> None:
        self._me = me
        self._shared = shared
        self._options = shared.options
        self._clock = shared.access.clock
        self._readers: dict[str, PartitionReader] = {}
        self._leaving: set[str] = set()
        self._handled: dict[str, int | None] = {}
        self._not_before: dict[str, float] = {}
        self._free_since: dict[str, float] = {}

    def held(self) -> frozenset[str]:
        """The partitions this worker reads now, those it is about to leave included."""
        return frozenset(stream for stream, each in list(self._readers.items()) if each.active)

    def look(self, streams: Iterable[str], others: dict[str, frozenset[str]]) -> None:
        """Take and give up what follows from what there is and what the others hold.

        Raises the failure of a reader that trying again won't help.
        """
        known = frozenset(streams)
        self._clear_ended()
        for stream in self._readers.keys() - known:
            self._leave(stream, "is no partition any more")
        now, held = self._clock(), self.held()
        decision = decide(self._me, {**others, self._me: held}, known)
        surplus = [each for each in in_hashed_order(decision.give_up) if each not in self._leaving]
        for stream in surplus[: max(0, len(decision.give_up) - len(self._leaving & held))]:
            self._leave(stream, "another worker has room for it")
        free = known.difference(held, *others.values())
        wanted = {*decision.take, *self._overdue(free, now)}
        for stream in self._readers.keys() - held - wanted:
            self._leave(stream, "it is another's")
        for stream in wanted - self._readers.keys():
            if now >= self._not_before.get(stream, 0):
                self._join(stream)

    def leave_all(self, deadline: float) -> bool:
        """Hand over every partition, all at the same time; whether it was done in time."""
        readers = list(self._readers.values())
        for reader in readers:
            reader.stop(deadline)
        ended = [reader.join(deadline + 1) for reader in readers]
        self._readers.clear()
        return all(ended)

    def _join(self, stream: str) -> None:
        self._not_before[stream] = self._clock() + self._options.take_interval
        reader = PartitionReader(stream, self._shared, self._handled.get(stream))
        self._readers[stream] = reader
        logger.info("%s: getting in line", stream)
        reader.start()

    def _leave(self, stream: str, why: str) -> None:
        if stream not in self._leaving:
            logger.info("%s: leaving, %s", stream, why)
            self._leaving.add(stream)
            self._readers[stream].stop(self._clock() + self._options.handover_timeout)

    def _clear_ended(self) -> None:
        for stream, reader in list(self._readers.items()):
            if reader.alive:
                continue
            del self._readers[stream]
            self._leaving.discard(stream)
            self._handled[stream] = reader.handled
            failure = reader.failure
            if isinstance(failure, StreamNotFound):
                del self._handled[stream]  # one that comes back under the name is another one
            if failure is not None:
                if not passes(failure) and not isinstance(failure, StreamNotFound):
                    raise failure
                logger.warning("%s: %s", stream, failure)

    def _overdue(self, free: Iterable[str], now: float) -> list[str]:
        """Partitions that whoever should take them does not take: any worker may."""
        self._free_since = {stream: self._free_since.get(stream, now) for stream in free}
        patience = 3 * self._options.member_timeout
        return [stream for stream, since in self._free_since.items() if now - since > patience]
