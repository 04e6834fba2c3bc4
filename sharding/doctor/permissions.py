"""Which of configure, write and read this user has, on a scratch name, or on the names that a role
needs: what was tried, judged.

Brokers look at the permission before they look whether the thing is there, and fits. So each right
can be told apart by asking for something that does not exist or can't be: "not found" means that it
is granted. On names of a role nothing is made, bound or read, whether they are there or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pika.exceptions
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from sharding.doctor.findings import SILENCE, Finding, ok, problem, warning
from sharding.doctor.nodes import ClusterSeen
from sharding.doctor.reach import Place, Protocol, amqp_connection, open_stream
from sharding.doctor.roles import DEFAULT_EXCHANGE, GENERATED, Need, Right, Role, command
from sharding.errors import WarrenError
from sharding.maps.map_log import LOG
from sharding.stream.connections.connection import StreamClient
from sharding.stream.errors import AccessRefused, StreamRefused
from sharding.stream.protocol.commands import (
    Create,
    DeclarePublisher,
    Delete,
    DeletePublisher,
    Metadata,
    Request,
    Subscribe,
    Unsubscribe,
)
from sharding.stream.protocol.constants import NEXT, Broker

_NEEDED_FOR = {
    Right.CONFIGURE: "declare and delete queues, streams and exchanges",
    Right.WRITE: "publish, and bind queues",
    Right.READ: "consume, and bind to exchanges",
}


@dataclass(frozen=True)
class Rights:
    """What was found by trying, at one place."""

    place: Place
    scratch: str
    """The name that was tried; gone again."""
    refused: Mapping[Right, str] = field(default_factory=dict)
    """The broker's words for each right that is missing."""
    no_stream_queue: str = ""
    """Why no queue of the type stream could be declared over AMQP, if that is not a permission."""
    map_log: Mapping[Right, str] = field(default_factory=dict)
    """The broker's words for rights on the map log that are missing: to read it, and to change
    maps."""
    failure: str = ""
    """Why it could not be tried."""


def judge_rights(rights: Rights) -> list[Finding]:
    place = rights.place
    subject = f"user {place.user!r} at {place}"
    if rights.failure:
        return [problem("permissions", subject, "an answer", rights.failure, SILENCE)]
    findings = [
        problem(
            "permissions",
            subject,
            f"{right}, to {_NEEDED_FOR[right]}",
            f"refused on {rights.scratch!r}: {rights.refused[right]}",
            f"Run 'rabbitmqctl set_permissions -p {place.vhost} {place.user} CONFIGURE WRITE READ' "
            f"with patterns that match your names and warren.*; {right} does not match now.",
        )
        for right in Right
        if right in rights.refused
    ]
    if not findings:
        wanted = "configure, write and read"
        findings.append(ok("permissions", subject, wanted, f"all three on {rights.scratch!r}"))
    if place.protocol is Protocol.AMQP and Right.CONFIGURE not in rights.refused:
        findings.append(_map_log(place, rights.no_stream_queue))
    return findings + _judge_map_log(rights, subject)


@dataclass(frozen=True)
class TriedNeeds:
    """What a role needs, and what of it was refused."""

    place: Place
    wanted: Sequence[Need]
    refused: Mapping[Need, str] = field(default_factory=dict)
    """The broker's words."""
    failure: str = ""
    """Why it could not be tried."""


def judge_role(role: Role, tried: TriedNeeds) -> list[Finding]:
    place = tried.place
    subject = f"user {place.user!r} as {role}"
    if tried.failure:
        return [problem("permissions", subject, "an answer", tried.failure, SILENCE)]
    if not tried.refused:
        names = len({need.pattern for need in tried.wanted})
        wanted = "all that the role needs"
        return [ok("permissions", subject, wanted, f"all rights on names of {names} kinds")]
    line = command(place.user, place.vhost, tried.wanted)
    fix = f"This grants what the role needs, and no more: {line}"
    return [
        problem(
            "permissions", subject, f"{need.right} on {need.name!r}, to {need.purpose}", why, fix
        )
        for need, why in tried.refused.items()
    ]


def _judge_map_log(rights: Rights, subject: str) -> list[Finding]:
    """Who may not read the log can do nothing; who may not write there can change no map.

    A right that is missing everywhere has been said.
    """
    missing = {right: why for right, why in rights.map_log.items() if right not in rights.refused}
    grant = f"Grant it to a user who shall: 'rabbitmqctl set_permissions -p {rights.place.vhost} …'"
    if Right.READ in missing:
        wanted = f"read on {LOG!r}, to know the shards"
        return [problem("map log", subject, wanted, missing[Right.READ], grant)]
    if Right.WRITE in missing:
        wanted = f"write on {LOG!r}, to change policies and maps"
        return [warning("map log", subject, wanted, missing[Right.WRITE], grant)]
    return []


def _map_log(place: Place, why_not: str) -> Finding:
    wanted = "queues of the type stream: the map log is one"
    if not why_not:
        return ok("map log", str(place), wanted, "one could be declared")
    fix = (
        "Run 'rabbitmqctl enable_feature_flag stream_queue' (it needs every node up and 3.9 or "
        "later); without streams, give Topology its maps from a file."
    )
    return problem("map log", str(place), wanted, why_not, fix)


def judge_monitoring(place: Place, cluster: ClusterSeen) -> list[Finding]:
    """The management API shows nodes to users with the tag monitoring only."""
    wanted = "the tag monitoring, to see the nodes"
    subject = f"user {place.user!r} at {place}"
    if cluster.problem:
        tag = f"Run 'rabbitmqctl set_user_tags {place.user} monitoring' on a node."
        fix = tag if cluster.in_time else SILENCE
        return [problem("permissions", subject, wanted, cluster.problem, fix)]
    return [ok("permissions", subject, wanted, f"{len(cluster.nodes)} nodes are shown")]


_NOT_FOUND = 404
_LISTING_PAUSE = 0.1
_UNSURE_PATIENCE = 2.0
_MANY = 100


def try_amqp(place: Place, scratch: str, timeout: float) -> Rights:
    """Declare, bind, publish and consume."""
    try:
        with amqp_connection(place, timeout) as connection:
            refused = _refusals(connection, scratch)
            no_stream = None
            if Right.CONFIGURE not in refused:
                no_stream = _refusal(connection, lambda channel: _stream_queue(channel, scratch))
            return Rights(
                place, scratch, refused, no_stream or "", _refusals_of_log(connection, scratch)
            )
    except pika.exceptions.AMQPError as error:
        why = f"{type(error).__name__} while {scratch!r} was tried; a part of it may be left"
        return Rights(place, scratch, failure=why)


def _refusals(connection: BlockingConnection, scratch: str) -> dict[Right, str]:
    def declare(channel: BlockingChannel) -> None:
        # Both are gone with the connection, also if this process ends before it removes them.
        channel.queue_declare(scratch, exclusive=True, auto_delete=True)
        channel.exchange_declare(scratch, "direct", auto_delete=True)

    def publish(channel: BlockingChannel) -> None:
        channel.confirm_delivery()
        channel.basic_publish(scratch, "", b"")

    def bind_and_consume(channel: BlockingChannel) -> None:
        # A binding writes to the queue and reads from the exchange.
        if not tried[Right.WRITE]:
            channel.queue_bind(scratch, scratch, "")
        channel.basic_get(scratch, auto_ack=True)

    def remove(channel: BlockingChannel) -> None:
        channel.queue_delete(scratch)
        channel.exchange_delete(scratch)

    tried: dict[Right, str | None] = {}
    tried[Right.CONFIGURE] = _refusal(connection, declare)
    tried[Right.WRITE] = _refusal(connection, publish)
    tried[Right.READ] = _refusal(connection, bind_and_consume)
    _refusal(connection, remove)
    return {right: why for right, why in tried.items() if why}


def try_needs(place: Place, wanted: Sequence[Need], scratch: str, timeout: float) -> TriedNeeds:
    """Ask for each right on each name, in ways that can't succeed."""
    try:
        with amqp_connection(place, timeout) as connection:
            tried = {need: _refusal_of(connection, need, f"{scratch}.nobody") for need in wanted}
    except pika.exceptions.AMQPError as error:
        return TriedNeeds(place, wanted, failure=f"{type(error).__name__} while rights were tried")
    return TriedNeeds(place, wanted, {need: why for need, why in tried.items() if why})


def _refusal_of(connection: BlockingConnection, need: Need, nobody: str) -> str | None:
    def configure(channel: BlockingChannel) -> None:
        # Names with this prefix are the broker's to give.
        ours = need.name.startswith(GENERATED)
        impossible = {"x-message-ttl": -1}
        channel.queue_declare("" if ours else need.name, durable=True, arguments=impossible)

    def write(channel: BlockingChannel) -> None:
        if need.name == DEFAULT_EXCHANGE:
            channel.confirm_delivery()
            channel.basic_publish("", nobody, b"", mandatory=True)
        else:
            channel.exchange_bind(need.name, nobody, "")

    def read(channel: BlockingChannel) -> None:
        impossible = {"x-priority": "none"}
        channel.basic_consume(need.name, lambda *_: None, arguments=impossible)

    ways = {Right.CONFIGURE: configure, Right.WRITE: write, Right.READ: read}
    why = _refusal(connection, ways[need.right])
    # 3.10 does not say which right. But no way but one asks for more than one name.
    shown = f"'{GENERATED}" if need.name.startswith(GENERATED) else f"'{need.name}'"
    return why if why is not None and "access to " in why and shown in why else None


def _refusals_of_log(connection: BlockingConnection, scratch: str) -> dict[Right, str]:
    """Tried by binding it to what does not exist: that writes to one name and reads from the
    other, and binds nothing."""
    nobody = f"{scratch}.nobody"
    tried = {
        Right.WRITE: _refusal(connection, lambda channel: channel.exchange_bind(LOG, nobody, "")),
        Right.READ: _refusal(connection, lambda channel: channel.queue_bind(nobody, LOG, "")),
    }
    return {right: why for right, why in tried.items() if why and f"'{LOG}'" in why}


def _refusal(
    connection: BlockingConnection, action: Callable[[BlockingChannel], object]
) -> str | None:
    """The broker's words, on a channel of its own, which a refusal closes; None if allowed."""
    channel = connection.channel()
    try:
        action(channel)
    except pika.exceptions.ChannelClosedByBroker as error:
        return None if error.reply_code == _NOT_FOUND else error.reply_text
    except (pika.exceptions.NackError, pika.exceptions.UnroutableError):
        return None
    channel.close()
    return None


def _stream_queue(channel: BlockingChannel, scratch: str) -> None:
    name = f"{scratch}.stream"
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    channel.queue_delete(name)


def try_streams(
    place: Place, scratch: str, nodes: int, timeout: float
) -> tuple[Rights, tuple[Broker, ...]]:
    """Create, publish and subscribe; and how the nodes that hold the stream advertise themselves.

    `nodes` is how many should, 0 if that is not known: a new stream's replicas are listed one by
    one, so they are waited for.
    """
    try:
        client = open_stream(place, timeout)
    except WarrenError as error:
        return Rights(place, scratch, failure=str(error)), ()
    try:
        tried = {
            Right.CONFIGURE: _stream_refusal(client, Create(scratch)),
            Right.WRITE: _stream_refusal(client, DeclarePublisher(1, None, scratch)),
            Right.READ: _stream_refusal(client, Subscribe(1, scratch, NEXT, credit=1)),
        }
        patience = timeout if nodes else min(timeout, _UNSURE_PATIENCE)
        most = nodes or _MANY
        advertised = () if tried[Right.CONFIGURE] else _members(client, scratch, most, patience)
        refused = {right: why for right, why in tried.items() if why}
        return Rights(place, scratch, refused), advertised
    except WarrenError as error:
        return Rights(place, scratch, failure=str(error)), ()
    finally:
        with suppress(WarrenError):
            for request in (Unsubscribe(1), DeletePublisher(1), Delete(scratch)):
                with suppress(StreamRefused):
                    client.call(request)
        client.close(timeout)


def _stream_refusal(client: StreamClient, request: Request) -> str | None:  # type: ignore[type-arg]
    try:
        client.call(request)
    except AccessRefused as error:
        return str(error)
    except StreamRefused:  # not found, or no member on this node: it would have been allowed
        return None
    return None


def _members(client: StreamClient, stream: str, nodes: int, timeout: float) -> tuple[Broker, ...]:
    deadline = time.monotonic() + timeout
    while True:
        (found,) = client.call(Metadata((stream,))).streams
        members = [found.leader, *found.replicas]
        known = tuple(dict.fromkeys(each for each in members if each is not None))
        if len(known) >= nodes or time.monotonic() > deadline:
            return known
        time.sleep(_LISTING_PAUSE)
