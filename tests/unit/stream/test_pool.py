"""Connections are shared by node and role, found behind balancers, and closed when idle."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from sharding.errors import LocalError, ShardUnavailable, Unreachable
from sharding.stream.connections.connection import StreamClient
from sharding.stream.connections.node_search import Tries
from sharding.stream.connections.pool import DedicatedConnections, Pool
from sharding.stream.errors import AuthenticationFailed, NodeNotReached
from sharding.stream.protocol.constants import Broker, Code
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.hand_time import HandClock
from tests.support.stream_fakes import FakeClient, Handler, as_client, fake_of

pytestmark = pytest.mark.timeout(PATIENCE)  # who waits for ever fails by this

A, B, C = NODES = Broker("a", 5552), Broker("b", 5552), Broker("c", 5552)
BALANCER = Broker("balancer", 5552)


class Network:
    """Connects; `reach` says which node is behind an address."""

    def __init__(self, reach: Callable[[Broker], Broker] = lambda address: address) -> None:
        self.reach = reach
        self.dialled: list[Broker] = []
        self.clients: list[FakeClient] = []
        self.down: set[Broker] = set()
        self.failure: Exception | None = None
        self.may_connect = threading.Event()
        self.may_connect.set()
        self.before_dial: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def dial(self, address: Broker) -> StreamClient:
        with self._lock:
            self.before_dial()
            self.dialled.append(address)
            node = self.reach(address)
        assert self.may_connect.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        if node in self.down:
            raise Unreachable(f"{address}: connection refused")
        client = FakeClient(address, node)
        self.clients.append(client)
        return as_client(client)

    @property
    def open(self) -> list[FakeClient]:
        return [client for client in self.clients if not client.closed]


def in_turn(*nodes: Broker) -> Callable[[Broker], Broker]:
    turns = itertools.cycle(nodes)
    return lambda _: next(turns)


def at_random(nodes: Sequence[Broker], seed: int) -> Callable[[Broker], Broker]:
    rng = random.Random(seed)
    return lambda _: rng.choice(nodes)


@contextmanager
def pool_of(network: Network, **options: Any) -> Iterator[Pool]:
    pool = Pool(network.dial, **options)
    try:
        yield pool
    finally:
        pool.close(PATIENCE)
    assert network.open == [], "close leaves no connection"


def soon(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


def publish(pool: Pool, node: Broker) -> StreamClient:
    return pool.publisher(node, "s", Handler(), soon())[0]


def subscribe(pool: Pool, *nodes: Broker) -> StreamClient:
    return pool.subscriber(nodes, "s", Handler(), soon())[0]


# One node, one connection


def test_publishers_of_one_node_share_a_connection() -> None:
    with pool_of(Network()) as pool:
        assert len({publish(pool, A) for _ in range(50)}) == 1
        assert pool.counters["dials"] == 1
        assert pool.counters["reused"] == 49


def test_publishers_and_subscriptions_never_share_a_connection() -> None:
    with pool_of(Network()) as pool:
        assert publish(pool, A) is not subscribe(pool, A)
        assert publish(pool, A) is not subscribe(pool, A)
        assert pool.counters["dials"] == 2


def test_full_connection_is_followed_by_another() -> None:
    with pool_of(Network()) as pool:
        clients = [publish(pool, A) for _ in range(256)]
        assert len(set(clients)) == 2
        clients[0].detach_publisher(7)
        assert publish(pool, A) is clients[0], "the fuller one, so that the other may get empty"


def test_readers_leave_ids_of_their_connection_for_questions() -> None:
    """Each asks for the ends of its stream by an id more: the 253rd reader of a node never began,
    and after a lost connection one of 255 never came back."""
    with pool_of(Network()) as pool:
        readers = Counter(subscribe(pool, A) for _ in range(300))
        writers = Counter(publish(pool, A) for _ in range(300))
    assert max(readers.values()) == 200
    assert max(writers.values()) == 255


def test_connection_that_lost_credit_gets_no_new_publishers() -> None:
    with pool_of(Network()) as pool:
        spent = publish(pool, A)
        spent.lost_credit = True
        assert publish(pool, A) is not spent
        assert not spent.closed, "others may still publish there"


def test_threads_that_want_the_same_node_share_one_dial() -> None:
    network = Network()
    network.may_connect.clear()
    with pool_of(network) as pool, ThreadPoolExecutor(50) as threads:
        clients = [threads.submit(publish, pool, A) for _ in range(50)]
        wait_until(lambda: pool.counters["shared"] == 49, PATIENCE)
        network.may_connect.set()
        assert len({client.result() for client in clients}) == 1
        assert network.dialled == [A]


def test_six_hundred_threads_get_the_fewest_connections_that_hold_them() -> None:
    with pool_of(Network()) as pool, ThreadPoolExecutor(60) as threads:
        clients = [threads.submit(publish, pool, A) for _ in range(600)]
        used = {id(client.result()) for client in clients}
    assert len(used) == 3


def test_lost_connection_is_replaced() -> None:
    with pool_of(Network()) as pool:
        lost = publish(pool, A)
        fake_of(lost).lose()
        assert publish(pool, A) is not lost


def test_subscription_goes_to_the_next_candidate_if_a_node_is_down() -> None:
    network = Network()
    network.down = {A, B}
    with pool_of(network) as pool:
        assert subscribe(pool, A, B, C).node == C
        assert network.dialled == [A, B, C]
        network.down = {A, B, C}
        with pytest.raises(Unreachable) as error:
            subscribe(pool, A, B)
        assert str(A) in str(error.value)
        assert str(B) in str(error.value)


def test_first_candidate_is_dialled_although_another_is_connected() -> None:
    with pool_of(Network()) as pool:
        assert subscribe(pool, A).node == A
        assert subscribe(pool, B, A).node == B


def test_nobody_to_read_from_is_told() -> None:
    with pool_of(Network()) as pool, pytest.raises(ShardUnavailable, match="require_replica"):
        subscribe(pool)


def test_refused_login_is_told_at_once_and_not_tried_elsewhere() -> None:
    network = Network()
    network.failure = AuthenticationFailed("SaslAuthenticate", Code.AUTHENTICATION_FAILURE)
    with pool_of(network) as pool, pytest.raises(AuthenticationFailed):
        subscribe(pool, A, B, C)
    assert network.dialled == [A]


def test_caller_keeps_its_deadline_and_the_late_connection_serves_the_next() -> None:
    network = Network()
    network.may_connect.clear()
    with pool_of(network) as pool:
        with pytest.raises(Unreachable, match="not connected in time"):
            pool.publisher(A, "s", Handler(), soon(0.1))
        assert network.clients == [], "it was told before the dial came to an end"
        network.may_connect.set()
        publish(pool, A)
        assert network.dialled == [A]


# Idle


def wait_for_looks(clock: HandClock, count: int) -> None:
    """Until the pool has looked for idle connections; nobody else reads the clock meanwhile."""
    before = clock.looks
    wait_until(lambda: clock.looks >= before + count, PATIENCE)


def test_idle_connection_is_closed_by_time_alone() -> None:
    network, clock = Network(), HandClock()
    with pool_of(network, idle_timeout=0.1, clock=clock) as pool:
        client, number = pool.publisher(A, "s", Handler(), PATIENCE)
        clock.now += 1  # ten idle times
        wait_for_looks(clock, 2)  # the second one begins when the first has come to its end
        assert not client.closed, "it is in use"
        client.detach_publisher(number)
        pool.release(client)
        wait_for_looks(clock, 2)
        assert not client.closed, "it has only just become idle"
        clock.now += 0.1
        wait_until(lambda: client.closed, PATIENCE)
        assert pool.counters["idle_closed"] == 1
        assert publish(pool, A) is not client


def test_connection_whose_ids_the_broker_freed_is_closed_too() -> None:
    with pool_of(Network(), idle_timeout=0.1) as pool:
        client, number = pool.publisher(A, "s", Handler(), soon())
        client.detach_publisher(number)  # and nobody tells the pool
        wait_until(lambda: client.closed, PATIENCE)


def test_connection_used_again_is_not_idle_from_its_first_rest_on() -> None:
    clock = HandClock()
    with pool_of(Network(), idle_timeout=10, clock=clock) as pool:
        client, number = pool.publisher(A, "s", Handler(), PATIENCE)
        for _ in range(4):
            client.detach_publisher(number)
            looks = clock.looks
            pool.release(client)
            wait_until(lambda before=looks: clock.looks > before, PATIENCE)  # type: ignore[misc]
            clock.now += 6
            again, number = pool.publisher(A, "s", Handler(), PATIENCE)
            assert again is client


def test_close_ends_who_waits_and_closes_what_still_connects() -> None:
    network = Network()
    network.may_connect.clear()
    with pool_of(network) as pool, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(publish, pool, A)
        wait_until(lambda: bool(network.dialled), PATIENCE)
        closing = threading.Thread(target=pool.close, args=(PATIENCE,))
        closing.start()
        with pytest.raises(LocalError, match="closed"):
            waiting.result(PATIENCE)
        network.may_connect.set()
        closing.join(PATIENCE)
        assert [client.closed for client in network.clients] == [True]
    assert not pool._closer.is_alive()


# Behind a balancer


def test_twelve_leaders_in_any_order_take_one_connect_a_node() -> None:
    for seed in range(20):
        leaders = [random.Random(seed + number).choice(NODES) for number in range(12)]
        network = Network(in_turn(*NODES))
        with pool_of(network, balancers=[BALANCER]) as pool:
            for leader in leaders:
                assert publish(pool, leader).node == leader
            assert len(network.dialled) <= 2 * len(NODES)
            assert set(network.dialled) == {BALANCER}


def test_twelve_leaders_wanted_at_once_take_two_connects_a_node_at_most() -> None:
    network = Network(in_turn(*NODES))
    leaders = [NODES[number % 3] for number in range(12)]
    with pool_of(network, balancers=[BALANCER]) as pool, ThreadPoolExecutor(12) as threads:
        all_have_theirs = threading.Event()

        def has_what_was_found() -> bool:
            if all_have_theirs.is_set():  # a pool that closes is empty, and waits for who dials
                return True
            all_are_there = len(network.clients) == len(network.dialled)
            return all_are_there and repr(pool) == f"<Pool: {len(network.open)} connections>"

        # A thread held up with the node that others look for would have them dial on.
        network.before_dial = lambda: wait_until(has_what_was_found, PATIENCE)
        clients = list(threads.map(lambda leader: publish(pool, leader), leaders))
        all_have_theirs.set()
        assert [client.node for client in clients] == leaders
        assert len(network.dialled) <= 2 * len(NODES)


def test_connection_to_a_node_that_is_wanted_later_is_kept() -> None:
    network = Network(in_turn(A, B, C))
    with pool_of(network, balancers=[BALANCER]) as pool:
        publish(pool, C)
        assert pool.counters["kept"] == 2
        publish(pool, A)
        subscribe(pool, B)
        assert len(network.dialled) == 3


def test_second_spare_of_a_node_is_closed_and_a_spare_nobody_wants_too_after_a_while() -> None:
    network, clock = Network(in_turn(A, A, A, B)), HandClock()
    with pool_of(network, balancers=[BALANCER], idle_timeout=0.2, clock=clock) as pool:
        publish(pool, B)
        assert [client.node for client in network.open] == [A, B]
        assert pool.counters["unwanted"] == 2
        clock.now += 0.2
        wait_until(lambda: [client.node for client in network.open] == [B], PATIENCE)


@pytest.mark.parametrize("seed", range(5))
def test_node_is_found_behind_a_balancer_that_deals_at_random(seed: int) -> None:
    network = Network(at_random(NODES, seed))
    with pool_of(network, balancers=[BALANCER]) as pool:
        for node in NODES:
            assert publish(pool, node).node == node


def test_balancer_that_reaches_one_node_gives_an_error_that_names_all() -> None:
    network = Network(in_turn(A))
    with pool_of(network, balancers=[BALANCER], tries_per_node=6) as pool:
        with pytest.raises(NodeNotReached) as error:
            pool.publisher(B, "s", Handler(), soon(100 * PATIENCE))
        assert str(error.value.__cause__) == f"{B} was not reached", "the search ended by itself"
        assert error.value.wanted == (B,)
        assert error.value.seen == {A: 6}
        assert f"wanted {B} through the balancer {BALANCER}, reached {A} 6×" in str(error.value)
        assert len(network.open) == 1


def test_deadline_ends_a_search_with_what_was_seen_so_far() -> None:
    clock = HandClock()

    def reach(_: Broker) -> Broker:
        clock.now += 4
        return A

    network = Network(reach)
    with pool_of(network, balancers=[BALANCER], tries_per_node=1_000, clock=clock) as pool:
        with pytest.raises(NodeNotReached) as error:
            pool.publisher(B, "s", Handler(), deadline=10)
        assert error.value.__cause__ is None, "the search went on until then"
        assert set(error.value.seen) == {A}
        assert error.value.seen[A] >= 2


def test_subscription_gets_its_first_choice_from_a_balancer_that_deals_in_turn() -> None:
    network = Network(in_turn(*NODES))
    with pool_of(network, balancers=[BALANCER]) as pool:
        assert subscribe(pool, C, B, A).node == C
        assert subscribe(pool, B, C, A).node == B


def test_subscription_takes_another_replica_before_long_if_its_first_choice_is_down() -> None:
    with pool_of(Network(in_turn(A, B)), balancers=[BALANCER], tries_per_node=10_000) as pool:
        assert subscribe(pool, C, B, A).node == B, "and not only when all tries are used up"
    tries = Tries(10)
    accepted = []
    for node in (A, B, A, B, A, B):
        tries.seen[node] += 1
        accepted.append(tries.good_enough)
    assert accepted == [1, 1, 1, 1, 2, 2]


def test_search_that_nobody_waits_for_any_more_ends() -> None:
    network = Network(in_turn(A))
    with pool_of(network, balancers=[BALANCER], tries_per_node=1_000) as pool:
        with pytest.raises(NodeNotReached):
            pool.publisher(B, "s", Handler(), soon(0.1))
        wait_until(
            lambda: not any("warren-dial" in t.name for t in threading.enumerate()), PATIENCE
        )


def test_subscription_takes_the_leader_only_when_no_replica_is_reached() -> None:
    network = Network(in_turn(A))
    with pool_of(network, balancers=[BALANCER]) as pool:
        assert subscribe(pool, C, B, A).node == A


def test_balancer_that_is_down_for_a_moment_is_tried_again() -> None:
    network = Network(in_turn(A, B))
    network.down = {A}
    with pool_of(network, balancers=[BALANCER]) as pool:
        assert publish(pool, B).node == B
        assert pool.counters["failed_dials"] == 1


def test_second_balancer_is_used_when_the_first_is_down() -> None:
    network = Network(lambda address: B if address == BALANCER else A)
    network.down = {A}
    with pool_of(network, balancers=[A, BALANCER], tries_per_node=2) as pool:
        assert publish(pool, B).node == B
        assert pool.counters["failed_dials"] == 1
        network.down = {B}
        assert publish(pool, B).node == B, "the one that is open"
        network.clients[-1].close()
        network.down = set()
        assert publish(pool, B).node == B, "through the one that worked last"
        assert pool.counters["failed_dials"] == 1


def test_balancer_that_is_down_is_told_with_the_reason() -> None:
    network = Network(in_turn(A))
    network.down = {A}
    with pool_of(network, balancers=[BALANCER], tries_per_node=2) as pool:
        with pytest.raises(NodeNotReached, match="reached no node") as error:
            publish(pool, A)
        assert "connection refused" in str(error.value.__cause__)


def test_tries_go_at_once_for_each_node_and_then_with_growing_pauses() -> None:
    tries, rng = Tries(10), random.Random(1)
    for node in NODES:
        tries.seen[node] += 1
        assert tries.pause(rng) == 0
    pauses = []
    while not tries.are_used_up:
        tries.seen[A] += 1
        pauses.append(tries.pause(rng))
    assert tries.count == 30
    assert pauses[0] < 0.06
    assert max(pauses) <= 0.5
    assert sum(pauses) < 15


def test_a_subscription_with_a_connection_of_its_own_ends_it() -> None:
    """For a single active consumer the end of its connection is what frees the stream."""
    network = Network()
    with pool_of(network, capacity=1) as pool:
        own = DedicatedConnections(pool)
        deadline = soon()
        (first, number), (second, _) = (
            own.subscriber([A], "s", Handler(), deadline) for _ in range(2)
        )
        assert first is not second
        first.detach_subscriber(number)
        own.release(first)
        assert network.open == [fake_of(second)]
        third, _ = own.subscriber([A], "s", Handler(), deadline)
        assert third not in (first, second)
