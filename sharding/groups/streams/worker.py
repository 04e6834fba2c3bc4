"""A worker of a stream group: which partitions it reads, gets in line for and leaves. Thin I/O.

The broker's single active consumer is the lock: of all that are in line for a partition, the first
one reads it. Only who should have a partition gets in line, as `assignment` decides from what the
workers announce; so the lock is free, or will be when its holder has given up or died.

Why not leave the dealing to the broker, which deals the partitions of a super stream out to all
consumers in line: each partition has a line of its own, and workers that start together or come
back after a lost connection stand in a different place in each, so loads were 1, 1, 2, 4, 4 of 12;
and after a node's death 4 of 12 partitions were given to nobody any more, because the broker waits
for a consumer to step down that died with the node (both seen on 4.0.5).

Two threads besides those of the parts: one looks what this worker should hold, one asks now and
then which partitions there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from sharding.errors import WarrenError, reason
from sharding.groups.handling.delivery import GroupFailed
from sharding.groups.handling.threads import HandlerThreads
from sharding.groups.log import logger
from sharding.groups.options import GroupOptions
from sharding.groups.sharing.assignment import Assignment, Hands
from sharding.groups.sharing.roster import Announcement, Kind, Roster
from sharding.groups.streams.dead_letters import DeadLetters
from sharding.groups.streams.options import StreamGroupOptions
from sharding.groups.streams.partition import (
    STREAM_IS_GONE,
    Known,
    PartitionReader,
    Shared,
    passes,
)
from sharding.groups.streams.progress import Counts
from sharding.stream.admin import check_stream_name
from sharding.stream.connections.access import Access
from sharding.stream.consumer.consumer import Consumer
from sharding.stream.environment import StreamEnvironment
from sharding.stream.errors import AccessRefused, StreamNotFound
from sharding.stream.options import StreamArguments
from sharding.stream.producer.producer import Producer
from sharding.stream.protocol.constants import MIB

LOOK_INTERVAL = 0.25
_LEAVE_TIMEOUT = 3.0
_COUNTED = (
    *("taken", "released", "lost", "late_handovers", "losses", "stores", "dead_lettered"),
    "held_back",
)


class Partitions:
    """The partitions of a super stream as they were last found; a plain stream is its only one."""

    def __init__(self, access: Access, stream: str, timeout: float) -> None:
        self.stream = stream
        self.names: frozenset[str] = frozenset()
        self.may_change = True
        self._routes = access.routes
        self._timeout = timeout

    def find(self) -> None:
        """Ask the cluster, not our memory of it; raises if there is no such stream."""
        self._routes.suspect(self.stream, "looked for partitions")
        try:
            self.names = frozenset(self._routes.partitions(self.stream, self._timeout).streams)
        except StreamNotFound:
            if self.names:
                raise
            self._routes.route(self.stream, self._timeout)  # raises if there is none either
            self.names, self.may_change = frozenset({self.stream}), False


class StreamWorker:
    """One reader for each partition that is held or waited for. `partitions` have been found;
    `on_failure` gets what makes it useless to go on.
    """

    def __init__(
        self,
        me: str,
        environment: StreamEnvironment,
        access: Access,
        partitions: Partitions,
        group: str,
        options: StreamGroupOptions,
        runner: HandlerThreads,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._partitions = partitions
        self._options = options
        self._runner = runner
        self._on_failure = on_failure
        self._clock = access.clock
        self._counts = Counts(_COUNTED)
        stream = partitions.stream
        dead = options.dead_letters_of(stream)
        self._letters = DeadLetters(environment, dead, group, self._counts)
        self._shared = Shared(
            access,
            options,
            options.reading(group),
            runner,
            self._letters,
            self._counts,
            members_stream(stream),
            self.look_again,
        )
        self._members = StreamMembers(
            environment,
            stream,
            group,
            me,
            options,
            self._clock,
            self.held,
            on_heard=self.look_again,
            on_failure=self._fail,
        )
        self._assignment = Assignment(me, options)
        self._readers: dict[str, PartitionReader] = {}
        self._leaving: set[str] = set()
        self._known: dict[str, Known] = {}
        self._news = threading.Condition()
        self._changed = False
        self._winding_down = False
        self._looking = threading.Thread(
            target=self._guarded, args=(self._look_on,), name="warren-group", daemon=True
        )
        self._following = threading.Thread(
            target=self._guarded, args=(self._follow,), name="warren-partitions", daemon=True
        )

    @property
    def counters(self) -> Mapping[str, float]:
        return self._counts.all()

    def held(self) -> frozenset[str]:
        """The partitions this worker reads now, those it is about to leave included."""
        return frozenset(stream for stream, each in list(self._readers.items()) if each.active)

    def start(self) -> None:
        """Raises if there is no way to tell the other workers anything; `leave` is due then too."""
        self._members.start()
        self._looking.start()
        self._following.start()

    def look_again(self) -> None:
        """Something changed: have it looked at soon."""
        if self._winding_down:  # nobody looks any more
            self._members.announce()
        with self._news:
            self._changed = True
            self._news.notify_all()

    def wind_down(self) -> None:
        """Take and give up nothing more; the end is near."""
        self._winding_down = True
        self._members.leave()
        self.look_again()
        if self._looking.is_alive():
            self._looking.join(_LEAVE_TIMEOUT)

    def leave(self, timeout: float) -> bool:
        """Hand over every partition, all at the same time; whether it was done in time."""
        deadline = self._clock() + timeout
        # In this order: what hands over needs handlers to end and letters to be stored.
        try:
            readers = list(self._readers.values())
            for reader in readers:
                reader.stop(deadline)
            ended = [reader.join(deadline + 1) for reader in readers]
            self._readers.clear()
            return self._runner.stop(0) and all(ended)
        finally:  # also when it is interrupted: the others must not wait for one that has gone
            self._letters.close(1)
            self._members.close(_LEAVE_TIMEOUT)

    # The two threads.

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._winding_down:
            self._on_failure(error)

    def _look_on(self) -> None:
        announced = frozenset[str]()
        while not self._winding_down:
            if self._members.settled:
                self._look()
            if self.held() != announced:
                announced = self.held()
                self._members.announce()
            with self._news:
                self._news.wait_for(lambda: self._changed, LOOK_INTERVAL)
                self._changed = False

    def _follow(self) -> None:
        """Partitions may be added and deleted."""
        while not self._winding_down:
            with self._news:
                self._news.wait_for(lambda: self._winding_down, self._options.follow_interval)
            if self._partitions.may_change and not self._winding_down:
                try:
                    self._partitions.find()
                except Exception as error:
                    if not passes(error) and not isinstance(error, StreamNotFound):
                        raise
                    logger.warning("%s: %s", self._partitions.stream, error)

    # Looking, taking and leaving.

    def _look(self) -> None:
        """Raises the failure of a reader that trying again won't help."""
        self._clear_ended()
        held = self.held()
        in_line = self._readers.keys() - held - self._leaving
        moves = self._assignment.look(
            self._clock(),
            self._partitions.names,
            Hands(held, leaving=self._leaving, in_line=in_line),
            self._members.others(),
        )
        for stream, cause in moves.leave.items():
            logger.info("%s: leaving, %s", stream, cause)
            self._leaving.add(stream)
            self._readers[stream].stop(self._clock() + self._options.handover_timeout)
        for stream in moves.take:
            logger.info("%s: getting in line", stream)
            reader = PartitionReader(stream, self._shared, self._known.get(stream, Known()))
            self._readers[stream] = reader
            reader.start()

    def _clear_ended(self) -> None:
        for stream, reader in list(self._readers.items()):
            if reader.alive:
                continue
            del self._readers[stream]
            self._leaving.discard(stream)
            self._known[stream] = reader.known
            failure = reader.failure
            if isinstance(failure, STREAM_IS_GONE):  # or it is found again at the next poll only
                self._shared.access.routes.suspect(stream, str(failure))
            if failure is not None:
                if not passes(failure) and not isinstance(failure, STREAM_IS_GONE):
                    raise failure
                logger.warning("%s: %s", stream, failure)


# Announcements between the workers of a stream's groups, over a small stream of their own.
#
# All groups of one stream share it; the message's key says which group. It keeps some megabytes and
# is read from its end: nobody depends on what was said before. While it is away (an election takes
# seconds) workers do not hear each other, and keep what they have.

_KEPT = StreamArguments(max_length_bytes=8 * MIB, max_segment_bytes=2 * MIB)
_TRY_AGAIN = 1.0


def members_stream(stream: str) -> str:
    """The stream over which the workers of all groups of `stream` find each other."""
    name = f"warren.group.{stream}"
    check_stream_name("the group's stream", name)
    return name


class StreamMembers:
    """`held` says what to announce; `on_heard` is called when the others may have changed, and
    `on_failure` when this worker can never take part.
    """

    def __init__(
        self,
        environment: StreamEnvironment,
        stream: str,
        group: str,
        me: str,
        options: GroupOptions,
        clock: Callable[[], float],
        held: Callable[[], frozenset[str]],
        on_heard: Callable[[], None],
        on_failure: Callable[[GroupFailed], None],
    ) -> None:
        self._environment = environment
        self._stream = members_stream(stream)
        self._group = group
        self._me = me
        self._options = options
        self._clock = clock
        self._held = held
        self._on_heard = on_heard
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._roster = Roster(me, options.settle_time, options.member_timeout)
        self._joined_at: float | None = None
        self._news = threading.Condition()
        self._next = Kind.HELLO
        self._wanted = False
        self._leaves = False
        self._closed = False
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._trouble: dict[str, str] = {}  # what can't be done with the others, and why
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, what), name=name, daemon=True)
            for work, what, name in (
                (self._hear, "heard", "warren-hears"),
                (self._tell, "told anything", "warren-tells"),
            )
        ]

    def start(self) -> None:
        """Raises if there is no such stream and none can be made."""
        self._make()
        for thread in self._threads:
            thread.start()

    def others(self) -> dict[str, frozenset[str]]:
        with self._lock:
            return self._roster.held_by_others(self._clock())

    @property
    def settled(self) -> bool:
        """Whether this worker has listened long enough to know who else is there."""
        joined = self._joined_at
        return joined is not None and self._clock() - joined >= self._options.settle_time

    def leave(self) -> None:
        """Say goodbye, soon and in all that is announced from here on. Who should have its
        partitions gets in line for them, and has each the moment it is handed over."""
        self._leaves = True
        self.announce()

    def announce(self) -> None:
        """Have the others told what this worker holds, soon."""
        with self._news:
            self._wanted = True
            self._news.notify_all()

    def close(self, timeout: float) -> None:
        """Say goodbye, and end."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        deadline = self._clock() + timeout
        consumer = self._consumer
        if consumer is not None:
            consumer.close(1)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - self._clock()))

    def _make(self) -> None:
        if not self._environment.exists(self._stream):
            self._environment.create_stream(self._stream, _KEPT, exist_ok=True)

    def _guarded(self, work: Callable[[], None], what: str) -> None:
        """Do the work again until it is closed: nothing may end a thread that nobody watches."""
        while not self._closed:
            try:
                work()
            except AccessRefused as error:
                # A right that is missing stays missing. Only the stream may be made by others.
                if error.command != "Create":
                    self._fail(error)
                    return
                self._note(what, error)
            except Exception as error:
                self._note(what, error)
            with self._news:
                self._news.wait_for(lambda: self._closed, _TRY_AGAIN)

    def _fail(self, error: AccessRefused) -> None:
        if not self._closed:
            self._on_failure(
                GroupFailed(
                    f"the broker refuses a right that a worker needs: {error}; docs/groups.md "
                    "lists them"
                )
            )

    def _note(self, what: str, error: Exception) -> None:
        if self._closed:
            return
        before, self._trouble[what] = self._trouble.get(what), reason(error)
        takes_nothing = what == "heard" and self._joined_at is None
        effect = ", and no partition is taken before" if takes_nothing else ""
        if not isinstance(error, WarrenError):
            logger.exception("the other workers can't be %s%s", what, effect)
        elif before != self._trouble[what]:  # it is tried every second
            logger.warning("the other workers can't be %s%s: %s", what, effect, reason(error))

    def _hear(self) -> None:
        self._make()  # somebody may have deleted it
        with self._environment.consumer(self._stream, offset="next") as consumer:
            self._consumer = consumer
            self._trouble.pop("heard", None)
            if self._joined_at is None:
                self._joined_at = self._clock()
            self._next = Kind.HELLO
            self.announce()
            for message in consumer.messages():
                if message.key != self._group:
                    continue
                with self._lock:
                    wants_answer = self._roster.hear(message.body, self._clock())
                if wants_answer:
                    self.announce()
                self._on_heard()

    def _tell(self) -> None:
        interval = self._options.announce_interval
        with self._environment.producer(self._stream, linger=0) as producer:
            self._trouble.pop("told anything", None)
            while not self._closed:
                with self._news:
                    self._news.wait_for(lambda: self._wanted or self._closed, interval)
                    self._wanted = False
                    kind, self._next = self._next, Kind.HERE
                if self._joined_at is not None and not self._closed:
                    self._send(producer, kind)
            self._send(producer, Kind.BYE)

    def _send(self, producer: Producer, kind: Kind) -> None:
        kind = Kind.BYE if self._leaves else kind
        body = Announcement(self._me, kind, self._held()).dumps()
        producer.send(body, key=self._group)
        producer.flush(timeout=0)  # reports pile up else; whether it was stored does not matter
