"""What pika receives, read so that nothing a broker delivers can end the connection.

pika decodes properties and names as frames arrive, and what it can't decode ends its connection: a
time in milliseconds, a nested table too deep for Python, and up to 1.3.2 text that is not UTF-8. It
changes others: 19.99 is read as 19. So the frames that carry what applications wrote are read here,
by `content_header` and `field_table`, and keep their bytes beside what is read of them.
"""

from __future__ import annotations

import logging
import struct
from typing import Any

import pika
import pika.frame
from pika import spec

from sharding.amqp.content_header import PROPERTIES, PropertyList
from sharding.amqp.field_table import Malformed, read_name

logger = logging.getLogger("warren.amqp")

_FRAME_START = struct.Struct(">BHI")
_CONTENT_START = struct.Struct(">HHQ")
_NUMBERS = {letter: struct.Struct(f">{letter}") for letter in "?HQ"}
_LAYOUTS: dict[bytes, tuple[Any, str]] = {
    struct.pack(">I", method.INDEX): (method, layout)
    for method, layout in (
        (spec.Basic.Deliver, "nQ?nn"),
        (spec.Basic.Return, "Htnn"),
        (spec.Channel.Close, "HtHH"),
        (spec.Connection.Close, "HtHH"),
    )
}
"""Methods with names that applications chose: `n` is a name, `t` a text for people, which the
broker may have cut in the middle of a character; the rest as in `struct`."""


class ReceivedProperties(pika.BasicProperties):
    """pika's properties with every value that a broker delivers, and `raw`, their own bytes.

    Sent on unchanged, they are sent as they came.
    """

    def __init__(self, raw: bytes) -> None:
        try:
            values = PropertyList.parse(raw).read()
        except Malformed as error:  # no broker was seen to deliver such; the body can be handled
            logger.warning("a message's properties can't be read, and are shown as none: %s", error)
            values = dict.fromkeys(PROPERTIES)
        super().__init__(**values)
        self.raw = raw

    def encode(self) -> list[bytes]:
        # As they are written: NaN is not equal to itself, and 1 is to True.
        unchanged = repr(vars(self)) == repr(vars(ReceivedProperties(self.raw)))
        return [self.raw] if unchanged else super().encode()


class EncodedProperties(pika.BasicProperties):
    """Properties to be sent that are bytes already."""

    def __init__(self, encoded: bytes) -> None:
        super().__init__()
        self._encoded = encoded

    def encode(self) -> list[bytes]:
        return [self._encoded]


def read_frame(buffer: bytes) -> tuple[int, Any]:
    """pika's `decode_frame`: how many bytes the first frame has, and the frame; 0 and None if it is
    not there as a whole. Frames without words of an application's are left to pika.
    """
    if len(buffer) >= _FRAME_START.size:
        kind, channel, size = _FRAME_START.unpack_from(buffer)
        end = _FRAME_START.size + size
        if len(buffer) > end and buffer[end] == spec.FRAME_END:
            frame = _read_payload(kind, channel, buffer, end)
            if frame is not None:
                return end + 1, frame
    return pika.frame.decode_frame(buffer)


def _read_payload(kind: int, channel: int, buffer: bytes, end: int) -> Any:
    start = _FRAME_START.size
    if kind == spec.FRAME_HEADER:
        _, _, body_size = _CONTENT_START.unpack_from(buffer, start)
        raw = buffer[start + _CONTENT_START.size : end]
        return pika.frame.Header(channel, body_size, ReceivedProperties(raw))
    if kind == spec.FRAME_METHOD:
        found = _LAYOUTS.get(buffer[start : start + 4])
        if found is not None:
            method, layout = found
            return pika.frame.Method(channel, method(*_arguments(buffer, start + 4, layout)))
    return None


def _arguments(buffer: bytes, offset: int, layout: str) -> list[Any]:
    arguments: list[Any] = []
    for letter in layout:
        if letter in "nt":
            end = offset + 1 + buffer[offset]
            text = buffer[offset + 1 : end]
            arguments.append(read_name(text) if letter == "n" else text.decode("utf-8", "replace"))
            offset = end
        else:
            number = _NUMBERS[letter]
            arguments += number.unpack_from(buffer, offset)
            offset += number.size
    return arguments
