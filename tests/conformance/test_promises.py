"""What Warren promises beyond the plugin, shown by one script on all four kinds of channel.

Where clients differ in how they report, so must the wrappers; what becomes of a message or of a
consumer is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from interceptors import AioShardedChannel, AsyncShardedChannel, ShardedChannel
from sharding import Policy, ShardMap, Topology
from sharding.maps.naming import shards_exchange
from tests.cluster import Cluster, Node, wait_until
from tests.conformance.callers import CALLERS, Caller, Publication
from tests.support.other_views import AsInAnotherProcess, WithAnOldMap
from tests.support.sharded import drain, fresh_queue, raw_channel

pytestmark = [pytest.mark.cluster, pytest.mark.parametrize("kind", CALLERS)]

WRAPPERS: dict[str, Any] = {
    "blocking": ShardedChannel,
    "async": AsyncShardedChannel,
    "aio": AioShardedChannel,
    "robust": AioShardedChannel,
}


@dataclass
class Application:
    """Channels of one kind on a logical queue with two shards on each of three nodes."""

    kind: str
    cluster: Cluster
    topology: Topology
    logical: str
    opened: ExitStack

    def caller(
        self,
        *,
        confirms: bool = False,
        url: str | None = None,
        topology: Any = None,
    ) -> Caller:
        def wrap(raw: Any) -> Any:
            return WRAPPERS[self.kind](raw, topology or self.topology)

        url = url or self.cluster.nodes[0].endpoint.amqp_url
        return self.opened.enter_context(CALLERS[self.kind](url, wrap, confirms=confirms))

    @property
    def shard_map(self) -> ShardMap:
        found = self.topology.shard_map(self.logical)
        assert found is not None
        return found

    @property
    def shards(self) -> list[str]:
        return [shard.name for shard in self.shard_map.shards]

    def resize(self, shards_per_node: int) -> None:
        policy = Policy.exactly(self.logical, shards_per_node, name=self.logical, durable=True)
        self.topology.set_policy(policy)
        self.topology.ensure(self.logical)

    def consumers(self) -> dict[str, int | None]:
        return self.topology.consumer_counts(self.shards)

    def unbind(self, shard: str) -> None:
        """As somebody with another client might; nothing tells us."""
        with raw_channel(self.cluster.nodes[0]) as raw:
            raw.queue_unbind(shard, shards_exchange(self.logical), shard)

    def stored(self) -> list[tuple[str, str, bytes]]:
        return drain(self.cluster.nodes[0], self.shards)


@pytest.fixture
def app(cluster: Cluster, topology: Topology, kind: str) -> Iterator[Application]:
    logical = fresh_queue()
    with ExitStack() as opened:
        running = Application(kind, cluster, topology, logical, opened)
        running.resize(2)
        yield running
    topology.forget(logical)


def mandatory(logical: str, key: str) -> Publication:
    return Publication(logical, key, "asked for", mandatory=True)


def sent(caller: Caller, publication: Publication) -> Any:
    """What publishing gives. A shard that is looked at, because of what came back, counts as away
    meanwhile: such a message was not sent."""
    given: list[Any] = []

    def is_sent() -> bool:
        given.append(caller.publish(publication))
        return "which is away" not in str(given[-1])

    wait_until(is_sent)
    return given[-1]


# Returns


def test_a_return_is_shown_to_who_asked_for_it_and_to_nobody_else(app: Application) -> None:
    shard = app.shard_map.shard_of("user-1").name
    app.unbind(shard)
    caller = app.caller(confirms=True)
    unasked = caller.publish(Publication(app.logical, "user-1", "unasked"))
    assert caller.noticed.returned == []
    # Not stored, and said: by a nack where a publish has no other answer, else by the error.
    assert "ShardUnavailable" in str(unasked) or "Nack" in str(unasked)
    asked = sent(caller, mandatory(app.logical, "user-1"))
    caller.round_trip()
    came_back = caller.noticed.returned or "asked for" in str(asked) or "Unroutable" in str(asked)
    assert came_back, asked
    assert app.stored() == []


# Old maps


@pytest.mark.parametrize("confirms", [True, False])
def test_what_was_sent_by_an_old_map_is_stored_by_the_new_one(
    app: Application, confirms: bool
) -> None:
    # On a callback channel with confirms the delivery tags are the application's, so that nothing
    # can be sent again; aiormq drops what is returned on a channel without.
    confirms = {"async": False, "aio": True, "robust": True}.get(app.kind, confirms)
    caller = app.caller(confirms=confirms, topology=WithAnOldMap(app.topology, app.logical))
    bodies = {f"user-{number}": str(number) for number in range(20)}
    for key, body in bodies.items():
        sent(caller, Publication(app.logical, key, body))
    seen: list[tuple[str, str, bytes]] = []

    def all_stored() -> bool:
        caller.round_trip()
        seen.extend(app.stored())
        return len(seen) >= len(bodies)

    wait_until(all_stored, explain=lambda: str(seen))
    home = app.shard_map.shard_of
    assert sorted(seen) == sorted(
        (home(key).name, key, body.encode()) for key, body in bodies.items()
    )
    assert caller.noticed.returned == []


# Consumers


def test_a_herd_ends_evenly_and_keeps_its_tags(app: Application) -> None:
    app.resize(4)
    here = [shard.name for shard in app.shard_map.shards_on(app.cluster.nodes[0].name)]
    herd = [app.caller(topology=AsInAnotherProcess(app.topology)) for _ in range(8)]
    tags = [caller.consume(app.logical) for caller in herd]

    def counts() -> list[int | None]:
        for caller in herd:
            caller.pump(0.01)
        return list(app.topology.consumer_counts(here).values())

    wait_until(lambda: counts() == [2, 2, 2, 2], explain=lambda: str(counts()))
    for caller, tag in zip(herd, tags, strict=True):
        caller.cancel(str(tag))
    assert counts() == [0, 0, 0, 0]


def test_every_shard_is_consumed_also_one_that_comes_later_until_all_are_cancelled(
    app: Application,
) -> None:
    caller = app.caller()
    tags = caller.consume_all(app.logical)
    assert isinstance(tags, list)
    assert len(tags) == 6

    def consumed(wanted: list[int]) -> Callable[[], bool]:
        def are() -> bool:
            caller.pump(0.01)
            return sorted(count or 0 for count in app.consumers().values()) == wanted

        return are

    wait_until(consumed([1] * 6))
    # One that the application cancels is not replaced, and the others stay.
    caller.cancel(str(tags[0]))
    app.resize(3)
    wait_until(consumed([0] + [1] * 8), explain=lambda: str(app.consumers()))
    for number in range(50):
        caller.publish(Publication(app.logical, f"user-{number}", str(number)))
    silent = next(shard for shard, count in app.consumers().items() if not count)
    wanted = {
        str(number)
        for number in range(50)
        if app.shard_map.shard_of(f"user-{number}").name != silent
    }
    assert caller.wait_for(lambda: len(caller.noticed.messages) >= len(wanted))
    assert {message["body"] for message in caller.noticed.messages} == wanted


def test_who_cancelled_all_is_given_no_new_one(app: Application) -> None:
    caller = app.caller()
    tags = caller.consume_all(app.logical)
    assert isinstance(tags, list)
    for tag in tags:
        caller.cancel(str(tag))
    app.resize(3)
    other = app.caller()
    # When another client has them all, this one would have had the time to take them too.
    assert len(str(other.consume_all(app.logical))) > 2
    wait_until(lambda: set(app.consumers().values()) == {1}, explain=lambda: str(app.consumers()))
    caller.received(0)
    assert set(app.consumers().values()) == {1}


# Balancers


@contextmanager
def balanced(cluster: Cluster, node: Node) -> Iterator[str]:
    balancer = cluster.balancer([node])
    try:
        yield balancer.endpoint.amqp_url
    finally:
        balancer.stop()


def test_the_node_behind_a_balancer_is_known(app: Application) -> None:
    node = app.cluster.nodes[1]
    caller = app.caller(url=app.opened.enter_context(balanced(app.cluster, node)))
    declared = caller.declare(app.logical, durable=True)
    assert f"sharding: {app.logical} - {node.name} - 0" in str(declared)


# Counters


def test_what_is_published_is_counted_whether_it_is_sharded_or_not(app: Application) -> None:
    caller = app.caller(confirms=True)
    plain = f"{app.logical}.plain"
    caller.declare(plain)
    for number in range(3):
        caller.publish(Publication(app.logical, f"user-{number}", "x"))
        caller.publish(Publication("", plain, "x"))
    caller.publish(mandatory("", f"{plain}.nobody"))
    counted = {"published": 7, "confirmed": 6, "nacked": 0, "returned": 1, "unknown": 0}
    assert caller.counters() == counted
    caller.delete(plain)


# Before the map is known


@pytest.mark.parametrize("confirms", [True, False])
def test_what_was_sent_before_the_map_was_known_is_stored_before_what_comes_after(
    app: Application, confirms: bool
) -> None:
    """The name is sharded no more, its exchange is still there, and then it is sharded again."""
    caller = app.caller(confirms=confirms)
    app.topology.forget(app.logical)
    assert app.topology.shard_map(app.logical) is None
    publish(caller, app.logical, 0, 40)
    app.topology.ensure(app.logical)
    publish(caller, app.logical, 40, 80)
    caller.round_trip()
    assert_stored_in_order(app, 80)


@pytest.mark.parametrize("confirms", [True, False])
def test_it_is_so_too_when_what_comes_after_is_sent_on_another_channel(
    app: Application, confirms: bool
) -> None:
    """A thread whose channel was closed, by the broker perhaps, goes on with a new one."""
    app.topology.forget(app.logical)
    with ExitStack() as opened:
        first = replace(app, opened=opened).caller(confirms=confirms)
        publish(first, app.logical, 0, 40)
        first.round_trip()
    app.topology.ensure(app.logical)
    second = app.caller(confirms=confirms)
    publish(second, app.logical, 40, 80)
    second.round_trip()
    assert_stored_in_order(app, 80)


def test_it_is_so_too_in_a_transaction(app: Application) -> None:
    """What is published in it is kept or stored when it is committed, as the first of it."""
    caller = app.caller()
    caller.begin_transaction()
    app.topology.forget(app.logical)
    publish(caller, app.logical, 0, 20)
    app.topology.ensure(app.logical)
    publish(caller, app.logical, 20, 40)
    assert app.stored() == []
    caller.commit()
    publish(caller, app.logical, 40, 60)
    caller.commit()
    assert_stored_in_order(app, 60)


def publish(caller: Caller, logical: str, first: int, end: int) -> None:
    for number in range(first, end):
        sent(caller, Publication(logical, f"user-{number % 5}", f"{number}"))


def assert_stored_in_order(app: Application, count: int) -> None:
    found = []

    def all_stored() -> bool:
        found.extend(app.stored())
        return len(found) == count

    wait_until(all_stored, explain=lambda: f"{len(found)} stored")
    for key in {f"user-{n}" for n in range(5)}:
        numbers = [int(body) for _, found_key, body in found if found_key == key]
        assert numbers == sorted(numbers), key
