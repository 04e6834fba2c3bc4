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
it), a float as a double, a char as a string, an array as a list. All else is written as what it was
read from.
"""

from __future__ import annotations

import base64
import json
import math
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
    ISO forms, null as no text, and what holds other values as JSON. A map of which two keys have
    the same text is a list of pairs, and what is no finite number a text: JSON has neither.
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
        case float() if not math.isfinite(value):
            return as_text(value)
        case None | bool() | int() | float() if not isinstance(value, Timestamp):
            return value
        case str() | bytes() | Timestamp():
            return as_text(value)
        case Mapping():
            pairs = [(_json_key(key), _json_value(held)) for key, held in value.items()]
            by_key = dict(pairs)
            return by_key if len(by_key) == len(pairs) else pairs
        case Sequence():
            return [_json_value(held) for held in value]
        case Described():
            return _json_value(value.value)
        case _:
            return as_text(value)


def _json_key(key: AmqpValue) -> str:
    return "null" if key is None else as_text(key) or ""


# AMQP 1.0 decimals: IEEE 754-2008 numbers in the binary integer encoding.
#
# From the left: the sign, then the exponent and the coefficient as whole numbers. Where the two
# bits after the sign are both 1, the exponent stands two bits further right, and the coefficient
# begins with an unwritten 100; where the two bits after those are 1 as well, it is an infinity or
# no number.

# By number of bytes: bits of the exponent, its bias, the largest coefficient.
_FORMATS = {
    4: (8, 101, 10**7 - 1),
    8: (10, 398, 10**16 - 1),
    16: (14, 6176, 10**34 - 1),
}
_LARGEST_EXPONENT = 6111  # of 16 bytes, with all 34 digits written


def read_decimal(data: bytes) -> Decimal:
    """The number written in 4, 8 or 16 bytes."""
    exponent_bits, bias, largest = _FORMATS[len(data)]
    bits = int.from_bytes(data)
    width = len(data) * 8 - 1 - exponent_bits  # of the coefficient, where it is written in full
    sign, rest = bits >> (len(data) * 8 - 1), bits & ((1 << (len(data) * 8 - 1)) - 1)
    combination = rest >> (len(data) * 8 - 6)  # the five bits after the sign
    if combination == 0b11111:
        return Decimal("NaN")
    if combination == 0b11110:
        return Decimal("-Infinity" if sign else "Infinity")
    if combination >> 3 == 0b11:
        exponent = rest >> (width - 2) & ((1 << exponent_bits) - 1)
        coefficient = 0b100 << (width - 2) | rest & ((1 << (width - 2)) - 1)
    else:
        exponent, coefficient = rest >> width, rest & ((1 << width) - 1)
    if coefficient > largest:
        coefficient = 0  # the standard says that such a coefficient stands for zero
    return Decimal((sign, tuple(map(int, str(coefficient))), exponent - bias))


def write_decimal(value: Decimal) -> bytes:
    """`value` in 16 bytes; ValueError if it does not fit."""
    exponent_bits, bias, largest = _FORMATS[16]
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        special = 0b11110 if value.is_infinite() else 0b11111
        return ((sign << 5 | special) << 122).to_bytes(16)
    coefficient = int("".join(map(str, digits)))
    # A smaller coefficient can have zeros of the exponent: 1E6112 is 10E6111.
    zeros = max(0, exponent - _LARGEST_EXPONENT)
    if zeros <= 34:
        coefficient, exponent = coefficient * 10**zeros, exponent - zeros
    if coefficient > largest or not -bias <= exponent <= _LARGEST_EXPONENT:
        raise ValueError(f"{value} does not fit into a decimal of 34 digits")
    width = 127 - exponent_bits
    return (sign << 127 | (exponent + bias) << width | coefficient).to_bytes(16)
