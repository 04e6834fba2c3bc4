"""The standard properties of an AMQP 1.0 message: a list of thirteen fields in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Final, TypeAlias
from uuid import UUID

from sharding.errors import InvalidInput
from sharding.stream.errors import ProtocolError
from sharding.stream.formats.amqp_types import AmqpValue, Symbol, Timestamp
from sharding.stream.formats.amqp_writer import (
    NULL,
    write_list,
    write_uint,
    write_ulong,
    write_value,
)

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


_text, _user = _writer_of(str), _writer_of(bytes)
_WRITERS: Final[dict[str, Callable[[AmqpValue, str], bytes]]] = {
    "message_id": _write_id,
    "user_id": _user,
    "to": _text,
    "subject": _text,
    "reply_to": _text,
    "correlation_id": _write_id,
    "content_type": _write_symbol,
    "content_encoding": _write_symbol,
    "absolute_expiry_time": _write_time,
    "creation_time": _write_time,
    "group_id": _text,
    "group_sequence": _write_sequence,
    "reply_to_group_id": _text,
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
