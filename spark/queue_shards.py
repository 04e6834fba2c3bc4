"""Queue shards as a target: the map from the driver, confirmed publishing in the tasks.

The driver reads the map log once for each batch and ships the map, so all tasks of a batch agree
on it, and no executor has to read the log. A map that changes while a task runs is used from the
next batch on; a shard that is taken away meanwhile makes the task fail, and loses nothing.

A process keeps its publisher, with its connections, from task to task, until a task fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pika

from interceptors import Report, ShardedPublisher
from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput, OutcomeUnknown
from sharding.maps.shard_map import ShardKind, ShardMap
from spark.credentials import Credentials
from spark.kept import Kept
from spark.messages import Fields, Messages, in_utc
from spark.write_options import WriteOptions

PERSISTENT = 2
CLOSE_TIMEOUT = 2.0


class RowsNotStored(OutcomeUnknown):
    """Some rows of a task are not known to be stored, so the task has failed."""

    def __init__(self, report: Report) -> None:
        first = report.not_stored[0] if report.not_stored else None
        detail = f"; the first: row {first.number}, {first.reason}" if first else ""
        super().__init__(f"not every row of the task is stored ({report}){detail}")


@dataclass(frozen=True)
class Broker:
    """Where to log in."""

    uris: tuple[str, ...]
    credentials: Credentials

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
        self.publisher.close(CLOSE_TIMEOUT)
        self.topology.close(CLOSE_TIMEOUT)


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

    def __init__(self, publisher: ShardedPublisher, options: WriteOptions) -> None:
        self._publisher = publisher
        self._options = options

    def send(self, messages: Messages) -> None:
        publish, timeout = self._publisher.publish, self._options.confirm_timeout
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
        """Wait for every outcome; how many rows are stored, or `RowsNotStored`."""
        report = self._publisher.flush(self._options.flush_timeout)
        if not report.all_stored:
            raise RowsNotStored(report)
        return report.stored


def basic_properties(properties: Fields | None, headers: Fields | None) -> pika.BasicProperties:
    """AMQP 0-9-1's properties; persistent unless a row says otherwise."""
    named = {name: value for name, value in (properties or {}).items() if value is not None}
    moment = named.pop("creation_time", None)
    if moment is not None:
        named["timestamp"] = int(in_utc(moment).timestamp())
    user = named.get("user_id")
    if isinstance(user, bytes | bytearray):
        named["user_id"] = user.decode()
    named.setdefault("delivery_mode", PERSISTENT)
    try:
        return pika.BasicProperties(headers=dict(headers) if headers else None, **named)
    except TypeError:
        raise InvalidInput("properties", "must be named as AMQP's are", sorted(named)) from None


def _connect(key: PublisherKey) -> Link:
    shard_map = ShardMap.loads(key.map_text)
    topology = Topology(*key.broker.urls(), maps=[shard_map])
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


_links: Kept[PublisherKey, Link] = Kept(_connect, Link.close, _is_spoilt)
_topologies: Kept[Broker, Topology] = Kept(
    lambda broker: Topology(*broker.urls()),
    lambda topology: topology.close(CLOSE_TIMEOUT),
    lambda error: not isinstance(error, InvalidInput),
)
