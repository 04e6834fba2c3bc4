"""What a sink can be asked for: where to, from which columns, and how long to wait.

| option | default | meaning |
|---|---|---|
| `superStream`, `stream`, `queue` | exactly one | where the rows go; `queue` is a sharded one |
| `keyColumn` | `key`, if there is one | decides the partition or shard; needed for those |
| `valueColumn` | `value` | the body |
| `propertiesColumn` | `properties`, if there is one | struct of AMQP's properties |
| `headersColumn` | `headers`, if there is one | map of application properties or headers |
| `filterColumn` | none | the filter value of each row; streams on RabbitMQ 3.13 or newer |
| `routing` | `hash` | `broker`: by the binding keys of the super stream |
| `compression` | `none` | of sub-entry batches: `gzip`, `snappy`, `lz4`, `zstd` |
| `subEntryMessages` | 0; 100 with a compression | how many messages share an entry |
| `amqpUri` | `amqp://localhost:5672` | of queue shards: addresses of one cluster, without a login |
| `trustedHosts` | none | hosts of other nodes, `*.example.com`, that may get the login too |
| `through` | `exchange` | of queue shards: `default` is cheaper, and consumers see it |
| `maxUnconfirmed` | 50000; queues 2000 | how many messages may be on their way at once |
| `confirmTimeout` | `30s` | for the broker's word on one message |
| `flushTimeout` | `2m` | for the outcome of all that is left at the end of a task |
| `maxTaskBytes` | 536870912 | what a task of `exactly_once` may hold: all its rows of a batch |

Columns that no option names are not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from spark.options.connect import uris_without_login
from spark.options.values import BadOption, OptionValues

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

Kind: TypeAlias = Literal["superStream", "stream", "queue"]
Routing: TypeAlias = Literal["hash", "broker"]
Through: TypeAlias = Literal["exchange", "default"]
Codec: TypeAlias = Literal["none", "gzip", "snappy", "lz4", "zstd"]

_ROUTING: dict[str, Routing] = {"hash": "hash", "broker": "broker"}
_THROUGH: dict[str, Through] = {"exchange": "exchange", "default": "default"}
_CODECS: dict[str, Codec] = {
    "none": "none", "gzip": "gzip", "snappy": "snappy", "lz4": "lz4", "zstd": "zstd"
}  # fmt: skip
_KINDS: tuple[Kind, ...] = ("superStream", "stream", "queue")
_ONLY_STREAMS = ("filterColumn", "compression", "subEntryMessages", "maxTaskBytes")
_ONLY_QUEUES = ("amqpUri", "through", "trustedHosts")
_SPARKS_OWN = ("checkpointLocation", "path", "queryName")  # it hands all of a query's options on
_DEFAULT_AMQP = "amqp://localhost:5672"
STREAM_OWNERS = "ownShards"
"""Set by `exactly_once`, and by nothing else: it holds only with the query that is made there."""


@dataclass(frozen=True)
class ColumnNames:
    """The columns as asked for; None is the default name, if there is such a column."""

    key: str | None = None
    value: str | None = None
    properties: str | None = None
    headers: str | None = None
    filter: str | None = None


@dataclass(frozen=True)
class WriteOptions:
    kind: Kind
    name: str
    """Of the stream, super stream or logical queue."""
    columns: ColumnNames = ColumnNames()
    routing: Routing = "hash"
    compression: Codec = "none"
    sub_entry_messages: int | None = None
    amqp_uris: tuple[str, ...] = (_DEFAULT_AMQP,)
    trusted_hosts: tuple[str, ...] = ()
    through: Through = "exchange"
    max_unconfirmed: int = 50_000
    confirm_timeout: float = 30.0
    flush_timeout: float = 120.0
    max_task_bytes: int = 512 * 1024 * 1024
    stream_owners: str | None = None
    """The text of an `StreamOwners`."""

    @classmethod
    def parse(cls, values: OptionValues) -> WriteOptions:
        """Asks for every name, whatever the target, so that none of them is taken for unknown."""
        for name in _SPARKS_OWN:
            values.given(name)
        kind: Kind = next(kind for kind in _KINDS if kind == values.one_of(*_KINDS))
        for name in _ONLY_STREAMS:
            if values.given(name) and kind == "queue":
                raise BadOption(name, "is for streams; a queue has no such thing", name)
        for name in _ONLY_QUEUES:
            if values.given(name) and kind != "queue":
                raise BadOption(name, "is for queue shards", kind)
        if values.given("routing") and kind != "superStream":
            raise BadOption("routing", "is for super streams", kind)
        compression = values.choice("compression", _CODECS, "none")
        sub_entries = 100 if compression != "none" else None
        if values.given("subEntryMessages"):
            sub_entries = values.whole("subEntryMessages", 0)
        if compression != "none" and not sub_entries:
            raise BadOption("subEntryMessages", "must be at least 1 with a compression", 0)
        columns = ColumnNames(
            key=values.text("keyColumn"),
            value=values.text("valueColumn"),
            properties=values.text("propertiesColumn"),
            headers=values.text("headersColumn"),
            filter=values.text("filterColumn"),
        )
        if columns.filter and sub_entries:
            raise BadOption("filterColumn", "can't be combined with subEntryMessages", sub_entries)
        return cls(
            kind=kind,
            name=values.text(kind, ""),
            columns=columns,
            routing=values.choice("routing", _ROUTING, "hash"),
            compression=compression,
            sub_entry_messages=sub_entries,
            amqp_uris=_amqp_uris(values),
            trusted_hosts=values.names("trustedHosts"),
            through=values.choice("through", _THROUGH, "exchange"),
            max_unconfirmed=values.whole(
                "maxUnconfirmed", 2_000 if kind == "queue" else 50_000, least=1
            ),
            confirm_timeout=values.seconds("confirmTimeout", 30.0),
            flush_timeout=values.seconds("flushTimeout", 120.0),
            max_task_bytes=values.whole("maxTaskBytes", 512 * 1024 * 1024, least=1),
            stream_owners=values.text(STREAM_OWNERS),
        )


def _amqp_uris(values: OptionValues) -> tuple[str, ...]:
    return uris_without_login(values, "amqpUri", ("amqp", "amqps")) or (_DEFAULT_AMQP,)


_TIMES: Final = ("timestamp", "timestamp_ntz", "timestamp_ltz")
_WHOLE: Final = ("byte", "short", "integer", "long")
_TEXT: Final = ("string", "varchar", "char")
STREAM_PROPERTIES: Final[Mapping[str, tuple[str, ...]]] = {
    "message_id": (*_TEXT, *_WHOLE, "binary"),
    "user_id": ("binary",),
    "to": _TEXT,
    "subject": _TEXT,
    "reply_to": _TEXT,
    "correlation_id": (*_TEXT, *_WHOLE, "binary"),
    "content_type": _TEXT,
    "content_encoding": _TEXT,
    "absolute_expiry_time": _TIMES,
    "creation_time": _TIMES,
    "group_id": _TEXT,
    "group_sequence": _WHOLE,
    "reply_to_group_id": _TEXT,
}
"""The fields of a properties column for streams: AMQP 1.0's, as the source gives them."""

QUEUE_PROPERTIES: Final[Mapping[str, tuple[str, ...]]] = {
    "content_type": _TEXT,
    "content_encoding": _TEXT,
    "delivery_mode": _WHOLE,
    "priority": _WHOLE,
    "correlation_id": _TEXT,
    "reply_to": _TEXT,
    "expiration": _TEXT,
    "message_id": _TEXT,
    "creation_time": _TIMES,
    "type": _TEXT,
    "user_id": (*_TEXT, "binary"),
    "app_id": _TEXT,
}
"""The same for queue shards: AMQP 0-9-1's; its `timestamp` is called `creation_time` here too."""

_QUEUE_HEADERS: Final = (*_TEXT, *_WHOLE, "boolean", "binary")
"""Values of headers that pika can write: it has no way for a number with a fraction."""
_STREAM_HEADERS: Final = (*_QUEUE_HEADERS, "float", "double")
_BYTES: Final = (*_TEXT, "binary")


# Which columns of the rows become key, body, properties and headers; checked when planned.
#
# | part | type of its column |
# |---|---|
# | key | string or binary |
# | value | string or binary |
# | properties | a struct; its fields are named as AMQP's properties are |
# | headers | a map from string to string, number (for queues a whole one), boolean or binary |
# | filter | string |


@dataclass(frozen=True)
class MessageColumns:
    """Names of columns that are there."""

    value: str
    key: str | None = None
    properties: str | None = None
    headers: str | None = None
    filter: str | None = None

    @classmethod
    def find(cls, options: WriteOptions, schema: StructType) -> MessageColumns:
        """What `options` ask for, in rows of `schema`; `BadOption` names what does not fit."""
        asked = options.columns
        there = {field.name: field.dataType for field in schema.fields}
        value = _column("valueColumn", asked.value or "value", there, needed=True)
        found = cls(
            value=value or "",
            key=_column("keyColumn", asked.key or "key", there, needed=asked.key is not None),
            properties=_column(
                "propertiesColumn",
                asked.properties or "properties",
                there,
                needed=asked.properties is not None,
            ),
            headers=_column(
                "headersColumn",
                asked.headers or "headers",
                there,
                needed=asked.headers is not None,
            ),
            filter=asked.filter and _column("filterColumn", asked.filter, there, needed=True),
        )
        found._check_types(options, there)
        names = [field.name for field in schema.fields]
        for name in (found.value, found.key, found.properties, found.headers, found.filter):
            if name is not None and names.count(name) > 1:
                raise BadOption("columns", f"must not have {name!r} twice", names)
        return found

    def _check_types(self, options: WriteOptions, there: Mapping[str, DataType]) -> None:
        if self.key is None and options.kind != "stream":
            rule = f"must name the column that decides the {_shard_word(options)}"
            raise BadOption("keyColumn", rule, sorted(there))
        _check("valueColumn", self.value, there, _BYTES, "to_json(struct(…)) makes text of a row")
        if self.key is not None:
            _check("keyColumn", self.key, there, _BYTES, "cast it")
        if self.filter is not None:
            _check("filterColumn", self.filter, there, _TEXT, "cast it")
        if self.properties is not None:
            allowed = QUEUE_PROPERTIES if options.kind == "queue" else STREAM_PROPERTIES
            _check_properties(there[self.properties], allowed)
        if self.headers is not None:
            _check_headers(there[self.headers], options)


def _column(option: str, name: str, there: Mapping[str, DataType], *, needed: bool) -> str | None:
    """The column of this name, as Spark compares names: in any case, if that is clear."""
    if name in there:
        return name
    alike = [column for column in there if column.lower() == name.lower()]
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise BadOption(option, f"{name!r} is not clear: several columns differ by case", alike)
    if needed:
        raise BadOption(option, f"must be a column; {name!r} is none of them", sorted(there))
    return None


def _check(
    option: str, name: str, there: Mapping[str, DataType], allowed: tuple[str, ...], hint: str
) -> None:
    kind = there[name]
    if kind.typeName() not in allowed:
        wanted = " or ".join(word for word in allowed if word not in ("varchar", "char"))
        raise BadOption(option, f"{name!r} must be {wanted}; {hint}", kind.simpleString())


def _check_properties(kind: DataType, allowed: Mapping[str, tuple[str, ...]]) -> None:
    if kind.typeName() != "struct":
        raise BadOption("propertiesColumn", "must be a struct", kind.simpleString())
    # Its name was looked at above; mypy knows the base class only. The same below for maps.
    for field in kind.fields:  # type: ignore[attr-defined]
        if field.name not in allowed:
            rule = f"has no property {field.name!r}; there are {', '.join(allowed)}"
            raise BadOption("propertiesColumn", rule, kind.simpleString())
        if field.dataType.typeName() not in allowed[field.name]:
            rule = f"{field.name!r} must be {' or '.join(allowed[field.name])}"
            raise BadOption("propertiesColumn", rule, field.dataType.simpleString())


def _check_headers(kind: DataType, options: WriteOptions) -> None:
    is_queue = options.kind == "queue"
    allowed = _QUEUE_HEADERS if is_queue else _STREAM_HEADERS
    if kind.typeName() != "map" or (
        kind.keyType.typeName() not in _TEXT  # type: ignore[attr-defined]
        or kind.valueType.typeName() not in allowed  # type: ignore[attr-defined]
    ):
        number = "whole number" if is_queue else "number"
        rule = f"must be a map from string to string, {number}, boolean or binary"
        raise BadOption("headersColumn", rule, kind.simpleString())


def _shard_word(options: WriteOptions) -> str:
    return "partition" if options.kind == "superStream" else "shard"
