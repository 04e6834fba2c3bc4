"""Which columns of the rows become key, body, properties and headers; checked when planned.

| part | type of its column |
|---|---|
| key | string or binary |
| value | string or binary |
| properties | a struct; its fields are named as AMQP's properties are |
| headers | a map from string to string, number, boolean or binary |
| filter | string |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spark.option_values import BadOption
from spark.write_options import WriteOptions

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

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

_HEADER_VALUES: Final = (*_TEXT, *_WHOLE, "float", "double", "boolean", "binary")
_BYTES: Final = (*_TEXT, "binary")


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
            _check_headers(there[self.headers])


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


def _check_headers(kind: DataType) -> None:
    if kind.typeName() != "map" or (
        kind.keyType.typeName() not in _TEXT  # type: ignore[attr-defined]
        or kind.valueType.typeName() not in _HEADER_VALUES  # type: ignore[attr-defined]
    ):
        rule = "must be a map from string to string, number, boolean or binary"
        raise BadOption("headersColumn", rule, kind.simpleString())


def _shard_word(options: WriteOptions) -> str:
    return "partition" if options.kind == "superStream" else "shard"
