"""A stream connection that does no work: frames made beforehand out, frames skipped in.

It is the ceiling that the stream client is measured against: what the brokers take and give.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from sharding.stream.protocol.commands import (
    DeclarePublisher,
    Request,
    Subscribe,
    credit_frame,
    publish_header,
    tune_frame,
)
from sharding.stream.protocol.constants import FIRST, RESPONSE, Broker, Key
from sharding.stream.protocol.handshake import Open, PeerProperties, SaslAuthenticate, SaslHandshake

_FRAME = struct.Struct(">IHH")
_COUNT = struct.Struct(">I")
_RECORDS_AT = 4 + 4 + 1 + 4  # size, key and version, subscription id, then 4 bytes into the chunk
_READ = 4 * 1024 * 1024
CREDITS = 32


def publish_frames(bodies: Sequence[bytes], per_frame: int) -> list[tuple[bytes, int]]:
    """Publish frames of AMQP data messages, and how many messages each has."""
    frames = []
    for first in range(0, len(bodies), per_frame):
        entries = bytearray()
        for number, body in enumerate(bodies[first : first + per_frame], first):
            message = b"\0Su\xb0" + struct.pack(">I", len(body)) + body
            entries += struct.pack(">QI", number, len(message)) + message
        count = len(bodies[first : first + per_frame])
        frames.append((publish_header(0, count, len(entries)) + entries, count))
    return frames


class BareStream:
    """One plain connection, opened as guest."""

    def __init__(self, node: Broker, stream: str) -> None:
        self._stream = stream
        self._socket = socket.create_connection(node, timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_READ)
        self._held = 0
        self._ask(PeerProperties({}))
        self._ask(SaslHandshake())
        self._socket.sendall(SaslAuthenticate("PLAIN", b"\0guest\0guest", "guest").encode(1))
        self._until(Key.TUNE)  # follows the answer, mostly in the same read
        self._socket.sendall(tune_frame(1 << 20, 0))
        self._ask(Open("/"))

    def close(self) -> None:
        self._socket.close()

    def publish(self, frames: Sequence[tuple[bytes, int]], window: int) -> None:
        """Write all frames, never more than `window` messages ahead of the confirms."""
        self._ask(DeclarePublisher(0, None, self._stream))
        unconfirmed = 0
        for frame, count in frames:
            while unconfirmed + count > window:
                unconfirmed -= self._confirmed()
            self._socket.sendall(frame)
            unconfirmed += count
        while unconfirmed:
            unconfirmed -= self._confirmed()

    def skip(self, messages: int) -> None:
        """Read from the first message on until so many have passed."""
        # The first chunks may come in one read with the answer, so that is not waited for.
        self._socket.sendall(Subscribe(0, self._stream, FIRST, CREDITS).encode(1))
        credit = credit_frame(0, CREDITS // 2)
        delivered = 0
        while messages > 0:
            for at, key in self._frames():
                if key == Key.DELIVER:
                    messages -= _COUNT.unpack_from(self._buffer, at + _RECORDS_AT)[0]
                    delivered += 1
                    if delivered % (CREDITS // 2) == 0:
                        self._socket.sendall(credit)

    def _confirmed(self) -> int:
        confirmed = 0
        for at, key in self._frames():
            if key == Key.PUBLISH_CONFIRM:
                confirmed += _COUNT.unpack_from(self._buffer, at + 9)[0]
        return confirmed

    def _ask(self, request: Request[object]) -> None:  # type: ignore[type-var]  # any answer
        self._socket.sendall(request.encode(1))
        self._until(RESPONSE | request.key)

    def _until(self, wanted: int) -> None:
        while all(key != wanted for _, key in self._frames()):
            pass

    def _frames(self) -> list[tuple[int, int]]:
        """The place and key of every whole frame in what can be read now; waits for one read."""
        # What is left of the last read moves to the front first: the frames found are then valid
        # until the next call.
        if self._held:
            rest = self._buffer[self._consumed : self._consumed + self._held]
            self._buffer[: self._held] = rest
        got = self._socket.recv_into(memoryview(self._buffer)[self._held :])
        if not got:
            raise ConnectionError("the broker closed the connection")
        end, at, found = self._held + got, 0, []
        while end - at >= _FRAME.size:
            size, key, _ = _FRAME.unpack_from(self._buffer, at)
            if end - at < size + 4:
                break
            found.append((at, key))
            at += size + 4
        self._consumed, self._held = at, end - at
        return found

    _consumed = 0
