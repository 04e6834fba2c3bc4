"""Announcements between the workers of a stream's groups, over a small stream of their own.

All groups of one stream share it; the message's key says which group. It keeps some megabytes and
is read from its end: nobody depends on what was said before. While it is away (an election takes
seconds) workers do not hear each other, and keep what they have.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sharding.errors import WarrenError
from sharding.groups.options import GroupOptions
from sharding.groups.sharing.roster import Announcement, Kind, Roster
from sharding.stream.admin import check_name
from sharding.stream.consumer.consumer import Consumer
from sharding.stream.environment import StreamEnvironment
from sharding.stream.options import StreamArguments
from sharding.stream.producer.producer import Producer
from sharding.stream.protocol.constants import MIB

logger = logging.getLogger("warren.groups")

_KEPT = StreamArguments(max_length_bytes=8 * MIB, max_segment_bytes=2 * MIB)
_TRY_AGAIN = 1.0


def members_stream(stream: str) -> str:
    """The stream over which the workers of all groups of `stream` find each other."""
    name = f"warren.group.{stream}"
    check_name("the group's stream", name)
    return name


class StreamMembers:
    """`held` says what to announce; `on_heard` is called when the others may have changed."""

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
    ) -> None:
        self._environment = environment
        self._stream = members_stream(stream)
        self._group = group
        self._me = me
        self._options = options
        self._clock = clock
        self._held = held
        self._on_heard = on_heard
        self._lock = threading.Lock()
        self._roster = Roster(me, options.settle_time, options.member_timeout)
        self._joined_at: float | None = None
        self._news = threading.Condition()
        self._next = Kind.HELLO
        self._wanted = False
        self._closed = False
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for work, name in ((self._hear, "warren-hears"), (self._tell, "warren-tells"))
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

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do the work again until it is closed: nothing may end a thread that nobody watches."""
        while not self._closed:
            try:
                work()
            except WarrenError as error:
                logger.info("the other workers can't be reached: %s", error)
            except Exception:
                logger.exception("the other workers can't be reached")
            with self._news:
                self._news.wait_for(lambda: self._closed, _TRY_AGAIN)

    def _hear(self) -> None:
        self._make()  # somebody may have deleted it
        with self._environment.consumer(self._stream, offset="next") as consumer:
            self._consumer = consumer
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
            while not self._closed:
                with self._news:
                    self._news.wait_for(lambda: self._wanted or self._closed, interval)
                    self._wanted = False
                    kind, self._next = self._next, Kind.HERE
                if self._joined_at is not None and not self._closed:
                    self._send(producer, kind)
            self._send(producer, Kind.BYE)

    def _send(self, producer: Producer, kind: Kind) -> None:
        body = Announcement(self._me, kind, self._held()).dumps()
        producer.send(body, key=self._group)
        producer.flush(timeout=0)  # reports pile up else; whether it was stored does not matter
