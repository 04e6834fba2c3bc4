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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import lru_cache
from typing import Final, TypeAlias
from uuid import UUID

from sharding.errors import InvalidInput
from sharding.maps.slots import Key, key_text
from sharding.stream.errors import ProtocolError
from sharding.stream.messages.amqp_codec import (
    NULL,
    AmqpReader,
    write_list,
    write_map,
    write_uint,
    write_ulong,
    write_value,
)
from sharding.stream.messages.amqp_values import AmqpValue, Symbol, Timestamp

MessageId: TypeAlias = int | UUID | bytes | str


@dataclass(frozen=True, slots=True)
class Properties:
    """The fields in the order in which AMQP writes them."""

    message_id: MessageId | None = None
    user_id: bytes | None = None
    to: str | None = None
    subject: str | None = None
    reply_to: str | None = None
    correlation_id: MessageId | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    absolute_expiry_time: Timestamp | datetime | None = None
    """A `Timestamp` in what was read; a datetime is for writing."""
    creation_time: Timestamp | datetime | None = None
    group_id: str | None = None
    group_sequence: int | None = None
    reply_to_group_id: str | None = None


def write_properties(properties: Properties) -> bytes:
    """The list of fields; those that are not set at its end are left out."""
    elements = []
    for name, write in _WRITERS.items():
        value = getattr(properties, name)
        elements.append(NULL if value is None else write(value, name))
    while elements and elements[-1] == NULL:
        elements.pop()
    return write_list(elements)


def read_properties(value: AmqpValue) -> Properties:
    """Of the value of a properties section."""
    if not isinstance(value, tuple) or len(value) > len(_READERS):
        raise ProtocolError("the properties of a message are not a list of up to 13 fields")
    return Properties(
        *(  # type: ignore[arg-type]  # each reader gives what its field holds
            None if field is None else read(field)
            for field, read in zip(value, _READERS, strict=False)
        )
    )


def _write_id(value: AmqpValue, name: str) -> bytes:
    if isinstance(value, int) and not isinstance(value, bool | Timestamp):
        return write_ulong(value)
    return _writer_of(str, bytes, UUID)(value, name)


def _write_symbol(value: AmqpValue, name: str) -> bytes:
    return _writer_of(str)(Symbol(value) if isinstance(value, str) else value, name)


def _write_time(value: AmqpValue, name: str) -> bytes:
    return _writer_of(Timestamp, datetime)(value, name)


def _write_sequence(value: AmqpValue, name: str) -> bytes:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(name, "has to be an int", value)
    return write_uint(value)


def _writer_of(*kinds: type) -> Callable[[AmqpValue, str], bytes]:
    def write(value: AmqpValue, name: str) -> bytes:
        if not isinstance(value, kinds):
            raise InvalidInput(name, f"has to be {_or(kinds)}", value)
        return write_value(value)

    return write


def _or(kinds: tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)


def _read_id(value: AmqpValue) -> MessageId:
    if isinstance(value, bool | Timestamp) or not isinstance(value, int | UUID | bytes | str):
        raise ProtocolError("an id in the properties of a message is of no type for ids")
    return value


def _read_text(value: AmqpValue) -> str:
    if not isinstance(value, str):
        raise ProtocolError("a text in the properties of a message is no text")
    return str(value)


def _read_user(value: AmqpValue) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes):
        raise ProtocolError("the user id in the properties of a message is not binary")
    return value


def _read_time(value: AmqpValue) -> Timestamp:
    if not isinstance(value, Timestamp):
        raise ProtocolError("a time in the properties of a message is no timestamp")
    return value


def _read_sequence(value: AmqpValue) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**32:
        raise ProtocolError("the group sequence in the properties of a message is no uint")
    return value


_write_text, _write_user = _writer_of(str), _writer_of(bytes)
_WRITERS: Final[dict[str, Callable[[AmqpValue, str], bytes]]] = {
    "message_id": _write_id,
    "user_id": _write_user,
    "to": _write_text,
    "subject": _write_text,
    "reply_to": _write_text,
    "correlation_id": _write_id,
    "content_type": _write_symbol,
    "content_encoding": _write_symbol,
    "absolute_expiry_time": _write_time,
    "creation_time": _write_time,
    "group_id": _write_text,
    "group_sequence": _write_sequence,
    "reply_to_group_id": _write_text,
}
_OTHER_READERS: Final[dict[str, Callable[[AmqpValue], AmqpValue]]] = {
    "message_id": _read_id,
    "user_id": _read_user,
    "correlation_id": _read_id,
    "absolute_expiry_time": _read_time,
    "creation_time": _read_time,
    "group_sequence": _read_sequence,
}
_READERS: Final = tuple(_OTHER_READERS.get(field.name, _read_text) for field in fields(Properties))


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
        "a message is not AMQP 1.0; the option raw=True (of Spark: rawMessages=true) gives "
        "messages as they were published"
    )


def _key(annotation: AmqpValue) -> str | None:
    return str(annotation) if isinstance(annotation, str) else None


def _text(field_name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(field_name, "names and keys have to be str", value)
    return value


Body = bytes | bytearray | memoryview

_KEYS_REMEMBERED = 4_096
_NO_BODY = encode_data(b"")


def encoded(
    body: Body,
    key: Key | None,
    properties: Properties | None,
    application_properties: Mapping[str, AmqpValue] | None,
) -> tuple[bytes, bool]:
    """The message; or the body as it is, and True, if there is nothing else to write."""
    if not isinstance(body, bytes | bytearray | memoryview):
        raise InvalidInput("body", "must be bytes", body)
    content = bytes(body)
    if properties is None and application_properties is None:
        return (content, True) if key is None else (with_key(key, content), False)
    message = encode_message(
        content,
        key=None if key is None else key_text(key),
        properties=properties,
        application_properties=application_properties,
    )
    return message, False


def with_key(key: Key, body: bytes) -> bytes:
    """A message of a key and a body, byte for byte as `encode_message` writes it."""
    return _annotation(key if isinstance(key, str) else key_text(key)) + encode_data(body)


@lru_cache(_KEYS_REMEMBERED)
def _annotation(key: str) -> bytes:
    return encode_message(b"", key=key_text(key)).removesuffix(_NO_BODY)
