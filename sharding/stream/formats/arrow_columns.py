"""Arrow arrays for the columns of a batch, and their types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from sharding.stream.errors import ProtocolError
from sharding.stream.formats.amqp_types import AmqpValue, Timestamp, as_text
from sharding.stream.formats.arrow_rows import Integers, Octets
from sharding.stream.formats.properties import Properties

Part: TypeAlias = tuple[Integers, pa.Array]
"""The numbers of some rows, and their values."""

TIME: Final = pa.timestamp("ms", "UTC")
_PROPERTY_TYPES: Final = {
    "user_id": pa.binary(),
    "absolute_expiry_time": TIME,
    "creation_time": TIME,
    "group_sequence": pa.int64(),
}
PROPERTIES: Final = pa.struct(
    [(field.name, _PROPERTY_TYPES.get(field.name, pa.string())) for field in fields(Properties)]
)
APPLICATION_PROPERTIES: Final = pa.map_(pa.string(), pa.string())

_SMALL_MAX = 2**31 - 1  # what the offsets of a binary or string array can reach
_LARGE: Final = {pa.binary(): pa.large_binary(), pa.string(): pa.large_string()}
# The years 1 to 9999: beyond, a timestamp is of no use to Python or Spark.
_EARLIEST_MS, _LATEST_MS = -62_135_596_800_000, 253_402_300_799_999


def type_for(kind: pa.DataType, buffer: Octets) -> pa.DataType:
    """`kind`, or its large sister if the slices of `buffer` may need it."""
    return kind if len(buffer) <= _SMALL_MAX else _LARGE[kind]


def slices(kind: pa.DataType, buffer: Octets, starts: Integers, ends: Integers) -> pa.Array:
    """The slices of `buffer`, which follow each other and do not overlap, as an array.

    An array is made of the slices and of what lies between them, over the buffer as it is; every
    second element of it is taken. That copies each slice once, in C.
    """
    if not len(starts):
        return pa.array([], kind)
    width = np.int64 if kind in _LARGE.values() else np.int32
    offsets = np.empty(2 * len(starts), width)
    offsets[0::2] = starts
    offsets[1::2] = ends
    with_gaps = pa.Array.from_buffers(
        kind, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(buffer)]
    )
    return with_gaps.take(pa.array(np.arange(0, len(offsets) - 1, 2)))


def check_text(array: pa.Array) -> None:
    """Raises if an array of strings that was made from bytes holds what is not UTF-8."""
    octets = array.buffers()[2]
    if octets is None or not octets.size or np.frombuffer(octets, np.uint8).max() < 0x80:
        return
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raise ProtocolError("the key of a message is not UTF-8") from None


def scatter(kind: pa.DataType, count: int, parts: Sequence[Part]) -> pa.Array:
    """`count` rows: those that a part names have its values, all others null."""
    parts = [part for part in parts if len(part[0])]
    if not parts:
        return pa.nulls(count, kind)
    if len(parts) == 1 and len(parts[0][0]) == count:
        return parts[0][1]
    source = np.zeros(count, np.int64)
    missing = np.ones(count, np.bool_)
    before = 0
    for rows, _ in parts:
        source[rows] = np.arange(before, before + len(rows))
        missing[rows] = False
        before += len(rows)
    return pa.concat_arrays([values for _, values in parts]).take(pa.array(source, mask=missing))


def properties_array(values: Sequence[Properties | None]) -> pa.Array:
    return pa.array([value and _property_row(value) for value in values], PROPERTIES)


def application_properties_array(values: Sequence[Mapping[str, AmqpValue]]) -> pa.Array:
    """Null for a message without any; values as text."""
    rows = [
        [(str(name), as_text(value)) for name, value in entries.items()] or None
        for entries in values
    ]
    return pa.array(rows, APPLICATION_PROPERTIES)


def _property_row(properties: Properties) -> dict[str, object]:
    row: dict[str, object] = {}
    for field in fields(Properties):
        value = getattr(properties, field.name)
        if isinstance(value, Timestamp):
            row[field.name] = int(value) if _EARLIEST_MS <= value <= _LATEST_MS else None
        elif field.name in _PROPERTY_TYPES:
            row[field.name] = value
        else:
            row[field.name] = as_text(value)
    return row
