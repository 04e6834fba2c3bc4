"""What each role needs of the broker's permissions: the one table. Pure.

A user has three patterns in a virtual host, of the names that he may configure, write and read; a
queue, a stream and an exchange of one name are one to them. Each need here was found by granting
nothing and adding what a real broker refused. Those that only some brokers check are marked.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sharding.errors import InvalidInput
from sharding.maps.map_log import LOG, NOTES
from sharding.maps.naming import REFUSED, ShardName, check_logical_name, shards_exchange, unrouted

DEFAULT_EXCHANGE = "amq.default"
GENERATED = "amq.gen-"


class Right(StrEnum):
    CONFIGURE = "configure"
    WRITE = "write"
    READ = "read"


ALL = tuple(Right)


class Role(StrEnum):
    PRODUCER = "producer"
    """Publishes: wrapped channels, publishers, stream producers."""
    CONSUMER = "consumer"
    """Reads: wrapped channels, stream consumers, ranges."""
    WORKER = "worker"
    """Takes part in consumer groups."""
    OPERATOR = "operator"
    """Sets policies, makes and removes shards and streams: `warren policy`, `warren shards`."""
    SPARK = "spark"
    """A Spark job: sinks to queue shards and streams, and sources."""
    MONITOR = "monitor"
    """Looks: `warren topology`, a page, an exporter of metrics."""


TAGGED = frozenset({Role.OPERATOR, Role.MONITOR})
"""Roles that see which nodes there are: by the tag monitoring, and the management API."""


@dataclass(frozen=True, slots=True)
class Need:
    """One right on names of one kind."""

    right: Right
    pattern: str
    """Of the names, as permissions have it."""
    name: str
    """One of them, to try it with."""
    purpose: str


def needs(role: Role, queues: Iterable[str] = (), streams: Iterable[str] = ()) -> tuple[Need, ...]:
    """All rights of a role on logical queues and on streams or super streams."""
    of_queue, of_stream = _TABLE[role]
    found = [
        *(need for name in queues for need in of_queue(check_logical_name(name))),
        *(need for name in streams for need in of_stream(check_logical_name(name))),
    ]
    if not found:
        raise InvalidInput("role", "needs the name of a queue or a stream to be of use", str(role))
    return tuple(dict.fromkeys(found))


def command(user: str, vhost: str, wanted: Sequence[Need]) -> str:
    """The line that grants just that.

    >>> command("shop", "/", needs(Role.MONITOR, ["images"]))
    "rabbitmqctl set_permissions -p / shop '^$' '^$' '^warren\\\\.shard-maps$'"
    """
    words = ["rabbitmqctl", "set_permissions", "-p", vhost, user]
    return shlex.join([*words, *(patterns(wanted)[right] for right in Right)])


def patterns(wanted: Iterable[Need]) -> dict[Right, str]:
    """By right, the pattern of all names; one that nothing matches where there are none."""
    named = {right: [need.pattern for need in wanted if need.right is right] for right in Right}
    return {right: _any_of(dict.fromkeys(found)) for right, found in named.items()}


def _any_of(found: Iterable[str]) -> str:
    names = list(found)
    return f"^({'|'.join(names)})$" if len(names) > 1 else f"^{''.join(names)}$"


_SPECIAL = frozenset(r".^$*+?()[]{}|\\")


def exactly(name: str) -> str:
    """
    >>> exactly("warren.shard-maps")
    'warren\\\\.shard-maps'
    """
    return "".join(f"\\{each}" if each in _SPECIAL else each for each in name)


def _on(rights: Iterable[Right], purpose: str, name: str, pattern: str | None = None) -> list[Need]:
    return [
        Need(right, exactly(name) if pattern is None else pattern, name, purpose)
        for right in rights
    ]


R, W, C = [Right.READ], [Right.WRITE], [Right.CONFIGURE]
_KNOW = _on(R, "know the shards", LOG)
_WHERE = _on(W, "find out which node a connection is on, behind a balancer", DEFAULT_EXCHANGE)


def _shards(rights: Iterable[Right], purpose: str, queue: str) -> list[Need]:
    name = str(ShardName(queue, "warren@doctor", 0))
    return _on(rights, purpose, name, f"sharding: {exactly(queue)} - .*")


def _partitions(rights: Sequence[Right], purpose: str, stream: str) -> list[Need]:
    pattern = f"{exactly(stream)}(-.*)?"
    both = (stream, f"{stream}-0")
    return [need for name in both for need in _on(rights, purpose, name, pattern)]


def _publish(queue: str) -> list[Need]:
    return [
        *_KNOW,
        *_WHERE,
        *_on(W, "publish", queue),
        *_on(W, "publish where that name was taken before", f"warren: {queue}"),
        *_on(R, "bring what was published before the shards were known", unrouted(queue)),
    ]


def _consume(queue: str) -> list[Need]:
    return [*_KNOW, *_WHERE, *_shards(R, "consume", queue)]


def _work(queue: str) -> list[Need]:
    group = f"warren.group.{queue}"
    own = f"{GENERATED}doctor", f"{exactly(GENERATED)}.*"
    return [
        *_consume(queue),
        *_on(W, "note what a worker has to note", NOTES),
        *_on(ALL, "meet the other workers", group),
        *_on(ALL, "hear the other workers", *own),
        *_on(C, "make the queue of dead letters", f"{queue}.dead"),
    ]


def _operate(queue: str) -> list[Need]:
    behind = [queue, f"warren: {queue}", shards_exchange(queue), unrouted(queue)]
    return [
        *_on(ALL, "make the map log, and change policies and maps", LOG),
        *_on(ALL, "make the map log", NOTES),
        *(need for name in behind for need in _on(ALL, "make the exchanges of a queue", name)),
        *_on(ALL, "make queues that refuse", REFUSED, f"{exactly(REFUSED)}.*"),
        *_shards(ALL, "make shards", queue),
        *_WHERE,
        *_on(C, "prove a management API", f"{GENERATED}doctor", f"{exactly(GENERATED)}.*"),
    ]


def _publish_to_streams(stream: str) -> list[Need]:
    return [
        *_partitions(W, "publish", stream),
        *_partitions(R, "ask for the last publishing id of a named producer", stream),
    ]


def _read_streams(stream: str) -> list[Need]:
    return _partitions(R, "read, and store offsets", stream)


def _work_on_streams(stream: str) -> list[Need]:
    return [
        *_read_streams(stream),
        *_on(ALL, "meet the other workers", f"warren.group.{stream}"),
        *_on([Right.CONFIGURE, Right.WRITE], "store dead letters", f"{stream}.dead"),
    ]


def _operate_streams(stream: str) -> list[Need]:
    return _partitions(ALL, "make and delete streams", stream)


Needs = Callable[[str], list[Need]]
_TABLE: dict[Role, tuple[Needs, Needs]] = {
    Role.PRODUCER: (_publish, _publish_to_streams),
    Role.CONSUMER: (_consume, _read_streams),
    Role.WORKER: (_work, _work_on_streams),
    Role.OPERATOR: (_operate, _operate_streams),
    Role.SPARK: (_publish, _publish_to_streams),
    Role.MONITOR: (lambda _: list(_KNOW), _read_streams),
}
