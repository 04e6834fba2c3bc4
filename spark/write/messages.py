"""Rows as messages: Arrow batches for the sinks, any rows for `publish_partition`. Pure.

A row without a body, or without a key where the key decides the shard, is refused with its place:
there is no message that would say "null" to other clients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from sharding.errors import InvalidInput
from sharding.maps.slots import key_bytes, key_text
from sharding.stream.messages.message import Properties, encode_data, encode_message
from sharding.stream.producer.partitioning import by_hash
from spark.options.write import MessageColumns

if TYPE_CHECKING:
    import pyarrow as pa

Key: TypeAlias = str | bytes
_KEY_TYPES = frozenset({str, bytes, type(None)})
Fields: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Messages:
    """As many of each as there are rows; None where no row has any."""

    bodies: Sequence[bytes]
    keys: Sequence[Key | None] | None = None
    properties: Sequence[Fields | None] | None = None
    headers: Sequence[Fields | None] | None = None
    filters: Sequence[str | None] | None = None

    def __len__(self) -> int:
        return len(self.bodies)

    @property
    def plain(self) -> bool:
        """Whether a message has nothing but a body and perhaps a key."""
        return self.properties is None and self.headers is None

    def encoded(self) -> list[bytes]:
        """Each as a whole AMQP 1.0 message, its key as annotation `x-routing-key`."""
        if self.plain and self.keys is None:
            return list(map(encode_data, self.bodies))
        if self.plain and self.keys is not None:
            return [
                encode_data(body) if key is None else _kept_head(key) + encode_data(body)
                for key, body in zip(self.keys, self.bodies, strict=True)
            ]
        nothing: Sequence[None] = (None,) * len(self.bodies)
        return [
            encode_message(
                body,
                key=None if key is None else key_text(key),
                properties=None if properties is None else stream_properties(properties),
                application_properties=headers,
            )
            for body, key, properties, headers in zip(
                self.bodies,
                self.keys or nothing,
                self.properties or nothing,
                self.headers or nothing,
                strict=True,
            )
        ]


def head_of(key: Key) -> bytes:
    """What stands before the data section in a message of this key and a body."""
    return encode_message(b"", key=key_text(key)).removesuffix(encode_data(b""))


_kept_head = lru_cache(4_096)(head_of)  # most keys come again and again


@dataclass
class RowCount:
    """How many rows of a task were taken so far, to say where a bad one is."""

    rows: int = 0


def of_batch(
    batch: pa.RecordBatch, columns: MessageColumns, count: RowCount, *, key_needed: bool
) -> Messages:
    """The rows of an Arrow batch in which every named column is."""
    messages = Messages(
        bodies=_bytes(batch.column(columns.value)),
        keys=None if columns.key is None else batch.column(columns.key).to_pylist(),
        properties=_values(batch, columns.properties),
        headers=_headers(_values(batch, columns.headers)),
        filters=_values(batch, columns.filter),
    )
    _check(messages, columns, count, key_needed=key_needed)
    count.rows += len(messages)
    return messages


def of_rows(
    rows: Iterable[object],
    columns: MessageColumns,
    *,
    key_needed: bool,
    needed: Collection[str] = (),
    at_once: int = 1_000,
) -> Iterator[Messages]:
    """Rows of any kind, `at_once` of them as one.

    * a `Row` or a mapping: by the names of the columns; those in `needed` must be there;
    * a pair: key and body;
    * bytes or text: the body alone.
    """
    rows = iter(rows)
    count = RowCount()
    while part := list(islice(rows, at_once)):
        parts = [_parts(row, columns, needed, count.rows + at) for at, row in enumerate(part)]
        keys, bodies, properties, headers, filters = zip(*parts, strict=True)
        messages = Messages(
            bodies=[
                body.encode() if isinstance(body, str) else _immutable(body) for body in bodies
            ],
            keys=_unless_all_null(list(map(_immutable, keys))),
            properties=_unless_all_null(properties),
            headers=_headers(_unless_all_null(headers)),
            filters=None if columns.filter is None else filters,
        )
        _check(messages, columns, count, key_needed=key_needed)
        count.rows += len(messages)
        yield messages


def stream_properties(fields: Fields) -> Properties:
    """The properties of AMQP 1.0; times without a zone are taken as UTC."""
    named: dict[str, Any] = {
        name: in_utc(value) if isinstance(value, datetime) else value
        for name, value in fields.items()
    }
    try:
        return Properties(**named)
    except TypeError:
        raise InvalidInput("properties", "must be named as AMQP's are", sorted(fields)) from None


def in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _parts(
    row: object, columns: MessageColumns, needed: Collection[str], number: int
) -> tuple[Any, Any, Fields | None, Any, Any]:
    if type(row) is tuple and len(row) == 2:
        return (*row, None, None, None)
    names = getattr(row, "__fields__", None)
    if names is not None:
        row = dict(zip(names, row, strict=True))  # type: ignore[call-overload]
    if isinstance(row, Mapping):
        for name in (columns.value, *needed):
            if name not in row:
                raise InvalidInput(f"row {number}", f"must have {name!r}", sorted(row))
        properties: Any = row.get(columns.properties)
        return (
            row.get(columns.key),
            row[columns.value],
            _with_zones(properties.asDict() if hasattr(properties, "asDict") else properties),
            row.get(columns.headers),
            row.get(columns.filter),
        )
    if isinstance(row, str | bytes | bytearray | memoryview):
        return None, row, None, None, None
    rule = "must be a Row or mapping, a pair of key and body, or a body"
    raise InvalidInput(f"row {number}", rule, type(row).__name__)


def _with_zones(fields: Any) -> Any:
    """A row of Spark's has times of the worker's zone, without saying so."""
    if not isinstance(fields, Mapping):
        return fields
    return {
        name: value.astimezone(UTC) if isinstance(value, datetime) else value
        for name, value in fields.items()
    }


def _immutable(value: Any) -> Any:
    """Spark gives binary columns as bytearray where it is told to."""
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def _check(
    messages: Messages, columns: MessageColumns, count: RowCount, *, key_needed: bool
) -> None:
    if not set(map(type, messages.bodies)) <= {bytes}:
        at = next(at for at, body in enumerate(messages.bodies) if type(body) is not bytes)
        rule = f"{columns.value!r} must be bytes or text, not null"
        raise InvalidInput(f"row {count.rows + at} of the task", rule, messages.bodies[at])
    if not set(map(type, messages.keys or ())) <= _KEY_TYPES:
        _check_keys(messages.keys or (), columns, count)
    if not key_needed:
        return
    if messages.keys is None or None in messages.keys:
        at = 0 if messages.keys is None else messages.keys.index(None)
        rule = f"{columns.key or 'the key'!r} decides the shard and must not be null"
        raise InvalidInput(f"row {count.rows + at} of the task", rule, None)


def _check_keys(keys: Sequence[Key | None], columns: MessageColumns, count: RowCount) -> None:
    for at, key in enumerate(keys):
        if key is None:
            continue
        try:
            key_bytes(key)
        except InvalidInput as refused:
            where = f"row {count.rows + at} of the task"
            raise InvalidInput(where, f"{columns.key or 'the key'!r} {refused.rule}", key) from None


def _bytes(column: pa.Array) -> list[bytes]:
    import pyarrow as pa

    if pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    elif pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    found: list[bytes] = column.to_pylist()
    return found


def _values(batch: pa.RecordBatch, name: str | None) -> list[Any] | None:
    return None if name is None else batch.column(name).to_pylist()


def _headers(values: Sequence[Any] | None) -> list[Fields | None] | None:
    """Arrow gives a map as pairs."""
    return None if values is None else [None if value is None else dict(value) for value in values]


def _unless_all_null(values: Sequence[Any]) -> Sequence[Any] | None:
    return None if values.count(None) == len(values) else values


_KEYS_KEPT = 16_384
"""A few megabytes."""


# Rows as encoded messages, dealt out to the partitions of a super stream by their keys. Pure.
#
# A key's partition and the head of its messages are found once and kept: most keys come again and
# again, and to hash and encode a key costs several times as much as all the rest of a row.


@dataclass(slots=True)
class Share:
    """What one partition gets; of filter values as many as of messages, or none."""

    messages: list[bytes] = field(default_factory=list)
    filters: list[str | None] = field(default_factory=list)


class Dealer:
    """Deals by the hash that all stream clients agree on.

    `bound` has the number of a partition for each binding: the hash chooses from those.
    """

    def __init__(self, bound: Sequence[int], keys_kept: int = _KEYS_KEPT) -> None:
        self._partitions = max(bound) + 1
        self._routes = _Routes(bound, keys_kept)

    def deal(self, messages: Messages) -> list[Share]:
        """A share for each partition, in order. Every row has a key: `of_batch` sees to that."""
        keys = cast("Sequence[Key]", messages.keys)
        routes = self._routes
        shares = [Share() for _ in range(self._partitions)]
        add = [share.messages.append for share in shares]
        if messages.plain:
            for key, body in zip(keys, messages.bodies, strict=True):
                number, head = routes[key]
                add[number](head + encode_data(body))
        else:
            for key, message in zip(keys, messages.encoded(), strict=True):
                add[routes[key][0]](message)
        if messages.filters is not None:
            for key, value in zip(keys, messages.filters, strict=True):
                shares[routes[key][0]].filters.append(value)
        return shares


class _Routes(dict[Key, tuple[int, bytes]]):
    """By key, the number of its partition and what stands before the body in its messages."""

    def __init__(self, bound: Sequence[int], most: int) -> None:
        super().__init__()
        self._bound = bound
        self._most = most

    def __missing__(self, key: Key) -> tuple[int, bytes]:
        if len(self) >= self._most:
            self.clear()  # cheaper than to know which are the oldest
        route = self[key] = self._bound[by_hash(key, len(self._bound))], head_of(key)
        return route
