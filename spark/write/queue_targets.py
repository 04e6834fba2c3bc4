"""Queue shards as the place where rows go.

The driver reads the map log once for each batch and ships the map, so all tasks of a batch agree on
it, and no executor has to read the log. A map that changes while a task runs is used from the next
batch on; a shard that is taken away meanwhile makes the task fail, and loses nothing. A process
keeps its publisher, with its connections, from task to task, until a task fails. Tasks may use it
at the same time (threads of the driver do): each has a batch of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import pika

from interceptors import Batch, ShardedPublisher
from sharding.cluster.topology import Topology, TopologyOptions
from sharding.errors import InvalidInput
from sharding.maps.shard_map import ShardKind, ShardMap
from spark.options.connect import ConnectOptions, Credentials
from spark.options.write import WriteOptions
from spark.process import ProcessCache
from spark.write.messages import Fields, Messages, in_utc

CLOSE_TIMEOUT = 2.0
PERSISTENT = 2


@dataclass(frozen=True)
class Broker:
    """Where to log in."""

    uris: tuple[str, ...]
    credentials: Credentials
    trusted_hosts: tuple[str, ...] = ()

    def topology(self, maps: Iterable[ShardMap] | None = None) -> Topology:
        # A map that was read from the log is not the user's own word for the hosts in it.
        hosts = (*(str(urlsplit(uri).hostname) for uri in self.uris), *self.trusted_hosts)
        options = TopologyOptions(trusted_hosts=hosts)
        return Topology(*self.urls(), maps=maps, options=options)

    def urls(self) -> list[str]:
        login = self.credentials.login()
        return [login.into(uri) for uri in self.uris]


@dataclass(frozen=True)
class PublisherKey:
    """All that two tasks must have in common to share a publisher."""

    broker: Broker
    map_text: str = field(repr=False)
    through: Any
    window: int
    confirm_timeout: float


@dataclass(frozen=True)
class Link:
    topology: Topology
    publisher: ShardedPublisher

    def close(self) -> None:
        try:
            self.publisher.close(CLOSE_TIMEOUT)
        finally:
            self.topology.close(CLOSE_TIMEOUT)


def broker_of(connect: ConnectOptions, options: WriteOptions) -> Broker:
    return Broker(options.amqp_uris, connect.credentials, options.trusted_hosts)


def map_of(logical: str, broker: Broker) -> ShardMap:
    """The shard map in force; `InvalidInput` if the queue has none."""
    with _topologies.lend(broker) as topology:
        topology.wait_until_ready(topology.options.start_timeout)  # says so if nobody lets us in
        topology.refresh()
        shard_map = topology.shard_map(logical)
    if shard_map is None or shard_map.kind is not ShardKind.QUEUE:
        rule = "must be sharded: set a policy that matches it (warren policy set)"
        raise InvalidInput("option 'queue'", rule, logical)
    return shard_map


def link(options: WriteOptions, broker: Broker, map_text: str) -> AbstractContextManager[Link]:
    """This process's publisher; whatever fails in the block, the next task gets another one."""
    return _links.lend(
        PublisherKey(
            broker, map_text, options.through, options.max_unconfirmed, options.confirm_timeout
        )
    )


class QueueSender:
    """Publishes the rows of one task."""

    def __init__(self, batch: Batch, options: WriteOptions) -> None:
        self._batch = batch
        self._options = options

    def send(self, messages: Messages) -> None:
        publish, timeout = self._batch.publish, self._options.confirm_timeout
        keys: Sequence[Any] = messages.keys or ()
        if messages.plain:
            for key, body in zip(keys, messages.bodies, strict=True):
                publish(key, body, timeout=timeout)
            return
        nothing: Sequence[None] = (None,) * len(messages)
        for key, body, properties, headers in zip(
            keys,
            messages.bodies,
            messages.properties or nothing,
            messages.headers or nothing,
            strict=True,
        ):
            publish(key, body, basic_properties(properties, headers), timeout=timeout)

    def finish(self) -> int:
        report = self._batch.flush(self._options.flush_timeout)
        report.raise_for_failures()
        return report.stored


def basic_properties(properties: Fields | None, headers: Fields | None) -> pika.BasicProperties:
    """AMQP 0-9-1's properties; persistent unless a row says otherwise."""
    named = {name: value for name, value in (properties or {}).items() if value is not None}
    moment = named.pop("creation_time", None)
    if moment is not None:
        if not isinstance(moment, datetime):
            raise InvalidInput("creation_time", "must be a datetime", moment)
        named["timestamp"] = int(in_utc(moment).timestamp())
    user = named.get("user_id")
    if isinstance(user, bytes | bytearray):
        try:
            named["user_id"] = user.decode()
        except UnicodeDecodeError:
            raise InvalidInput("user_id", "must be text in UTF-8", user) from None
    named.setdefault("delivery_mode", PERSISTENT)
    try:
        return pika.BasicProperties(headers=dict(headers) if headers else None, **named)
    except TypeError:
        raise InvalidInput("properties", "must be named as AMQP's are", sorted(named)) from None


def _connect(key: PublisherKey) -> Link:
    shard_map = ShardMap.loads(key.map_text)
    topology = key.broker.topology([shard_map])
    try:
        publisher = ShardedPublisher(
            topology,
            shard_map.logical,
            window=key.window,
            confirm_timeout=key.confirm_timeout,
            through=key.through,
        )
    except BaseException:
        topology.close(CLOSE_TIMEOUT)
        raise
    return Link(topology, publisher)


def _is_spoilt(_: BaseException) -> bool:
    # Whatever failed the task, the publisher may still have some of its rows on their way.
    return True


_links: ProcessCache[PublisherKey, Link] = ProcessCache(_connect, Link.close, _is_spoilt)
_topologies: ProcessCache[Broker, Topology] = ProcessCache(
    Broker.topology,
    lambda topology: topology.close(CLOSE_TIMEOUT),
    lambda error: not isinstance(error, InvalidInput),
)
