"""What a broker sends, as bytes, and connections brought to where they can be sent it."""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping
from typing import Any

from sharding.stream.protocol import commands, wire
from sharding.stream.protocol.commands import Request
from sharding.stream.protocol.constants import FIRST, RESPONSE, Code, Key, Limits
from sharding.stream.protocol.events import Event, ToSend
from sharding.stream.protocol.handshake import Close, Login
from sharding.stream.protocol.session import Connection

OK = struct.pack(">H", Code.OK)
PASSWORD = "a-password-nobody-may-see"
LOGIN = Login("someone", PASSWORD)


def feed(connection: Connection, data: bytes) -> list[Event]:
    """What the connection makes of bytes from its peer."""
    events: list[Event] = []
    rest = memoryview(data)
    while rest:
        buffer = connection.buffer()
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        events += connection.received(count)
        rest = rest[count:]
    return events


def frame(key: int, body: bytes, version: int = 1) -> bytes:
    return struct.pack(">IHH", len(body) + 4, key, version) + body


def answer(key: int, correlation_id: int, body: bytes = OK) -> bytes:
    return frame(RESPONSE | key, struct.pack(">I", correlation_id) + body)


def properties(values: Mapping[str, str]) -> bytes:
    return OK + wire.string_map("properties", values)


def strings(*values: str) -> bytes:
    return OK + wire.string_list("strings", values)


def tune(frame_max: int = 1_048_576, heartbeat: int = 60) -> bytes:
    return frame(Key.TUNE, struct.pack(">II", frame_max, heartbeat))


COMMANDS = struct.pack(">I", 2) + struct.pack(">6H", Key.PUBLISH, 1, 2, Key.STREAM_STATS, 1, 1)


def handshake(version: str = "4.0.5", frame_max: int = 1_048_576) -> list[bytes]:
    """What a broker sends until the connection is open."""
    advertised = {"advertised_host": "rmq1", "advertised_port": "5552"}
    frames = [
        answer(Key.PEER_PROPERTIES, 1, properties({"product": "RabbitMQ", "version": version})),
        answer(Key.SASL_HANDSHAKE, 2, strings("PLAIN", "AMQPLAIN")),
        answer(Key.SASL_AUTHENTICATE, 3) + tune(frame_max),
        answer(Key.OPEN, 4, properties(advertised)),
    ]
    if not version.startswith("3.10"):
        frames.append(answer(Key.EXCHANGE_COMMAND_VERSIONS, 5, OK + COMMANDS))
    return frames


def new_connection(limits: Limits | None = None, login: Login = LOGIN) -> Connection:
    """One that has sent its first frame."""
    connection = Connection(login, limits or Limits(), 60, {"product": "Warren"})
    connection.begin()
    return connection


def open_connection(
    version: str = "4.0.5", limits: Limits | None = None, frame_max: int = 1_048_576
) -> Connection:
    """`frame_max` is what the broker proposes."""
    connection = new_connection(limits)
    feed(connection, b"".join(handshake(version, frame_max)))
    assert connection.opened is not None
    return connection


def copy_of(connection: Connection) -> Connection:
    """The same state, with memory of its own: much cheaper than another handshake."""
    copied = copy.copy(connection)
    copied._frames = copy.copy(connection._frames)
    copied._frames._read = connection._frames._read.copy()
    copied._handshake = copy.copy(connection._handshake)
    copied._waiting = connection._waiting.copy()
    return copied


def sent(events: list[Event]) -> list[bytes]:
    return [event.frame for event in events if isinstance(event, ToSend)]


METADATA = (
    struct.pack(">I", 2)
    + (struct.pack(">H", 7) + wire.string("host", "rmq1") + struct.pack(">I", 5552))
    + (struct.pack(">H", 9) + wire.string("host", "rmq2") + struct.pack(">I", 5553))
    + struct.pack(">I", 2)
    + (wire.string("stream", "invoices-0") + struct.pack(">HHI2H", 1, 7, 2, 9, 11))
    + (wire.string("stream", "missing") + struct.pack(">HHI", 2, 0xFFFF, 0))
)

ANSWERED: list[tuple[Request[Any], bytes]] = [
    (commands.DeclarePublisher(1, "me", "s"), OK),
    (commands.QueryPublisherSequence("me", "s"), OK + struct.pack(">Q", 2**63)),
    (commands.DeletePublisher(1), OK),
    (commands.Subscribe(3, "s", FIRST, 10), OK),
    (commands.Unsubscribe(3), OK),
    (commands.QueryOffset("me", "s"), OK + struct.pack(">Q", 77)),
    (commands.Metadata(("invoices-0", "missing")), METADATA),
    (commands.Route("key", "invoices"), strings("invoices-0")),
    (commands.Partitions("invoices"), strings("invoices-0", "invoices-1")),
    (commands.Create("s"), OK),
    (commands.Delete("s"), OK),
    (
        commands.StreamStats("s"),
        OK + struct.pack(">I", 1) + wire.string("name", "first_chunk_id") + struct.pack(">q", -1),
    ),
    (Close(), OK),
]
"""Requests, and the content of an answer to each."""

CHUNK = bytes(range(48)) + b"the content of a chunk"

PUSHED: list[bytes] = [
    frame(Key.PUBLISH_CONFIRM, struct.pack(">BI3Q", 4, 3, 1, 2, 2**64 - 1)),
    frame(Key.PUBLISH_ERROR, struct.pack(">BIQHQH", 4, 2, 1, 18, 2, 6)),
    frame(Key.DELIVER, b"\x03" + CHUNK),
    frame(RESPONSE | Key.CREDIT, struct.pack(">HB", 4, 3)),
    frame(Key.METADATA_UPDATE, struct.pack(">H", 6) + wire.string("stream", "invoices-0")),
    frame(Key.CONSUMER_UPDATE, struct.pack(">IBB", 99, 3, 1)),
    frame(Key.HEARTBEAT, b""),
]
"""Frames that a broker sends unasked."""

CLOSE = frame(Key.CLOSE, struct.pack(">IH", 5, 13) + wire.string("reason", "unknown frame"))


def asked(connection: Connection) -> list[bytes]:
    """Ask everything on an open connection; the frames that would answer."""
    answers = []
    for request, content in ANSWERED:
        correlation_id, _ = connection.request(request)
        answers.append(answer(request.key, correlation_id, content))
    return answers
