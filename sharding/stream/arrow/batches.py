"""Arrow arrays for the columns of a batch, and their types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from sharding.stream.arrow.layouts import Layout, layout_of
from sharding.stream.arrow.rows import (
    Integers,
    Octets,
    Rows,
    Run,
    Wanted,
    bodies_of,
    cut,
    locate,
    parts,
    ranges,
    split,
    table_of_bodies,
    whole,
)
from sharding.stream.errors import ProtocolError
from sharding.stream.messages.amqp_values import AmqpValue, Timestamp, as_text
from sharding.stream.messages.chunk import HEADER_SIZE, check_crc, parse_header
from sharding.stream.messages.message import Message, Properties, decode_message
from sharding.stream.options import Columns
from sharding.stream.protocol.constants import Limits

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


_Columns = dict[str, pa.Array]
_NONE: Integers = np.zeros(0, np.int64)


# Chunks become Arrow record batches: many small ones become one batch, a large one several.
#
# Each batch has fixed costs, and brokers make chunks of a hundred messages as well as of thousands.
# But what comes out of a chunk can be a thousand times what came in, and one batch holds no more
# than `Limits.batch_max` of it.
# The columns, in this order, the last three on request:
#
# * `offset`: int64;
# * `timestamp`: timestamp[ms, UTC]; when the broker stored the chunk;
# * `body`: binary; what `message.py` says of bodies;
# * `key`: string; null for messages without the annotation `x-routing-key`;
# * `properties`: struct; null for messages without. The fields are those of `Properties`: user_id
#   is binary, the two times are timestamp[ms, UTC] (null outside the years 1 to 9999),
#   group_sequence is int64, all others are strings;
# * `application_properties`: map<string, string>; null for messages without any.
#
# What is no text becomes a string as `as_text` says. The metadata of the schema holds the name of
# the stream under `stream`. body and key become large_binary and large_string in a batch of more
# than 2 GiB: of one message, or where `batch_max` was raised.
#
# Three ways lead there, each many times slower than the one before, and all to the same rows: plain
# messages of one size per run (`rows`); messages with a body and maybe a key
# (`layouts`); any AMQP 1.0 message, one by one (`message`). What is not asked for is not
# looked into: neither chunks without wanted offsets, nor the inside of sections without wanted
# columns.


class BatchReader:
    """Turns the chunks of one stream into record batches."""

    def __init__(
        self,
        stream: str,
        columns: Columns = Columns(),
        limits: Limits = Limits(),
        check_crc: bool = True,
    ) -> None:
        self._stream = stream
        self._columns = columns
        self._limits = limits
        self._check_crc = check_crc
        self._schema: pa.Schema | None = None

    def batches(
        self, chunks: Iterable[memoryview], first: int = 0, end: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The messages of `chunks` at offsets from `first` and below `end`, in order.

        A batch is made of at most `Limits.batch_max`, or of one message. What is packed is unpacked
        as batches are asked for, and no more of it is held than a batch and a sub-entry batch.
        """
        wanted = Wanted(first, end)
        if end is None or first < end:
            yield from self._made_of(self._runs(chunks, wanted), wanted)

    def _made_of(self, runs: Iterable[Run], wanted: Wanted) -> Iterator[pa.RecordBatch]:
        for part in parts(runs, self._limits.batch_max):
            columns = self._columns_of(part, wanted)
            if columns is None:
                yield from self._made_of(self._opened(part, wanted), wanted)
                continue
            part.clear()  # the application's time costs no memory
            if columns:
                yield pa.RecordBatch.from_arrays(
                    list(columns.values()), schema=self._schema_of(columns)
                )
            del columns

    def _runs(self, chunks: Iterable[memoryview], wanted: Wanted) -> Iterator[Run]:
        """The runs of the chunks whose range of offsets meets the one asked for.

        Where there are as many messages as entries there are hardly any batches, and a chunk is
        taken whole. If there are some all the same, or something is wrong, that shows.
        """
        for chunk in chunks:
            header = parse_header(chunk)
            if not wanted.meets(header.first_offset, header.end_offset):
                continue
            data = chunk[HEADER_SIZE:]
            if self._check_crc:
                check_crc(header, data)
            run = whole(header, data)
            if header.entries == header.records and run.weight <= self._limits.batch_max:
                yield run
            else:
                yield from self._split(run, header.entries, wanted)

    def _split(self, chunk: Run, entries: int, wanted: Wanted) -> Iterator[Run]:
        for run in split(chunk, entries, wanted, self._limits, self._stream):
            yield from cut(run, self._limits.batch_max)
            del run  # not held while the next one is unpacked

    def _opened(self, part: Sequence[Run], wanted: Wanted) -> Iterator[Run]:
        """The same messages, which were not where they should be, with no chunk taken whole."""
        if not any(run.unopened for run in part):
            raise ProtocolError("a batch holds other messages than it says")
        for run in part:
            if run.unopened:
                yield from self._split(run, run.records, wanted)
            else:
                yield run

    def _columns_of(self, runs: list[Run], wanted: Wanted) -> _Columns | None:
        """None if the runs do not hold the messages that they should; empty if none is wanted."""
        columns = self._of_equal_bodies(runs, *wanted)
        if columns is None:
            rows = locate(runs)
            if rows is None:
                return None
            rows = _between(rows, *wanted)
            columns = self._of_any_messages(rows) if len(rows) else {}
        return columns

    def _schema_of(self, columns: _Columns) -> pa.Schema:
        # Made once: of a batch of a few hundred messages it would be a fifth of the work.
        if self._schema is None or self._schema.field("body").type != columns["body"].type:
            fields = [(name, array.type) for name, array in columns.items()]
            self._schema = pa.schema(fields, metadata={"stream": self._stream})
        return self._schema

    def _of_equal_bodies(self, runs: list[Run], first: int, end: int | None) -> _Columns | None:
        """None if the runs do not all hold plain messages of one size."""
        if self._columns.raw:
            return None
        tables, firsts, times = [], [], []
        for run in runs:
            table = table_of_bodies(run)
            if table is None:
                return None
            skipped = max(first - run.first_offset, 0)
            kept = table[skipped : None if end is None else max(end - run.first_offset, 0)]
            if len(kept):
                tables.append(kept)
                firsts.append(run.first_offset + skipped)
                times.append(run.timestamp_ms)
        if not tables:
            return None
        counts = [len(table) for table in tables]
        timestamps = np.repeat(times, counts)
        return {
            **_place_and_time(ranges(firsts, counts), timestamps),
            "body": bodies_of(tables),
            **self._on_request(len(timestamps), [], _NONE, []),
        }

    def _of_any_messages(self, rows: Rows) -> _Columns:
        columns = _place_and_time(rows.offsets, rows.timestamps)
        binary = type_for(pa.binary(), rows.buffer)
        if self._columns.raw:
            return columns | {"body": slices(binary, rows.buffer, rows.starts, rows.ends)}
        layout = layout_of(rows, self._columns)
        known, others = np.flatnonzero(layout.known), np.flatnonzero(~layout.known)
        messages = [
            decode_message(rows.buffer[start:end].data)
            for start, end in zip(rows.starts[others], rows.ends[others], strict=True)
        ]
        bodies = slices(binary, rows.buffer, layout.body_starts[known], rows.ends[known])
        other_bodies = pa.array([message.body for message in messages], binary)
        return {
            **columns,
            "body": scatter(binary, len(rows), [(known, bodies), (others, other_bodies)]),
            **self._on_request(len(rows), self._keys(rows, layout), others, messages),
        }

    def _keys(self, rows: Rows, layout: Layout) -> list[Part]:
        if not self._columns.key:
            return []
        keyed = np.flatnonzero(layout.keyed)
        keys = slices(
            type_for(pa.string(), rows.buffer),
            rows.buffer,
            layout.key_starts[keyed],
            layout.key_ends[keyed],
        )
        check_text(keys)
        return [(keyed, keys)]

    def _on_request(
        self, count: int, keys: list[Part], others: Integers, messages: list[Message]
    ) -> _Columns:
        """The columns asked for, of `keys`, and of messages that were read one by one."""
        columns = {}
        if self._columns.key:
            kind = keys[0][1].type if keys else pa.string()
            more = pa.array([message.key for message in messages], kind)
            columns["key"] = scatter(kind, count, [*keys, (others, more)])
        if self._columns.properties:
            part = properties_array([message.properties for message in messages])
            columns["properties"] = scatter(PROPERTIES, count, [(others, part)])
        if self._columns.application_properties:
            entries = [message.application_properties for message in messages]
            part = application_properties_array(entries)
            columns["application_properties"] = scatter(
                APPLICATION_PROPERTIES, count, [(others, part)]
            )
        return columns


def _between(rows: Rows, first: int, end: int | None) -> Rows:
    kept = rows.offsets >= first
    if end is not None:
        kept &= rows.offsets < end
    return rows if kept.all() else rows.where(kept)


def _place_and_time(offsets: Integers, timestamps: Integers) -> _Columns:
    times = pa.Array.from_buffers(TIME, len(timestamps), [None, pa.py_buffer(timestamps)])
    return {"offset": pa.array(offsets), "timestamp": times}
