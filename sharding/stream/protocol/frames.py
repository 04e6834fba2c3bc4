"""Bytes to frames, with every declared size checked before memory is taken for it.

The caller asks for a `buffer`, fills part of it from its socket, and says how much it `received`:
the way of `asyncio.BufferedProtocol`, and of `recv_into`. The rules:

* Small frames are collected in one read buffer and handed out as copies.
* A frame that delivers a chunk gets memory of its own, and its bytes are received straight into it
  (but for those that came along with the frame before). It is handed out without a copy and never
  touched again.
* A frame that does not fit the read buffer is received like a chunk.
* Memory follows what has really arrived: a peer that declares a large frame and sends nothing makes
  us hold no more than `FIRST_STEP`; beyond that the memory doubles as it fills.
* Chunks may have `chunk_max`, other frames `frame_max`. Until `authenticated` is called, no frame
  may have more than `handshake_frame_max`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from sharding.stream.errors import ProtocolError
from sharding.stream.protocol.constants import MIB, RESPONSE, Key, Limits
from sharding.stream.protocol.wire import FRAME_HEADER, U32

READ_BUFFER = 64 * 1024
FIRST_STEP = MIB
SMALLEST = FRAME_HEADER.size - U32.size
_AMQP = int.from_bytes(b"AMQP")  # how a broker greets a client that it takes for an AMQP one
"""A frame's size counts its key and version, and not itself."""


class Frame(NamedTuple):
    """One frame without its size."""

    key: int
    version: int
    body: memoryview


class FrameReader:
    """Collects what arrives into frames."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._frame_limit = ("Limits.handshake_frame_max", limits.handshake_frame_max)
        self._chunk_limit = self._frame_limit
        self._read = bytearray(READ_BUFFER)
        self._begin = 0  # of what is in the read buffer and was not handed out
        self._end = 0
        self._header = (0, 0, 0)  # of the frame that is being read: size, key, version
        self._large: bytearray | None = None  # its content, if it has memory of its own
        self._large_size = 0
        self._filled = 0

    def authenticated(self) -> None:
        """Allow the full sizes. What a broker agreed on it wants of us and does not keep to itself:
        its confirms, and its answers about many streams, are as long as they are."""
        self._frame_limit = ("Limits.frame_max", self._limits.frame_max)
        self._chunk_limit = ("Limits.chunk_max", self._limits.chunk_max)

    def buffer(self) -> memoryview:
        """Where the next bytes go. Good until the next call of any method; never empty."""
        if self._large is not None:
            return memoryview(self._large)[self._filled :]
        return memoryview(self._read)[self._end :]

    def received(self, count: int) -> Iterator[Frame]:
        """The frames that `count` more bytes in the buffer made whole.

        They are cut off one by one as they are asked for: good frames come before the error of a
        bad one, and `authenticated` holds from the next frame on. All have to be taken.
        """
        if self._large is None:
            self._end += count
        else:
            self._filled += count
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        if self._large is None and not self._begin_frame():
            self._make_room()
            return None
        if self._large is None:
            size, key, version = self._header
            begin = self._begin + FRAME_HEADER.size
            self._begin += U32.size + size
            return Frame(key, version, memoryview(self._read[begin : self._begin]))
        if self._filled < self._large_size:
            self._grow_if_full(self._large)
            return None
        large, self._large = self._large, None
        return Frame(*self._header[1:], memoryview(large))

    def _begin_frame(self) -> bool:
        """Whether the read buffer holds a whole frame, or the beginning of a large one."""
        available = self._end - self._begin
        if available < FRAME_HEADER.size:
            if available >= U32.size:
                self._check_size(U32.unpack_from(self._read, self._begin)[0], None)
            return False
        header: tuple[int, int, int] = FRAME_HEADER.unpack_from(self._read, self._begin)
        self._header = size, key, _ = header
        self._check_size(size, key)
        whole = U32.size + size
        if key == Key.DELIVER or whole > READ_BUFFER:
            self._begin_large(size - SMALLEST, min(whole, available))
            return True
        return whole <= available

    def _check_size(self, size: int, key: int | None) -> None:
        """With no key yet, only what no frame may have is refused."""
        if size < SMALLEST:
            raise ProtocolError(f"a frame of {size} bytes is declared; {SMALLEST} are the least")
        name, limit = self._chunk_limit if key in (None, Key.DELIVER) else self._frame_limit
        if key is None:
            limit = max(limit, self._frame_limit[1])
        if size == _AMQP:
            raise ProtocolError("the peer speaks AMQP: this is not the port of the streams")
        if size > limit:
            raise ProtocolError(
                f"a frame of {size} bytes is declared, more than {name} = {limit} allows"
            )

    def _begin_large(self, size: int, available: int) -> None:
        """Move what is there of a large frame, `available` with its header, to its own memory."""
        begin, end = self._begin + FRAME_HEADER.size, self._begin + available
        self._large_size = size
        self._filled = end - begin
        self._large = bytearray(min(size, FIRST_STEP))
        self._large[: self._filled] = memoryview(self._read)[begin:end]
        self._begin = end
        self._make_room()

    def _grow_if_full(self, large: bytearray) -> None:
        if self._filled == len(large):
            self._large = bytearray(min(2 * len(large), self._large_size))
            self._large[: self._filled] = large

    def _make_room(self) -> None:
        """Bring what is left to the front of the read buffer, so that a whole frame fits."""
        if self._begin:
            left = self._end - self._begin
            self._read[:left] = self._read[self._begin : self._end]
            self._begin, self._end = 0, left


VARIABLE = "WARREN_WIRE_LOG"
LOGGER = logging.getLogger("warren.wire")
SHOWN_BYTES = 48


# Each frame in both directions, as a line of the logger `warren.wire`, with secrets masked.
#
# `WARREN_WIRE_LOG=1` in the environment turns it on, and prints to stderr. It shows what messages
# hold, cut after some bytes; it never shows what authenticates us.


class WireLog:
    """The frames of one connection."""

    def __init__(self, peer: str, logger: logging.Logger = LOGGER) -> None:
        self._peer = peer
        self._logger = logger

    def sent(self, buffers: Iterable[bytes | bytearray | memoryview]) -> None:
        """Several buffers that together are one frame or more."""
        data = memoryview(b"".join(buffers))
        while len(data) >= FRAME_HEADER.size:
            size, key, version = FRAME_HEADER.unpack_from(data)
            whole = U32.size + size
            self._write("→", Frame(key, version, data[FRAME_HEADER.size : whole]))
            data = data[whole:]

    def received(self, frame: Frame) -> None:
        self._write("←", frame)

    def _write(self, arrow: str, frame: Frame) -> None:
        self._logger.debug("%s %s %s", arrow, self._peer, described(frame))


def described(frame: Frame) -> str:
    """
    >>> described(Frame(Key.CREDIT, 1, memoryview(bytes([7, 0, 10]))))
    'Credit v1, 3 bytes: 07 00 0a'
    >>> described(Frame(Key.SASL_AUTHENTICATE, 1, memoryview(bytes(20) + b"secret")))
    'SaslAuthenticate v1, 26 bytes: ***'
    """
    try:
        name = Key(frame.key & ~RESPONSE).name.title().replace("_", "")
    except ValueError:
        name = f"key {frame.key:#06x}"
    answer = " answer" if frame.key & RESPONSE else ""
    if frame.key == Key.SASL_AUTHENTICATE:
        content = "***"
    else:
        content = frame.body[:SHOWN_BYTES].hex(" ") + (
            " …" if len(frame.body) > SHOWN_BYTES else ""
        )
    return f"{name}{answer} v{frame.version}, {len(frame.body)} bytes: {content}"


def wire_log(peer: str, environment: Mapping[str, str]) -> WireLog | None:
    """A log for the connection to `peer`, if the environment asks for one."""
    if environment.get(VARIABLE, "") in ("", "0"):
        return None
    if not LOGGER.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", "%H:%M:%S"))
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.DEBUG)
        LOGGER.propagate = False
    return WireLog(peer)
