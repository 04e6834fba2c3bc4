"""On real brokers: the route cache knows at once what changed, and asks little."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from sharding.stream.connections.connection import ConnectOptions, Login, connect
from sharding.stream.connections.locator import Locator
from sharding.stream.errors import StreamNotFound
from sharding.stream.options import RouteOptions
from sharding.stream.protocol.commands import Create, Delete
from sharding.stream.protocol.constants import Broker
from sharding.stream.routes.cache import RouteCache
from sharding.stream.routes.values import Kind, Target, leader_of
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE

pytestmark = pytest.mark.cluster

ONLY_POLLS = RouteOptions(pushes=False, poll_interval=0.4, query_timeout=PATIENCE)
ONLY_PUSHES = RouteOptions(poll_interval=300, query_timeout=PATIENCE)


def address(node: Node) -> Broker:
    return Broker(node.endpoint.address, node.endpoint.ports["stream"])


@contextmanager
def locator_at(*nodes: Node) -> Iterator[Locator]:
    login = Login(vhost=nodes[0].endpoint.vhost)
    options = ConnectOptions(login, connect_timeout=PATIENCE, request_timeout=PATIENCE)
    locator = Locator([address(node) for node in nodes], partial(connect, options=options))
    try:
        yield locator
    finally:
        locator.close()


@contextmanager
def cache_at(*nodes: Node, options: RouteOptions) -> Iterator[RouteCache]:
    """Without pressure: on a busy machine pushes would be ignored, as they should be."""
    with locator_at(*nodes) as locator:
        cache = RouteCache(locator, options, pressure=lambda: 0.0)
        try:
            yield cache
        finally:
            cache.close()


@contextmanager
def streams_led_by(node: Node, count: int = 1) -> Iterator[list[str]]:
    """New streams; their leader is the node they are created at."""
    names = [f"routes-{secrets.token_hex(6)}" for _ in range(count)]
    with locator_at(node) as locator:
        for name in names:
            locator.call(Create(name, {"queue-leader-locator": "client-local"}), PATIENCE)
        try:
            yield names
        finally:
            for name in names:
                delete(locator, name)


def delete(locator: Locator, name: str) -> None:
    with suppress(StreamNotFound):  # a test may have deleted it
        locator.call(Delete(name), PATIENCE)


def is_gone(cache: RouteCache, name: str) -> bool:
    try:
        cache.route(name, PATIENCE)
    except StreamNotFound:
        return True
    return False


def wait_until_armed(cache: RouteCache, names: list[str]) -> None:
    """Until the broker has answered an arming of each of these; each may have taken attempts."""

    def armed(name: str) -> bool:
        entry = cache._state._entries[Target(Kind.STREAM, name)]
        # One thread arms and asks, so what was asked later means that the arming was answered.
        armed_at = entry.arm_after - cache._options.rearm_interval
        return entry.armed and entry.asked_at > armed_at

    def all_are() -> bool:
        with cache._work:
            return all(map(armed, names))

    wait_until(all_are, explain=lambda: repr(cache.counters))


def wait_until_calm(cache: RouteCache) -> None:
    """Until no look at what is new is due any more: what is known later, a push has told."""
    asked, since = -1, time.monotonic()

    def calm() -> bool:
        nonlocal asked, since
        if asked != (now := cache.counters["queries"]):
            asked, since = now, time.monotonic()
        return time.monotonic() - since > 1.5 * RouteOptions().repeat_gap_max

    wait_until(calm)


@pytest.mark.parametrize("options", [ONLY_PUSHES, ONLY_POLLS], ids=["push", "poll"])
def test_deleted_stream_is_known_by_a_push_and_by_a_poll(
    nodes: Cluster, options: RouteOptions
) -> None:
    with (
        streams_led_by(nodes.nodes[0]) as [name],
        locator_at(nodes.nodes[1]) as other,
        cache_at(nodes.nodes[2], options=options) as cache,
    ):
        assert cache.leader(name, PATIENCE) == address(nodes.nodes[0])
        if options.pushes:
            wait_until_armed(cache, [name])
            wait_until_calm(cache)
        delete(other, name)
        wait_until(lambda: is_gone(cache, name))
        # A stream that was armed a second time may be told of twice.
        assert cache.counters["pushes"] >= 1 if options.pushes else cache.counters["pushes"] == 0


@pytest.mark.parametrize("options", [ONLY_PUSHES, ONLY_POLLS], ids=["push", "poll"])
def test_moved_stream_is_known_by_a_push_and_by_a_poll(
    nodes: Cluster, options: RouteOptions
) -> None:
    if nodes.version.startswith("3.10"):
        pytest.skip("3.10 can't move a leader on request; there the killed node shows it")
    for _ in range(8):
        if move_is_known(nodes, options):
            return
    pytest.fail("the broker elected the same leader eight times")


def move_is_known(nodes: Cluster, options: RouteOptions) -> bool:
    """Have a new leader elected, and wait until it is known; False if it is the same one again."""
    before = nodes.nodes[0]
    with (
        streams_led_by(before) as [name],
        locator_at(nodes.nodes[1]) as other,
        cache_at(nodes.nodes[2], options=options) as cache,
        ThreadPoolExecutor(1) as thread,
    ):
        assert cache.leader(name, PATIENCE) == address(before)
        wait_until(lambda: len(cache.route(name, PATIENCE).replicas) == 2)
        electing = thread.submit(elect, nodes, name, preferred=nodes.nodes[1])
        unmoved = (address(before), None)
        wait_until(lambda: electing.done() or real_leader(other, name) not in unmoved)
        moved_to = real_leader(other, name)
        if moved_to in unmoved:
            return False
        wait_until(lambda: cache.leader(name, PATIENCE) == moved_to)
        return True


def elect(cluster: Cluster, stream: str, preferred: Node) -> str:
    """Have a leader elected anew, and return which node it is."""
    return cluster.nodes[2].driver.ctl(
        "eval",
        f'rabbit_stream_queue:restart_stream(<<"{cluster.vhost}">>, <<"{stream}">>, '
        f"#{{preferred_leader_node => '{preferred.name}'}}).",
    )


def real_leader(locator: Locator, name: str) -> Broker | None:
    return leader_of(locator.find_streams([name], PATIENCE)[name])


def test_stream_that_appears_is_seen_by_the_poll(cluster: Cluster) -> None:
    name = f"routes-{secrets.token_hex(6)}"
    with (
        locator_at(cluster.nodes[0]) as other,
        cache_at(cluster.nodes[1], options=ONLY_POLLS) as cache,
    ):
        assert is_gone(cache, name)
        other.call(Create(name, {}), PATIENCE)
        try:
            wait_until(lambda: not is_gone(cache, name))
        finally:
            delete(other, name)


def test_two_hundred_threads_asking_for_a_missing_stream_cost_a_handful_of_queries(
    cluster: Cluster,
) -> None:
    with (
        cache_at(*cluster.nodes, options=ONLY_PUSHES) as cache,
        ThreadPoolExecutor(200) as threads,
    ):
        together = threading.Barrier(200)

        def keep_asking(_: int) -> bool:
            together.wait(PATIENCE)
            return all(is_gone(cache, "routes-nowhere") for _ in range(200))

        assert all(threads.map(keep_asking, range(200)))
        assert cache.counters["queries"] <= 3


def test_unused_route_is_gone_after_its_time(cluster: Cluster) -> None:
    options = RouteOptions(forget_after=1, poll_interval=0.2)
    with (
        streams_led_by(cluster.nodes[0]) as [name],
        cache_at(*cluster.nodes, options=options) as cache,
    ):
        cache.route(name, PATIENCE)
        wait_until(lambda: cache.counters["forgotten"] == 1)
        queries, arms = cache.counters["queries"], cache.counters["arms"]
        time.sleep(0.6)  # three polls, were it still remembered
        assert cache.counters["queries"] == queries
        assert cache.counters["arms"] == arms


def test_restart_of_the_node_that_led_a_hundred_streams_costs_ten_queries_at_most(
    harmed: Cluster,
) -> None:
    victim, *others = harmed.nodes
    with (
        streams_led_by(victim, count=100) as names,
        cache_at(*others, options=ONLY_PUSHES) as cache,
    ):
        assert {cache.leader(name, PATIENCE) for name in names} == {address(victim)}
        wait_until_armed(cache, names)
        before = cache.counters["queries"]
        victim.kill()
        moved = {address(node) for node in others}
        wait_until(
            lambda: {cache.leader(name, PATIENCE) for name in names} <= moved,
            explain=lambda: repr(cache.counters),
        )
        victim.restart()
        assert {cache.leader(name, PATIENCE) for name in names} <= moved
        print(f"{cache.counters['queries'] - before} queries; {dict(cache.counters)}")
        assert cache.counters["queries"] - before <= 10
