"""`Topology`: what a process knows of shards and nodes, and the way to change it.

One for each process. It runs the control plane in a thread of its own; its methods may be called
from any thread, and those that ask the network have a deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, TypeVar

import pika

from sharding.amqp.addresses import of_one_cluster
from sharding.amqp.session import Declared
from sharding.cluster.control_plane import ControlPlane
from sharding.cluster.control_plane import TopologyOptions as TopologyOptions
from sharding.cluster.futures import TopologyFutures, same_answer
from sharding.cluster.management import ClusterView, management_api
from sharding.cluster.plugin_queues import FoundShards, Sharded, find_shards, sharded_names
from sharding.cluster.provisioner import Ensured, Forgotten
from sharding.errors import InvalidInput, StaleMap, Unreachable, UnsupportedFormat, WarrenError
from sharding.maps.consumer_spread import least_consumers
from sharding.maps.differences import state_difference
from sharding.maps.map_log import MAP, Entry, State
from sharding.maps.naming import check_logical_name
from sharding.maps.policy import Policy, policy_for
from sharding.maps.shard_map import Node, ShardMap
from sharding.maps.state_file import StateFile, left_to_take_in, with_next
from sharding.metrics.names import Subject

logger = logging.getLogger("warren.topology")
T = TypeVar("T")

Listener = Callable[[State, State], None]

_GRACE = 2.0

_COUNTED = ("connects", "failed_connects", "disconnects", "refreshes", "map_changes")


class Topology:
    """The shard maps that all clients of the cluster agree on.

    `urls` are AMQP URLs of one cluster, tried in turn. `management_urls` let it see which nodes
    there are and where queues really live; user and password are those of the AMQP URL unless
    given in them. With `maps` there is no log: the maps are these, for ever.
    """

    counted_as = Subject("topology")

    def __init__(
        self,
        *urls: str,
        management_urls: Sequence[str] = (),
        maps: Iterable[ShardMap] | None = None,
        options: TopologyOptions | None = None,
    ) -> None:
        if not urls:
            raise InvalidInput("urls", "must name one broker at least", urls)
        self.options = options or TopologyOptions()
        self._fixed = None if maps is None else _fixed_state(maps)
        self.claims = Claims()
        self.kept = KeptMessages()
        self._homes: tuple[State | None, dict[str, str]] = (None, {})
        self._listeners: list[Listener] = []
        self._once_sharded: set[str] = set()
        self._closed = False
        parameters = of_one_cluster(urls)
        apis = [management_api(url, parameters[0]) for url in management_urls]
        view = ClusterView(apis, self.options.management_timeout)
        self._loop = asyncio.new_event_loop()
        self.vhost: str = parameters[0].virtual_host
        self._urls, self._view = urls, view
        self._plane: ControlPlane
        self.futures: TopologyFutures
        """What this is asked and told, for those who may not block."""
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="warren-topology", daemon=True
        )
        self._thread.start()
        if (problem := started.exception()) is not None:
            self._thread.join()
            raise problem

    def __enter__(self) -> Topology:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        places = ", ".join(f"{p.host}:{p.port}" for p in map(pika.URLParameters, self._urls))
        return f"<Topology {places}, epoch {self._plane.log.state.epoch}>"

    def close(self, timeout: float = 5.0) -> None:
        """Stop the control plane. The application's own connections are not touched."""
        if self._closed:
            return
        self._closed = True
        self.futures.close()
        stopping = asyncio.run_coroutine_threadsafe(self._plane.stop(), self._loop)
        stopping.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        if threading.current_thread() is self._thread:
            return  # a listener closes it; the thread ends when that has returned
        try:
            stopping.result(timeout)
        except concurrent.futures.TimeoutError:
            logger.warning("the control plane did not stop within %g s", timeout)
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)

    # Reading

    @property
    def state(self) -> State:
        """All policies and maps, no staler than the bound."""
        if self._fixed is not None:
            return self._fixed
        plane = self._plane
        if plane.validated_at is None:
            self.wait_until_ready(self.options.start_timeout)
        if plane.log.failure is not None:
            raise plane.log.failure
        assert plane.validated_at is not None
        age = time.monotonic() - plane.validated_at
        if age > self.options.max_staleness:
            raise StaleMap(
                f"the shard maps could not be checked for {age:.0f} s, at most "
                f"{self.options.max_staleness:g} s are allowed (max_staleness): {plane.problem}"
            )
        return plane.log.state

    @property
    def is_ready(self) -> bool:
        """Whether the log has been read once: from then on no question for a map waits."""
        return self._fixed is not None or self._plane.validated_at is not None

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the log has been read once; `Unreachable` says why it was not."""
        if not self.is_ready:
            self._wait(self.futures.ready(timeout), timeout)

    def shard_map(self, logical: str) -> ShardMap | None:
        state = self.state
        found = state.maps.get(logical)
        if found is None and state.frozen and (why := state.frozen.get(Entry(MAP, logical))):
            raise UnsupportedFormat(why)  # it has a map, which this process can't read
        return found

    def may_drop(self, exchange: str, routing_key: str) -> bool:
        """Whether the broker may confirm a plain publish there and drop it.

        A name whose map has gone may have left its exchange, which routes no key of the
        application. And there is no queue of a sharded name that the default exchange could reach.
        """
        if exchange:
            return exchange in self._once_sharded
        return routing_key in (self._fixed or self._plane.log.state).maps

    def policy_for(self, logical: str) -> Policy | None:
        return policy_for(logical, self.state.policies.values())

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(old, new)` on the control plane's thread at each change; returns undo."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            with suppress(ValueError):  # undone before
                self._listeners.remove(listener)

        return unsubscribe

    @property
    def counters(self) -> Mapping[str, float]:
        """What the control plane has been doing, and how things are now; asks nobody."""
        plane = self._plane
        state = self._fixed or plane.log.state
        now = {"epoch": state.epoch, "shards_away": len(plane.away)}
        now |= {"nodes_down": len(plane.down_nodes), "logical_queues": len(state.maps)}
        counts = dict.fromkeys(_COUNTED, 0) | plane.counts.copy() | now
        if plane.validated_at is not None:
            return counts | {"map_age_seconds": time.monotonic() - plane.validated_at}
        return counts

    def refresh(self, timeout: float = 5.0) -> None:
        if self._fixed is None:
            self._wait(self.futures.refresh(timeout), timeout)

    # Nodes and shards

    def connection_parameters(self, node: str) -> Sequence[pika.ConnectionParameters]:
        maps = self.state.maps.values()
        known = [each for found in maps for each in found.nodes if each.name == node]
        addresses = dict.fromkeys(address for each in known for address in each.addresses)
        return self._plane.parameters_for(Node(node, tuple(addresses))) if known else []

    def consumer_counts(self, shards: Iterable[str]) -> dict[str, int | None]:
        """Consumers of each shard now; None where it did not answer, left out where it is gone."""
        return self._wait(self.futures.consumer_counts(shards), self.options.answer_timeout)

    def look_at(self, queues: Iterable[str]) -> dict[str, Declared | None]:
        """Messages and consumers of each queue; None where it did not answer in time."""
        return self._wait(self.futures.look_at(queues), self.options.answer_timeout)

    def nodes(self) -> list[Node]:
        """Every node that a map knows."""
        found = {
            node.name: node for shard_map in self.state.maps.values() for node in shard_map.nodes
        }
        return list(found.values())

    def unavailable(self, shard: str) -> bool:
        plane = self._plane
        if shard in plane.away:
            return True
        return bool(plane.down_nodes) and self._node_of(shard) in plane.down_nodes

    def _node_of(self, shard: str) -> str | None:
        state = self._fixed or self._plane.log.state
        if self._homes[0] is not state:
            self._homes = (
                state,
                {each.name: each.node for known in state.maps.values() for each in known.shards},
            )
        return self._homes[1].get(shard)

    def suspect(self, shard: str) -> None:
        """Have a shard checked. A hint and nothing more, so it never raises."""
        state = self._fixed or self._plane.log.state
        for shard_map in state.maps.values():
            for each in shard_map.shards:
                if each.name == shard:
                    with suppress(RuntimeError):  # closed
                        self._loop.call_soon_threadsafe(self._plane.away.suspect, each, shard_map)

    # Changing

    def change(self, step: Callable[[State], State | None]) -> State:
        """Append what `step` makes of the newest state; asked again if somebody was faster."""
        return self.result(self.futures.change(step))

    def set_policy(self, policy: Policy) -> State:
        return self.result(self.futures.set_policy(policy))

    def clear_policy(self, name: str) -> State:
        return self.change(
            lambda state: state.without_policy(name) if name in state.policies else None
        )

    def ensure(self, logical: str) -> Ensured:
        """Make the shards of a logical queue be what its policy says, and record where they are."""
        return self.result(self.futures.ensure(logical))

    def find_shards(self, logical: str) -> FoundShards:
        """The queues in the broker that are named as shards of `logical`, the plugin's say."""
        check_logical_name(logical)
        self._prove_management()
        return find_shards(self._view, self.vhost, logical)

    def find_sharded(self) -> Sharded:
        """The names that are sharded by what is in the broker, whatever the log says."""
        self._prove_management()
        queues, bindings = (
            self._view.ask("GET", kind, self.vhost) for kind in ("queues", "bindings")
        )
        return sharded_names(queues, bindings)

    def _prove_management(self) -> None:
        options = self.options
        self._wait(self.futures.proved(), options.start_timeout + options.management_timeout)

    def take_in(self, file: StateFile) -> int:
        """Put a file's policies and maps into a new log; how many were not there yet."""
        count = 0

        def step(state: State) -> State | None:
            nonlocal count
            left = left_to_take_in(state, file)
            after = with_next(state, left)
            count = max(count, len(left))
            return after if left else None

        while left_to_take_in(self.change(step), file):
            pass
        return count

    def adopt(self, found: FoundShards) -> Ensured:
        """Take queues that exist into a map, with their names and messages."""
        self.set_policy(found.policy())
        return self.result(self.futures.ensure(found.logical, found.shards))

    def ensure_all(self) -> list[Ensured]:
        """The same for every logical queue that is sharded; the first failure is raised last."""
        done, failure = [], None
        for logical in sorted(self.state.maps):
            try:
                done.append(self.result(self.futures.ensure(logical, only_sharded=True)))
            except Forgotten as error:
                logger.info("%s", error)
            except WarrenError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return done

    def forget(self, logical: str) -> State:
        """Stop sharding a name. Its queues and their messages stay where they are."""
        return self.result(self.futures.forget(logical))

    def result(self, future: Future[T]) -> T:
        """Wait for one of `futures`."""
        return self._wait(future, self.options.change_timeout)

    # The thread

    def _run(self, started: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._start, started)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_end_of_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _start(self, started: Future[None]) -> None:
        """What fails here, as an option that can't be used, is raised to who makes the topology."""
        has_log = self._fixed is None
        try:
            self._plane = ControlPlane(
                self._urls, self._view, self.options, self._on_change, has_log
            )
            self.futures = TopologyFutures(self._plane, self._loop, self.vhost, has_log)
            self._plane.start()
        except BaseException as error:
            self._loop.stop()
            started.set_exception(error)
        else:
            started.set_result(None)

    def _on_change(self, old: State, new: State) -> None:
        self._plane.counts["map_changes"] += 1
        self._once_sharded |= old.maps.keys() - new.maps.keys()
        # What was there before this process is no news, though it is read record by record.
        level = logging.DEBUG if self._plane.validated_at is None else logging.INFO
        if logger.isEnabledFor(level):
            for sentence in state_difference(old, new):
                logger.log(level, "%s", sentence)
        for listener in list(self._listeners):
            try:
                listener(old, new)
            except BaseException:  # an exit too would end the thread, and with it every answer
                logger.exception("a listener of the topology failed")

    def _wait(self, future: Future[T], timeout: float) -> T:
        if threading.current_thread() is self._thread:
            future.cancel()
            raise Unreachable("a listener of the topology can't wait for the topology")
        # It has a deadline of its own, on a thread that a listener may hold up.
        timeout += _GRACE
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise self.futures.late(timeout) from None


async def _end_of_tasks() -> None:
    """End what is still asked, whoever waited for it."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _fixed_state(maps: Iterable[ShardMap]) -> State:
    by_name = {shard_map.logical: shard_map for shard_map in maps}
    return State(max((m.epoch for m in by_name.values()), default=0), {}, by_name)


class Routing(Protocol):
    """The view of a `Topology` that channels and publishers work with. Safe from any thread."""

    def shard_map(self, logical: str) -> ShardMap | None:
        """The map in force, or None if the name is not sharded. Never waits for the network.

        Raises `StaleMap` if the map could not be checked for longer than the bound.
        """

    def connection_parameters(self, node: str) -> Sequence[pika.ConnectionParameters]:
        """How to connect to a node, the best way first; empty if no address is known."""

    def unavailable(self, shard: str) -> bool:
        """Whether the shard is known to be away at this moment."""

    def suspect(self, shard: str) -> None:
        """Say that a publish to the shard failed: it is checked at once, and until it is back."""

    def refresh(self, timeout: float) -> None:
        """Read the map log up to its end; for whoever finds that its map may be old."""


class Claims:
    """Consumers of this process that are on their way and in no count yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()

    def choose(self, counts: Mapping[str, int | None]) -> str | None:
        with self._lock:
            shard = least_consumers(counts, self._counter)
            if shard is not None:
                self._counter[shard] += 1
            return shard

    def settle(self, shard: str) -> None:
        """The consumer has arrived, or never will."""
        with self._lock:
            self._counter[shard] -= 1


Begins = Callable[[], None]


class KeptMessages:
    """What this process has to know of messages that the broker keeps, as no shard was known.

    Names are left behind by channels that published there without a map, and then closed. Whoever
    publishes there next has all that is kept brought first: a thread that goes on with another
    channel must not overtake itself.
    """

    MOST = 10_000

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._marks: OrderedDict[str, object] = OrderedDict()
        self._waiting: dict[str, Future[int]] = {}

    def bring_once(self, name: str, start: Callable[[Begins], Future[int]]) -> Future[int]:
        """Start to bring what is kept, or share what was started and has not begun to.

        Until it calls `begins`, whatever is kept by now is still before it. Each caller has a
        future of his own: one who gives up must not end what others wait for.
        """
        with self._lock:
            waiting = self._waiting.get(name)
            if waiting is None:
                waiting = self._waiting[name] = start(lambda: self._no_more(name))
                waiting.add_done_callback(lambda ended: self._no_more(name, ended))
        return same_answer(waiting)

    def _no_more(self, name: str, ended: Future[int] | None = None) -> None:
        """Nobody more may share it; of one that has `ended`, its successor is left alone."""
        with self._lock:
            if ended is None or self._waiting.get(name) is ended:
                self._waiting.pop(name, None)

    def leave(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._marks.pop(name, None)
                self._marks[name] = object()
            while len(self._marks) > self.MOST:
                self._marks.popitem(last=False)

    def mark(self, name: str) -> object | None:
        """Stands for all that was left until now; None if nothing was, or all of it is brought."""
        return self._marks.get(name)

    def brought(self, name: str, mark: object | None) -> None:
        """What was left until the mark was read is in its shards; there may be more by now."""
        with self._lock:
            if mark is not None and self._marks.get(name) is mark:
                del self._marks[name]
