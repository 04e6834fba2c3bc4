"""Each frame in both directions, as a line of the logger `warren.wire`, with secrets masked.

`WARREN_WIRE_LOG=1` in the environment turns it on, and prints to stderr. It shows what messages
hold, cut after some bytes; it never shows what authenticates us.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping

from sharding.stream.frames.framing import Frame
from sharding.stream.frames.primitives import FRAME_HEADER, U32
from sharding.stream.protocol import RESPONSE, Key

VARIABLE = "WARREN_WIRE_LOG"
LOGGER = logging.getLogger("warren.wire")
SHOWN_BYTES = 48


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
