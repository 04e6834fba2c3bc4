"""The route cache's thread: callers share it, keep their deadlines, and hear of failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import inf
from typing import Any

import pytest

from sharding.errors import InvalidInput, LocalError, Unreachable
from sharding.stream.errors import (
    AuthenticationFailed,
    NoAnswerInTime,
    NoLeader,
    StreamNotFound,
    refusal,
)
from sharding.stream.options import RouteOptions
from sharding.stream.protocol.constants import Broker, Code
from sharding.stream.routes.cache import RouteCache
from sharding.stream.routes.values import Finding, Missing, Partitions, StreamRoute
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.hand_time import HandClock

pytestmark = pytest.mark.timeout(PATIENCE)  # who waits for ever fails by this

A, B, C = Broker("a", 5552), Broker("b", 5552), Broker("c", 5552)
S = StreamRoute("s", A, (B, C))


class Source:
    """A cluster that answers at once, or when it is let."""

    def __init__(self, *routes: StreamRoute) -> None:
        self.on_update: Callable[[str], None] | None = None
        self.on_disconnect: Callable[[], None] | None = None
        self.routes = {route.stream: route for route in routes}
        self.partitions: dict[str, tuple[str, ...]] = {}
        self.queries: list[list[str]] = []
        self.answers = 0
        self.armed: list[str] = []
        self.arm_failure: Exception | None = None
        self.failure: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()

    def find_streams(self, names: Sequence[str], timeout: float) -> Mapping[str, Finding]:
        self._think(names, timeout)
        gone = {name: Missing(name, Code.NO_SUCH_STREAM) for name in names}
        return gone | {name: self.routes[name] for name in names if name in self.routes}

    def find_partitions(self, super_stream: str, timeout: float) -> Finding:
        self._think([super_stream], timeout)
        return Partitions(super_stream, self.partitions[super_stream])

    def arm(self, stream: str, timeout: float) -> bool:
        assert timeout > 0
        self.armed.append(stream)
        if self.arm_failure is not None:
            raise self.arm_failure
        return stream in self.routes

    def not_found(self, missing: Missing) -> Exception:
        return refusal("Lookup", missing.code, missing.name)

    def no_leader(self, stream: str, waited: float) -> Exception:
        return NoLeader(f"{stream}: {waited}")

    def push(self, stream: str) -> None:
        assert self.on_update is not None
        self.on_update(stream)

    def _think(self, names: Sequence[str], timeout: float) -> None:
        assert timeout > 0
        self.queries.append(list(names))
        assert self.may_answer.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        self.answers += 1


@contextmanager
def cache_of(
    source: Source,
    pressure: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Iterator[RouteCache]:
    cache = RouteCache(source, RouteOptions(**options), pressure=lambda: pressure, clock=clock)
    try:
        yield cache
    finally:
        cache.close(PATIENCE)


def test_route_leader_and_partitions_are_found() -> None:
    source = Source(S)
    source.partitions["invoices"] = ("invoices-0", "invoices-1")
    with cache_of(source) as cache:
        assert cache.route("s", PATIENCE) == S
        assert cache.leader("s", PATIENCE) == A
        assert cache.partitions("invoices", PATIENCE).streams == ("invoices-0", "invoices-1")
        with pytest.raises(StreamNotFound, match="nowhere"):
            cache.leader("nowhere", PATIENCE)


def test_hundred_threads_share_one_query() -> None:
    source = Source(S)
    source.may_answer.clear()
    with cache_of(source, clock=HandClock(), pushes=False) as cache:
        with ThreadPoolExecutor(100) as pool:
            answers = [pool.submit(cache.leader, "s", PATIENCE) for _ in range(100)]
            wait_until(lambda: cache.counters["misses"] + cache.counters["waits"] == 100, PATIENCE)
            source.may_answer.set()
            assert {answer.result() for answer in answers} == {A}
        assert source.queries == [["s"]]


def test_hammering_a_missing_name_costs_one_query() -> None:
    source = Source()
    with cache_of(source, clock=HandClock()) as cache:
        for _ in range(1_000):
            with pytest.raises(StreamNotFound):
                cache.route("nowhere", PATIENCE)
        assert source.queries == [["nowhere"]]
        assert cache.counters["hits_missing"] == 999


def test_suspected_route_is_asked_for_again_by_the_next_use() -> None:
    source = Source(S)
    with cache_of(source) as cache:
        cache.route("s", PATIENCE)
        source.routes["s"] = StreamRoute("s", B, (C,))
        cache.suspect("s", "not the leader")
        assert cache.leader("s", PATIENCE) == B


def test_push_is_followed_by_a_question_without_anybody_asking() -> None:
    source = Source(S)
    with cache_of(source) as cache:
        cache.route("s", PATIENCE)
        wait_until(lambda: source.armed == ["s"], PATIENCE)
        del source.routes["s"]
        source.push("s")
        wait_until(lambda: cache.counters["changes"] == 1, PATIENCE)
        with pytest.raises(StreamNotFound):
            cache.route("s", PATIENCE)


def test_push_above_the_pressure_limit_is_ignored() -> None:
    source = Source(S)
    with cache_of(source, pressure=0.95, poll_interval=1e6) as cache:
        cache.route("s", PATIENCE)
        wait_until(lambda: len(source.queries) == 2, PATIENCE)  # the second look at a new leader
        del source.routes["s"]
        source.push("s")
        assert cache.route("s", 0) == S
        assert cache.counters["pushes_ignored"] == 1


def test_poll_goes_on_without_anybody_asking() -> None:
    source = Source(S)
    with cache_of(source, poll_interval=0.05, pushes=False) as cache:
        cache.route("s", PATIENCE)
        del source.routes["s"]
        wait_until(lambda: cache.counters["changes"] == 1, PATIENCE)


def test_unused_name_is_forgotten_and_the_thread_rests() -> None:
    source, clock = Source(S), HandClock()
    with cache_of(source, clock=clock, poll_interval=0.05, forget_after=0.2) as cache:
        cache.route("s", PATIENCE)
        assert repr(cache) == "<RouteCache: 1 names>"
        clock.now += 0.2
        wait_until(lambda: cache.counters["forgotten"] == 1, PATIENCE)
        assert repr(cache) == "<RouteCache: 0 names>"
        assert cache._state.wake_at() == inf


def test_lost_locator_has_armed_streams_asked_for_and_armed_again() -> None:
    source = Source(S)
    with cache_of(source, rearm_interval=0.0) as cache:
        cache.route("s", PATIENCE)
        wait_until(lambda: source.armed == ["s"], PATIENCE)
        assert source.on_disconnect is not None
        source.on_disconnect()
        wait_until(lambda: source.armed == ["s", "s"], PATIENCE)


def test_arming_that_fails_or_is_refused_ends_nothing() -> None:
    source = Source(S)
    source.arm_failure = NoAnswerInTime("silence")
    with cache_of(source) as cache:
        cache.route("s", PATIENCE)
        wait_until(lambda: cache.counters["arms_failed"] >= 1, PATIENCE)
        assert cache.route("s", PATIENCE) == S


def test_leader_is_waited_for_while_an_election_is_under_way() -> None:
    source = Source(StreamRoute("s", None, (B,)))
    with cache_of(source, leader_rounds=0) as cache, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.leader, "s", PATIENCE)
        wait_until(lambda: len(source.queries) >= 2, PATIENCE)
        source.routes["s"] = StreamRoute("s", B)
        assert waiting.result() == B


def test_election_that_does_not_end_in_time_is_told() -> None:
    source = Source(StreamRoute("s", None, (B,)))
    with cache_of(source) as cache:
        cache.route("s", PATIENCE)
        began = time.monotonic()
        with pytest.raises(NoLeader, match=r"s: 0\.2"):
            cache.leader("s", 0.2)
        assert time.monotonic() - began >= 0.2
        assert cache.route("s", PATIENCE).leader is None, "who reads needs no leader"


def test_replicas_of_a_new_stream_are_waited_for() -> None:
    source, clock = Source(StreamRoute("s", A)), HandClock()
    with cache_of(source, clock=clock) as cache, ThreadPoolExecutor(1) as pool:
        assert cache.leader("s", PATIENCE) == A, "who writes needs no replicas"
        waiting = pool.submit(cache.route, "s", PATIENCE)
        source.routes["s"] = S
        clock.now += 1  # the cache looks again after some time only, and for some time only
        assert waiting.result() == S


def test_stream_that_never_has_replicas_is_not_waited_for_long() -> None:
    source = Source(StreamRoute("s", A))
    with cache_of(source) as cache:
        assert cache.route("s", 100 * PATIENCE) == StreamRoute("s", A)


def test_caller_keeps_its_deadline_although_nothing_answers() -> None:
    source = Source(S)
    source.may_answer.clear()
    with cache_of(source) as cache:
        with pytest.raises(Unreachable, match=r"nothing is known of the stream 's' after 0\.1"):
            cache.route("s", 0.1)
        assert source.answers == 0, "it was told before the question came to an end"
        source.may_answer.set()


def test_unreachable_cluster_is_tried_again_until_the_callers_time_is_up() -> None:
    source = Source(S)
    source.failure = Unreachable("all are down")
    with cache_of(source, retry_delay=0.02) as cache, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.route, "s", PATIENCE)
        wait_until(lambda: len(source.queries) >= 3, PATIENCE)
        with pytest.raises(Unreachable, match="all are down"):
            cache.route("s", 0.1)
        source.failure = None
        assert waiting.result() == S


def test_refused_login_is_told_at_once() -> None:
    source = Source(S)
    source.failure = AuthenticationFailed("SaslAuthenticate", Code.AUTHENTICATION_FAILURE)
    with cache_of(source) as cache, pytest.raises(AuthenticationFailed):
        cache.route("s", 100 * PATIENCE)


def test_name_no_broker_can_have_is_refused_before_it_spoils_a_batch() -> None:
    source = Source()
    with cache_of(source) as cache:
        for name in ("", "ä" * 128, "\ud800"):
            with pytest.raises(InvalidInput):
                cache.route(name, PATIENCE)
        assert source.queries == []


def test_close_ends_the_thread_and_who_waits() -> None:
    source = Source()
    source.may_answer.clear()
    with cache_of(source) as cache, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache.route, "s", 100 * PATIENCE)
        wait_until(lambda: source.queries == [["s"]], PATIENCE)
        closing = threading.Thread(target=cache.close, args=(PATIENCE,))
        closing.start()
        with pytest.raises(LocalError, match="closed"):
            waiting.result(PATIENCE)
        source.may_answer.set()
        closing.join(PATIENCE)
    assert not cache._thread.is_alive()
    assert source.on_update is None
