"""How a connection is opened: dialled, and led through the handshake before its deadline."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sharding
from sharding.errors import TryLater, Unreachable
from sharding.stream.connections.outgoing import Outgoing
from sharding.stream.connections.transport import Transport, dial
from sharding.stream.errors import ConnectionLost, code_name
from sharding.stream.protocol.constants import Broker, Limits
from sharding.stream.protocol.events import ClosedByPeer, Event, Opened, ToSend
from sharding.stream.protocol.frames import WireLog, wire_log
from sharding.stream.protocol.handshake import Login
from sharding.stream.protocol.session import Connection


@dataclass(frozen=True)
class ConnectOptions:
    """How to connect, and how long to wait."""

    login: Login = field(default_factory=Login)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    """What the certificate must be for; by default the host dialled."""
    limits: Limits = field(default_factory=Limits)
    heartbeat: float = 60
    """Seconds, whole ones on the wire. The lower of both sides holds; a connection silent for
    twice as long is dead. 0 leaves it to the broker."""
    connect_timeout: float = 5
    """For the name, TCP, TLS and the handshake together. Brokers take 3 s to refuse a password."""
    request_timeout: float = 10
    connection_name: str = "warren"
    """What the management UI shows."""


@dataclass(frozen=True)
class OpenConnection:
    """What an open connection is made of."""

    connection: Connection
    transport: Transport
    outgoing: Outgoing
    log: WireLog | None
    opened: Opened
    early: Sequence[Event]
    """What arrived together with the end of the handshake."""


def open_connection(
    address: Broker, options: ConnectOptions, clock: Callable[[], float] = time.monotonic
) -> OpenConnection:
    deadline = clock() + options.connect_timeout
    log = wire_log(str(address), os.environ)
    connection = Connection(
        options.login,
        options.limits,
        options.heartbeat,
        {
            "product": "Warren",
            "version": sharding.__version__,
            "platform": "Python",
            "connection_name": options.connection_name,
        },
        log.received if log else None,
    )
    transport = dial(address, deadline, options.tls, options.server_name, clock)
    try:
        outgoing = Outgoing(transport, clock)
        opened, early = _shake_hands(connection, transport, outgoing, log, deadline, clock)
    except (ConnectionLost, TimeoutError, TryLater) as error:
        transport.close()
        raise Unreachable(
            f"no connection to {address}: {error}, where {connection.awaited} was due"
        ) from error
    except BaseException:
        transport.close()
        raise
    return OpenConnection(connection, transport, outgoing, log, opened, early)


def _shake_hands(
    connection: Connection,
    transport: Transport,
    outgoing: Outgoing,
    log: WireLog | None,
    deadline: float,
    clock: Callable[[], float],
) -> tuple[Opened, Sequence[Event]]:
    def send(frame: bytes) -> None:
        if log:
            log.sent([frame])
        outgoing.send([frame], deadline)

    send(connection.begin())
    while True:
        events = connection.received(_receive(connection, transport, deadline, clock))
        for number, event in enumerate(events, start=1):
            if isinstance(event, ToSend):
                send(event.frame)
            elif isinstance(event, ClosedByPeer):
                raise ConnectionLost(closed_by_peer(event))
            elif isinstance(event, Opened):
                return event, events[number:]


def _receive(
    connection: Connection, transport: Transport, deadline: float, clock: Callable[[], float]
) -> int:
    while True:
        count = transport.receive_into(connection.buffer())
        if count == 0:
            raise ConnectionLost("the peer ended the connection")
        left = deadline - clock()
        if left <= 0:  # A peer that sends drop by drop is not waited for either.
            raise TimeoutError("the time is up")
        if count is not None:
            return count
        transport.wait(left, to_receive=True)


def closed_by_peer(event: ClosedByPeer) -> str:
    return f"the peer closed the connection: {event.reason or code_name(event.code)}"
