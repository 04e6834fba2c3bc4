"""AMQP 1.0 values as Python values.

| AMQP | Python |
|---|---|
| null, boolean, string, binary, uuid | None, bool, str, bytes, uuid.UUID |
| ubyte … ulong, byte … long | int |
| float, double | float |
| decimal32, 64, 128 | decimal.Decimal |
| char | str of one character |
| symbol, timestamp, described value | `Symbol`, `Timestamp`, `Described` |
| list, array | tuple |
| map | dict |

A number does not remember its width: an int is written as a long (as an ulong, if only that holds
it), a float as a double. All else is written as what it was read from; arrays as lists.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TypeAlias
from uuid import UUID

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Symbol(str):
    """A name from a fixed set, such as a content type or the key of an annotation."""

    __slots__ = ()


class Timestamp(int):
    """Milliseconds since 1970, UTC. A whole number, because AMQP's reach further than datetime."""

    __slots__ = ()

    @classmethod
    def of(cls, moment: datetime) -> Timestamp:
        """Of a datetime that knows its time zone."""
        return cls((moment - _EPOCH) // timedelta(milliseconds=1))

    def to_datetime(self) -> datetime:
        """Raises OverflowError outside the years 1 to 9999."""
        return _EPOCH + timedelta(milliseconds=self)


@dataclass(frozen=True, slots=True)
class Described:
    """A value of a type that AMQP itself does not know, with the name of that type."""

    descriptor: AmqpValue
    value: AmqpValue


AmqpValue: TypeAlias = (
    bool
    | int
    | float
    | str
    | bytes
    | UUID
    | Decimal
    | datetime
    | Described
    | Sequence["AmqpValue"]
    | Mapping["AmqpValue", "AmqpValue"]
    | None
)
"""What is read, and what can be written; a datetime is written as a timestamp, never read."""


def as_text(value: AmqpValue) -> str | None:
    """`value` as the one text that a column of strings holds.

    Texts as they are, numbers and booleans as in JSON, binary as base64, UUIDs and times in their
    ISO forms, null as no text, and what holds other values as JSON.
    """
    match value:
        case None:
            return None
        case str():
            return str(value)
        case bool():
            return "true" if value else "false"
        case Timestamp():
            return _time_text(value)
        case bytes():
            return base64.b64encode(value).decode()
        case Mapping() | Sequence() | Described():
            return json.dumps(_json_value(value), ensure_ascii=False, separators=(",", ":"))
        case datetime():
            return _time_text(Timestamp.of(value))
        case _:
            return str(value)


def _time_text(value: Timestamp) -> str:
    try:
        return value.to_datetime().isoformat()
    except OverflowError:
        return str(int(value))


def _json_value(value: AmqpValue) -> object:
    match value:
        case None | bool() | int() | float() if not isinstance(value, Timestamp):
            return value
        case str() | bytes() | Timestamp():
            return as_text(value)
        case Mapping():
            return {as_text(key): _json_value(held) for key, held in value.items()}
        case Sequence():
            return [_json_value(held) for held in value]
        case Described():
            return _json_value(value.value)
        case _:
            return as_text(value)
