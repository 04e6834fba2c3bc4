"""AMQP 0-9-1 by hand on a socket: what a client library would refuse to send, or fail to read.

It knows nothing of pika and of Warren's own codec, so that it can judge both. Only what tests need:
a connection with one channel, confirmed publishing of properties that are given as bytes, and
taking messages out of a queue with their properties as bytes.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote, urlsplit

from tests.cluster.waiting import PATIENCE

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END = b"\xce"
BASIC = 60
EMPTY_FRAME = 8


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def sized(content: bytes) -> bytes:
    """A long string, or a table or an array after its letter."""
    return struct.pack(">I", len(content)) + content


@dataclass(frozen=True)
class Raw:
    key: bytes
    properties: bytes
    """Flags and properties, as they stand in the content header."""
    body: bytes


class RawConnection:
    def __init__(self, url: str, frame_max: int = 131_072) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._frame_max = frame_max
        self._socket = socket.create_connection((parts.hostname, parts.port or 5672), PATIENCE)
        self._input = self._socket.makefile("rb")
        self._published = 0
        self._unconfirmed: set[int] = set()
        login = b"\0" + unquote(parts.username or "guest").encode()
        login += b"\0" + unquote(parts.password or "guest").encode()
        self._socket.sendall(b"AMQP\0\0\x09\x01")
        self._wait_for(10, 10)
        start = sized(b"") + short(b"PLAIN") + sized(login) + short(b"en_US")
        self._send(METHOD, struct.pack(">HH", 10, 11) + start, channel=0)
        self._wait_for(10, 30)
        self._send(METHOD, struct.pack(">HHHIH", 10, 31, 1, frame_max, 0), channel=0)
        vhost = unquote(parts.path[1:]).encode() or b"/"
        self._send(METHOD, struct.pack(">HH", 10, 40) + short(vhost) + b"\0\0", channel=0)
        self._wait_for(10, 41)
        self._ask(20, 10, b"\0")
        self._ask(85, 10, b"\0")  # confirms

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._input.close()
        self._socket.close()

    def publish(self, exchange: str, message: Raw) -> None:
        """Send, mandatory; `wait_for_confirms` says that it is stored."""
        arguments = b"\0\0" + short(exchange.encode()) + short(message.key) + b"\x01"
        frames = [self._frame(METHOD, struct.pack(">HH", BASIC, 40) + arguments)]
        start = struct.pack(">HHQ", BASIC, 0, len(message.body))
        frames.append(self._frame(HEADER, start + message.properties))
        room = self._frame_max - EMPTY_FRAME
        parts = range(0, len(message.body), room)
        frames += [self._frame(BODY, message.body[begin : begin + room]) for begin in parts]
        self._socket.sendall(b"".join(frames))
        self._published += 1
        self._unconfirmed.add(self._published)

    def wait_for_confirms(self) -> None:
        while self._unconfirmed:
            what, arguments = self._method()
            assert what == (BASIC, 80), f"the broker said {what} {arguments!r}"
            tag, multiple = struct.unpack_from(">Q?", arguments)
            self._unconfirmed -= set(range(1, tag + 1)) if multiple else {tag}

    def take(self, queue: str) -> Raw | None:
        """The next message of the queue, acknowledged; None if there is none."""
        get = struct.pack(">HHH", BASIC, 70, 0) + short(queue.encode()) + b"\x01"
        self._send(METHOD, get)
        what, arguments = self._method()
        if what == (BASIC, 72):
            return None
        assert what == (BASIC, 71), (what, arguments)
        offset = 9
        exchange = arguments[offset]
        offset += 1 + exchange
        key = arguments[offset + 1 : offset + 1 + arguments[offset]]
        kind, header = self._read()
        assert kind == HEADER
        size = struct.unpack_from(">Q", header, 4)[0]
        body = b""
        while len(body) < size:
            kind, part = self._read()
            assert kind == BODY
            body += part
        return Raw(key, header[12:], body)

    def take_all(self, queue: str) -> list[Raw]:
        found = []
        while (message := self.take(queue)) is not None:
            found.append(message)
        return found

    def _ask(self, class_id: int, method_id: int, arguments: bytes) -> None:
        self._send(METHOD, struct.pack(">HH", class_id, method_id) + arguments)
        self._wait_for(class_id, method_id + 1)

    def _wait_for(self, class_id: int, method_id: int) -> None:
        what, arguments = self._method()
        assert what == (class_id, method_id), (what, arguments)

    def _method(self) -> tuple[tuple[int, int], bytes]:
        kind, payload = self._read()
        assert kind == METHOD, kind
        class_id, method_id = struct.unpack_from(">HH", payload)
        return (class_id, method_id), payload[4:]

    def _read(self) -> tuple[int, bytes]:
        while True:
            start = self._input.read(7)
            assert len(start) == 7, "the broker has closed the connection"
            kind, _, size = struct.unpack(">BHI", start)
            payload = self._input.read(size)
            assert self._input.read(1) == FRAME_END
            if kind != HEARTBEAT:
                return kind, payload

    def _frame(self, kind: int, payload: bytes, channel: int = 1) -> bytes:
        return struct.pack(">BHI", kind, channel, len(payload)) + payload + FRAME_END

    def _send(self, kind: int, payload: bytes, channel: int = 1) -> None:
        self._socket.sendall(self._frame(kind, payload, channel))
