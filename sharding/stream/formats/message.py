"""Messages: what is published to a stream, and what is read from it, as AMQP 1.0.

An AMQP 1.0 message is a row of sections: header, delivery annotations, message annotations,
properties, application properties, the body, footer. All but the body may be missing. Header,
delivery annotations and footer are for the journey; they are checked and left out.

What `body` holds:

* one or more data sections: their bytes, joined;
* an amqp-value section with a binary, a string or a symbol: its bytes, of texts in UTF-8;
* any other amqp-value section, and amqp-sequence sections: the sections as they are written.
  `value` holds them decoded.

The key of a message is its annotation `x-routing-key`: there RabbitMQ itself puts the routing key
of what was published over AMQP 0-9-1, and there Warren's producers put theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from sharding.errors import InvalidInput
from sharding.stream.errors import ProtocolError
from sharding.stream.formats.amqp_reader import AmqpReader
from sharding.stream.formats.amqp_types import AmqpValue, Symbol
from sharding.stream.formats.amqp_writer import write_map
from sharding.stream.formats.properties import Properties, read_properties, write_properties

__all__ = [
    "KEY_ANNOTATION",
    "Message",
    "Properties",
    "decode_message",
    "encode_data",
    "encode_message",
]

KEY_ANNOTATION: Final = Symbol("x-routing-key")

_HEADER, _DELIVERY, _ANNOTATIONS, _PROPERTIES, _APPLICATION = 0x70, 0x71, 0x72, 0x73, 0x74
_DATA, _SEQUENCE, _VALUE, _FOOTER = 0x75, 0x76, 0x77, 0x78
_BODIES: Final = (_DATA, _SEQUENCE, _VALUE)
_MAY_REPEAT: Final = (_DATA, _SEQUENCE)
_SYMBOLIC: Final[dict[AmqpValue, int]] = {
    "amqp:header:list": _HEADER,
    "amqp:delivery-annotations:map": _DELIVERY,
    "amqp:message-annotations:map": _ANNOTATIONS,
    "amqp:properties:list": _PROPERTIES,
    "amqp:application-properties:map": _APPLICATION,
    "amqp:data:binary": _DATA,
    "amqp:amqp-sequence:list": _SEQUENCE,
    "amqp:amqp-value:*": _VALUE,
    "amqp:footer:map": _FOOTER,
}

# The start of a plain data section, by the number of bytes of a short body.
_SHORT_DATA: Final = tuple(bytes((0x00, 0x53, _DATA, 0xA0, size)) for size in range(256))
_LONG_DATA: Final = struct.Struct(">4sI")
_LONG_DATA_START: Final = b"\x00\x53\x75\xb0"


@dataclass(frozen=True, slots=True)
class Message:
    body: bytes
    key: str | None = None
    properties: Properties | None = None
    application_properties: Mapping[str, AmqpValue] = field(default_factory=dict)
    annotations: Mapping[str | int, AmqpValue] = field(default_factory=dict)
    value: AmqpValue = None
    """The decoded amqp-value, or the elements of amqp-sequences; None if the body is data."""
    offset: int | None = None
    timestamp: datetime | None = None
    """When the broker stored the chunk that held the message."""
    stream: str | None = None


def encode_data(body: bytes) -> bytes:
    """A message of nothing but `body`."""
    size = len(body)
    if size < 256:
        return _SHORT_DATA[size] + body
    if size > 0xFFFF_FFFF:
        raise InvalidInput("body", "may have 4 GiB at most", size)
    return _LONG_DATA.pack(_LONG_DATA_START, size) + body


def encode_message(
    body: bytes,
    *,
    key: str | None = None,
    properties: Properties | None = None,
    application_properties: Mapping[str, AmqpValue] | None = None,
    annotations: Mapping[str, AmqpValue] | None = None,
) -> bytes:
    """A message with what is given; `key` becomes the annotation `x-routing-key`."""
    if key is None and not (properties or application_properties or annotations):
        return encode_data(body)
    sections: list[bytes] = []
    named: dict[AmqpValue, AmqpValue] = {
        Symbol(_text("annotations", name)): value for name, value in (annotations or {}).items()
    }
    if key is not None:
        named[KEY_ANNOTATION] = _text("key", key)
    if named:
        sections += (b"\x00\x53\x72", write_map(named))
    if properties:
        sections += (b"\x00\x53\x73", write_properties(properties))
    if application_properties:
        for name in application_properties:
            _text("application_properties", name)
        # A mapping is invariant in its key, so one from str is not one from any AMQP value.
        sections += (b"\x00\x53\x74", write_map(application_properties))  # type: ignore[arg-type]
    return b"".join((*sections, encode_data(body)))


def decode_message(
    raw: bytes | bytearray | memoryview,
    *,
    offset: int | None = None,
    timestamp: datetime | None = None,
    stream: str | None = None,
) -> Message:
    """The message in `raw`; `offset`, `timestamp` and `stream` are kept with it."""
    data = bytes(raw)
    if data[:4] == b"\x00\x53\x75\xa0" and len(data) > 4 and data[4] == len(data) - 5:
        return Message(data[5:], offset=offset, timestamp=timestamp, stream=stream)
    sections = _Sections(data)
    annotations = sections.annotations
    return Message(
        sections.body(),
        _key(annotations.get(KEY_ANNOTATION)),
        sections.properties,
        sections.application_properties,
        annotations,
        sections.value(),
        offset,
        timestamp,
        stream,
    )


class _Sections:
    """The sections of one message, each read and checked once."""

    def __init__(self, data: bytes) -> None:
        self.annotations: dict[str | int, AmqpValue] = {}
        self.properties: Properties | None = None
        self.application_properties: dict[str, AmqpValue] = {}
        self._bodies: list[AmqpValue] = []
        self._body_kind = _DATA
        self._encoded_body = b""
        reader = AmqpReader(data)
        previous = 0
        while not reader.at_end:
            start = reader.position
            section = _section(reader)
            if section < previous or (section == previous and section not in _MAY_REPEAT):
                raise ProtocolError("the sections of a message are not in AMQP's order")
            if section in _BODIES and previous in _BODIES and section != previous:
                raise ProtocolError("the body of a message mixes sections of several kinds")
            self._keep(section, reader.value(1))
            if section in _BODIES and section != _DATA:
                self._encoded_body += data[start : reader.position]
            previous = section
        if not previous:
            raise not_amqp()

    def body(self) -> bytes:
        if self._body_kind == _DATA:
            # Every part of a data body is bytes; that follows from the kind, which mypy can't see.
            return b"".join(self._bodies)  # type: ignore[arg-type]
        value = self._bodies[0]
        if self._body_kind == _VALUE and isinstance(value, bytes):
            return value
        if self._body_kind == _VALUE and isinstance(value, str):
            return value.encode()
        return self._encoded_body

    def value(self) -> AmqpValue:
        if self._body_kind == _VALUE:
            return self._bodies[0]
        if self._body_kind == _SEQUENCE:
            # And every part of a sequence is a list.
            return tuple(element for part in self._bodies for element in part)  # type: ignore
        return None

    def _keep(self, section: int, value: AmqpValue) -> None:
        match section:
            case 0x75 | 0x76 | 0x77:
                expected = {_DATA: bytes, _SEQUENCE: tuple}.get(section, object)
                if not isinstance(value, expected):
                    raise ProtocolError("the body of a message is of the wrong type")
                self._body_kind = section
                self._bodies.append(value)
            case 0x73:
                self.properties = read_properties(value)
            case 0x70:
                if not isinstance(value, tuple):
                    raise ProtocolError("the header of a message is no list")
            case _:
                self._keep_map(section, value)

    def _keep_map(self, section: int, value: AmqpValue) -> None:
        names = str if section == _APPLICATION else str | int
        if not isinstance(value, dict) or not all(isinstance(name, names) for name in value):
            raise ProtocolError("a section of a message is no map of names to values")
        if section == _APPLICATION:
            self.application_properties = value
        elif section == _ANNOTATIONS:
            self.annotations = value


def _section(reader: AmqpReader) -> int:
    try:
        descriptor = reader.descriptor()
    except ProtocolError:
        raise not_amqp() from None
    section = _SYMBOLIC.get(descriptor, descriptor) if isinstance(descriptor, int | str) else None
    if not isinstance(section, int) or not _HEADER <= section <= _FOOTER:
        raise not_amqp()
    return section


def not_amqp() -> ProtocolError:
    return ProtocolError(
        "a message is not AMQP 1.0; the option raw=True gives messages as they were published"
    )


def _key(annotation: AmqpValue) -> str | None:
    return str(annotation) if isinstance(annotation, str) else None


def _text(field_name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(field_name, "names and keys have to be str", value)
    return value
