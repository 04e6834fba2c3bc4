"""The world that the script plays in: a cluster, its shards, and an observer that is never wrapped.

The observer is a raw pika connection per node. It puts messages into shards, counts consumers,
takes everything out again, and sets right what a scenario broke. It speaks of shards only by their
real names, which the plugin leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from sharding.maps.naming import shards_exchange
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE
from tests.conformance import recorded, values
from tests.conformance.callers import CALLERS, Caller, Wrap
from tests.conformance.values import Transcript, Value
from tests.support import patient

LOGICAL = "images"
SHARDS_PER_NODE = 2
KIND_OF_EXCHANGE = "x-modulus-hash"

Scenario = Callable[["Stage"], Transcript]
Session = Callable[[], AbstractContextManager[Wrap]]
"""A process's own state, new for each scenario: how it wraps its channels while it lasts."""


@dataclass(frozen=True)
class Shard:
    name: str
    node: Node
    bindings: tuple[tuple[str, Mapping[str, Any]], ...]
    """Routing key and arguments of each binding to the exchange of the shards."""


@dataclass
class Stage:
    """One cluster with the sharded exchange `images`, and one kind of channel to use it with."""

    cluster: Cluster
    kind: str
    session: Session
    set_up: Callable[[Wrap], None]
    """Make the exchange, and let its shards come to be."""
    declare_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the application declares the exchange with: the plugin takes a policy instead."""
    declare_patience: float = PATIENCE
    """How long declaring the logical queue may take before it counts as hanging."""
    bound_to: str = LOGICAL
    """The exchange that shards are bound to."""
    _wrap: Wrap = field(init=False)
    _is_whole: bool = False
    _observers: dict[str, pika.BlockingConnection] = field(default_factory=dict)
    _shards: list[Shard] = field(default_factory=list)

    @property
    def nodes(self) -> list[Node]:
        return self.cluster.nodes

    def play(self, scenario: Scenario) -> Transcript:
        """Run one scenario on a whole and empty stage."""
        try:
            with self.session() as self._wrap:
                if not self._is_whole:
                    self.make_whole()
                return self._as_recorded(scenario(self))
        finally:
            # The next session must not begin by learning of our damage.
            self._is_whole = bool(self._shards) and self._exchange_exists()
            if self._is_whole:
                self.make_whole()
            self.close()

    def caller(self, node: int = 0, *, confirms: bool = False) -> Caller:
        """An application connected to that node."""
        url = self.nodes[node].endpoint.amqp_url
        return CALLERS[self.kind](url, self._wrap, confirms=confirms)

    def seen_from(self, node: int, value: Value) -> Value:
        """The value with the nodes' names replaced, as an application on that node sees them."""
        names = {
            each.name: "<connected>" if each is self.nodes[node] else "<other>"
            for each in self.nodes
        }
        return values.normalised(value, names)

    def _as_recorded(self, transcript: Transcript) -> Transcript:
        """The transcript with the virtual host's name as where it was recorded."""
        names = {f"vhost '{self.cluster.vhost}'": "vhost '/'"}
        return {label: values.normalised(seen, names) for label, seen in transcript.items()}

    # What the observer sees.

    def shards(self, node: int | None = None) -> list[str]:
        """The names of all shards, or of those on one node."""
        return [
            shard.name for shard in self._shards if node is None or shard.node is self.nodes[node]
        ]

    def consumers(self, node: int | None = None) -> Value:
        """How many consumers each shard has: all shards, or those of one node."""
        channel = self._observer(self.nodes[0])
        counts: dict[str, Value] = {}
        for name in self.shards(node):
            counts[name] = int(channel.queue_declare(name, passive=True).method.consumer_count)
        channel.close()
        return counts

    def exists(self, queue: str) -> bool:
        return self._found(lambda channel: channel.queue_declare(queue, passive=True))

    def _found(self, ask: Callable[[BlockingChannel], object]) -> bool:
        channel = self._observer(self.nodes[0])
        try:
            ask(channel)
        except ChannelClosedByBroker as refused:
            if refused.reply_code != 404:
                raise
            return False
        channel.close()
        return True

    def depth(self, queue: str) -> int:
        channel = self._observer(self.nodes[0])
        count = int(channel.queue_declare(queue, passive=True).method.message_count)
        channel.close()
        return count

    def depth_and_consumers(self, queue: str) -> Value:
        channel = self._observer(self.nodes[0])
        method = channel.queue_declare(queue, passive=True).method
        channel.close()
        return {"messages": int(method.message_count), "consumers": int(method.consumer_count)}

    def bindings(self, queue: str) -> int:
        """How many bindings a queue has to the exchange of the shards."""
        return len(_keys(self.nodes[0], queue, self.bound_to))

    def put(self, queue: str, *bodies: str) -> None:
        """Put messages straight into a queue; returns when they are in it."""
        channel = self._observer(self.nodes[0])
        channel.confirm_delivery()
        for body in bodies:
            channel.basic_publish("", queue, body.encode(), mandatory=True)
        channel.close()

    def take(self, queue: str) -> list[dict[str, Value]]:
        """Everything that lies in a queue."""
        channel = self._observer(self.nodes[0])
        taken = []
        while True:
            method, properties, body = channel.basic_get(queue, auto_ack=True)
            if method is None or properties is None or body is None:
                break
            taken.append(values.message(method, properties, body))
        channel.close()
        return taken

    def take_all(self) -> dict[str, list[dict[str, Value]]]:
        return {name: self.take(name) for name in self.shards()}

    def wait_for_messages(self, count: int) -> bool:
        """Whether that many messages come to lie in the shards."""
        try:
            wait_until(lambda: sum(map(self.depth, self.shards())) >= count)
        except TimeoutError:
            return False
        return True

    # What the observer does.

    def delete(self, queue: str) -> None:
        channel = self._observer(self.nodes[0])
        channel.queue_delete(queue)
        channel.close()

    def make_whole(self) -> None:
        """The exchange, every shard where it was, every binding, and nothing in any queue."""
        if not self._exchange_exists() or not self._shards:
            self._set_up_until_whole()
            self._shards = self._shards or self._bound_shards()
        for shard in self._shards:
            channel = self._observer(shard.node)
            channel.queue_declare(shard.name, durable=True)
            channel.queue_purge(shard.name)
            for key, arguments in shard.bindings:
                channel.queue_bind(shard.name, self.bound_to, key, arguments)
            channel.close()
        wait_until(
            lambda: not any(_counts(self.consumers())),
            explain=lambda: f"consumers of the last scenario are left: {self.consumers()}",
        )

    def _set_up_until_whole(self) -> None:
        """Set up, and again if need be.

        On a cluster that has just booted the plugin once left out one node of three, and never
        came back to it: 4 shards of 6, until the policy changed.
        """
        expected = len(self.nodes) * SHARDS_PER_NODE

        def came_to_be() -> bool:
            self.set_up(self._wrap)
            try:
                # Shards are made one by one, each queue before its binding.
                wait_until(lambda: len(self._bound_shards()) == expected, 5)
            except TimeoutError:
                return False
            return True

        wait_until(
            came_to_be,
            explain=lambda: f"{expected} shards of {LOGICAL} wanted, found {self._shards_now()}",
        )

    def close(self) -> None:
        for connection in self._observers.values():
            if connection.is_open:
                connection.close()
        self._observers.clear()

    def _observer(self, node: Node) -> BlockingChannel:
        connection = self._observers.get(node.name)
        if connection is None or not connection.is_open:
            connection = pika.BlockingConnection(patient.parameters(node.endpoint.amqp_url))
            self._observers[node.name] = connection
        return connection.channel()

    def _exchange_exists(self) -> bool:
        return self._found(lambda channel: channel.exchange_declare(LOGICAL, passive=True))

    def _shards_now(self) -> list[str]:
        names = [
            f"sharding: {LOGICAL} - {node.name} - {index}"
            for node in self.nodes
            for index in range(SHARDS_PER_NODE)
        ]
        return [name for name in names if self.exists(name)]

    def _bound_shards(self) -> list[Shard]:
        bound = []
        for name in self._shards_now():
            bindings = _keys(self.nodes[0], name, self.bound_to)
            node = next(node for node in self.nodes if f" - {node.name} - " in name)
            if bindings:
                bound.append(Shard(name, node, bindings))
        return bound


def wrapped_stage(cluster: Cluster, kind: str, session: Session) -> Stage:
    """A cluster without the plugin, used through a wrapper, which makes the exchange too."""
    arguments = {"x-shards-per-node": SHARDS_PER_NODE}

    def set_up(wrap: Wrap) -> None:
        with CALLERS[kind](cluster.nodes[0].endpoint.amqp_url, wrap) as caller:
            given = caller.declare_exchange(
                LOGICAL, KIND_OF_EXCHANGE, durable=True, arguments=arguments
            )
            if given == values.HANGS or isinstance(given, dict):
                raise RuntimeError(f"the wrapper can't declare the sharded exchange: {given}")

    bound_to = shards_exchange(LOGICAL)
    return Stage(cluster, kind, session, set_up, declare_arguments=arguments, bound_to=bound_to)


def plugin_stage(cluster: Cluster, kind: str) -> Stage:
    """A cluster with the plugin, used by the raw client."""

    def set_up(_: Wrap) -> None:
        node = cluster.nodes[0]
        policy = ("policies", cluster.vhost, "conformance")
        with suppress(ConnectionError):  # there is none yet
            node.management.call("DELETE", *policy, timeout=PATIENCE)
        node.management.call(
            "PUT",
            *policy,
            body={
                "pattern": f"^{LOGICAL}$",
                "definition": {"shards-per-node": SHARDS_PER_NODE},
                "apply-to": "exchanges",
            },
            timeout=PATIENCE,
        )
        with pika.BlockingConnection(patient.parameters(node.endpoint.amqp_url)) as connection:
            connection.channel().exchange_declare(LOGICAL, KIND_OF_EXCHANGE, durable=True)

    def as_it_is(raw: Any) -> Any:
        return raw

    # pika is known to hang here, so waiting longer would only take longer.
    patience = 1.0 if kind in recorded.PIKA else PATIENCE
    return Stage(cluster, kind, lambda: nullcontext(as_it_is), set_up, declare_patience=patience)


def _keys(node: Node, queue: str, exchange: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    return tuple(
        (str(entry["routing_key"]), dict(entry["arguments"]))
        for entry in node.management.get(
            "queues", node.endpoint.vhost, queue, "bindings", timeout=PATIENCE
        )
        if entry["source"] == exchange
    )


def _counts(counts: Value) -> list[Value]:
    return list(counts.values()) if isinstance(counts, dict) else []
