"""The route cache of a process: one thread that asks the cluster what `rules` decides to ask.

Callers never ask the cluster themselves: they say what they want, and wait for the thread's answer
until their own time is up. So however many there are, one query is under way.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from math import inf
from typing import TYPE_CHECKING

from sharding.errors import LocalError, OutcomeUnknown, Unreachable, is_retryable
from sharding.maps.naming import check_name
from sharding.stream.options import RouteOptions
from sharding.stream.routes.pressure import Pressure
from sharding.stream.routes.rules import RouteState
from sharding.stream.routes.values import (
    Finding,
    Kind,
    Missing,
    Partitions,
    RouteSource,
    StreamRoute,
    Target,
    told,
)

if TYPE_CHECKING:
    from sharding.stream.protocol.constants import Broker

DEFAULTS = RouteOptions()

logger = logging.getLogger("warren.routes")


class RouteCache:
    """Where streams and super streams live now. Safe for threads.

    `pressure` says how much of the machine is in use, 0 to 1. It is called on a thread that must
    not be held up.
    """

    def __init__(
        self,
        source: RouteSource,
        options: RouteOptions = DEFAULTS,
        *,
        rng: random.Random | None = None,
        pressure: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._options = options
        self._clock = clock
        self._pressure = pressure or Pressure()
        self._state = RouteState(options, rng or random.Random())
        self._failure: Exception | None = None
        self._failures = 0
        self._closed = False
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._news = threading.Condition(lock)
        source.on_update = self._on_update
        source.on_disconnect = self._on_disconnect
        self._thread = threading.Thread(target=self._run, name="warren-routes", daemon=True)
        self._thread.start()

    def route(self, stream: str, timeout: float) -> StreamRoute:
        """Where a stream lives, for who wants a replica; `leader` is None during an election.

        A new stream's replicas are listed later than its leader; they are waited for, for some
        rounds of asking. Raises `StreamNotFound`, or `Unreachable` when nothing answered in time.
        """
        target = Target(Kind.STREAM, stream)

        def has_replicas(finding: Finding) -> bool:
            return bool(_route(finding).replicas) or not self._state.settling(target)

        return _route(self._wait_for(target, has_replicas, timeout))

    def leader(self, stream: str, timeout: float) -> Broker:
        """The stream's leader; `NoLeader` if an election does not end in time."""
        target = Target(Kind.STREAM, stream)

        def has_leader(finding: Finding) -> bool:
            if _route(finding).leader is None:
                self._state.insist(target, self._clock())
                return False
            return True

        leader = _route(self._wait_for(target, has_leader, timeout)).leader
        if leader is None:
            raise self._source.no_leader(stream, timeout)
        return leader

    def partitions(self, super_stream: str, timeout: float) -> Partitions:
        """The streams of a super stream."""
        target = Target(Kind.SUPER_STREAM, super_stream)
        found = self._wait_for(target, lambda _: True, timeout)
        assert isinstance(found, Partitions)
        return found

    def suspect(self, name: str, reason: str) -> None:
        """Say that a stream's route, or a super stream's partitions, turned out wrong.

        The next use waits for a new answer. This call waits for nothing.
        """
        logger.debug("%s is asked for again: %s", name, reason)
        with self._work:
            self._state.suspect(name, self._clock())
            self._work.notify()

    @property
    def counters(self) -> Mapping[str, int]:
        """Every decision so far: hits, queries, pushes, …"""
        with self._work:
            return Counter(self._state.counters)

    def close(self, timeout: float = 5) -> None:
        """End the thread; who waits for an answer gets an error. The source stays open."""
        self._source.on_update = self._source.on_disconnect = None
        with self._work:
            self._closed = True
            self._work.notify()
            self._news.notify_all()
        self._thread.join(timeout)

    def __repr__(self) -> str:
        with self._work:
            return f"<RouteCache: {len(self._state)} names>"

    # Callers

    def _wait_for(
        self, target: Target, is_enough: Callable[[Finding], bool], timeout: float
    ) -> Finding:
        """What is known of the name once it is enough, or at the end of the time."""
        # What no broker can have would spoil the question about others in the same batch.
        check_name("stream", target.name)
        began = self._clock()
        deadline = began + timeout
        with self._news:
            failures = self._failures
            self._state.use(target, began)
            while True:
                if self._closed:
                    raise LocalError("the route cache is closed")
                now = self._clock()
                finding = self._state.known(target, now, began)
                if isinstance(finding, Missing):
                    raise self._source.not_found(finding)
                if finding is not None and (is_enough(finding) or now >= deadline):
                    return finding
                if self._failures > failures and self._failure and _is_final(self._failure):
                    raise copy(self._failure) from self._failure
                if now >= deadline:
                    raise Unreachable(
                        f"nothing is known of the {target.kind.value} {target.name!r} after "
                        f"{timeout:g} s: {self._failure or f'no answer yet from {self._source}'}"
                    )
                self._work.notify()
                self._news.wait(deadline - now)

    # The source's own threads

    def _on_update(self, stream: str) -> None:
        pressure = self._pressure()
        with self._work:
            self._state.pushed(stream, self._clock(), pressure)
            self._work.notify()

    def _on_disconnect(self) -> None:
        with self._work:
            self._state.disconnected(self._clock())
            self._work.notify()

    # The thread

    def _run(self) -> None:
        while True:
            with self._work:
                if self._closed:
                    return
                now = self._clock()
                self._state.forget(now)
                query = self._state.next_query(now)
                stream = None if query else self._state.next_arm(now)
                if not query and stream is None:
                    wake_at = self._state.wake_at()
                    self._work.wait(None if wake_at == inf else wake_at - now)
                    continue
            if query:
                self._ask(query)
            elif stream is not None:
                self._arm(stream)

    def _ask(self, query: tuple[Target, ...]) -> None:
        timeout = self._options.query_timeout
        try:
            if query[0].kind is Kind.STREAM:
                findings = self._source.find_streams([target.name for target in query], timeout)
            else:
                name = query[0].name
                findings = {name: self._source.find_partitions(name, timeout)}
        except Exception as error:  # nothing may end this thread: nobody would notice
            logger.debug("no answer about %d names: %s", len(query), error)
            with self._work:
                self._failure = error
                self._failures += 1
                self._state.failed(self._clock())
                self._news.notify_all()
            return
        with self._work:
            self._failure = None
            changes = self._state.answered(findings, self._clock())
            self._news.notify_all()
        for sentence in told(changes):
            logger.info("%s", sentence)

    def _arm(self, stream: str) -> None:
        try:
            armed = self._source.arm(stream, self._options.arm_timeout)
        except Exception as error:  # as above; without a push the poll does the work
            logger.debug("%s is not armed: %s", stream, error)
            with self._work:
                self._state.arm_failed(stream, self._clock())
            return
        with self._work:
            if armed:
                self._state.arm_succeeded(stream, self._clock())
            else:
                self._state.arm_refused(stream, self._clock())


def _route(finding: Finding) -> StreamRoute:
    assert isinstance(finding, StreamRoute)
    return finding


def _is_final(failure: Exception) -> bool:
    """Whether to ask again is no use. A question that was not answered has no outcome to fear."""
    return not is_retryable(failure) and not isinstance(failure, OutcomeUnknown)
