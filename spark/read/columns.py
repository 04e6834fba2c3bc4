"""The columns of the source: which there are, and what the client is asked for to fill them.

| column | type | what |
|---|---|---|
| `key` | string | the annotation `x-routing-key`; null where a message has none |
| `value` | binary | the body |
| `stream` | string | the stream that the row was read from; of a super stream, its partition |
| `partition` | int | the number of that stream in its super stream; 0 for a stream of its own |
| `offset` | bigint | |
| `timestamp` | timestamp | when the broker stored the message |
| `properties` | struct | the properties of AMQP 1.0; null where a message has none |
| `headers` | map<string, string> | the application properties; null where a message has none |
| `node` | string | host and port of the node that the row was read from |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sharding.stream.options import Columns

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

DEFAULT_COLUMNS = ("key", "value", "stream", "partition", "offset", "timestamp")
COLUMNS = (*DEFAULT_COLUMNS, "properties", "headers", "node")


def spark_schema(columns: Sequence[str]) -> StructType:
    from pyspark.sql import types

    text = types.StringType()
    properties = {
        "message_id": text,
        "user_id": types.BinaryType(),
        "to": text,
        "subject": text,
        "reply_to": text,
        "correlation_id": text,
        "content_type": text,
        "content_encoding": text,
        "absolute_expiry_time": types.TimestampType(),
        "creation_time": types.TimestampType(),
        "group_id": text,
        "group_sequence": types.LongType(),
        "reply_to_group_id": text,
    }
    known: dict[str, DataType] = {
        "key": text,
        "value": types.BinaryType(),
        "stream": text,
        "partition": types.IntegerType(),
        "offset": types.LongType(),
        "timestamp": types.TimestampType(),
        "properties": _struct(properties),
        "headers": types.MapType(text, text),
        "node": text,
    }
    return _struct({column: known[column] for column in columns})


def client_columns(columns: Sequence[str], raw: bool) -> Columns:
    """What the client has to take out of each message; what nobody asks for costs nothing."""
    return Columns(
        key="key" in columns and not raw,
        properties="properties" in columns,
        application_properties="headers" in columns,
        raw=raw,
    )


def _struct(fields: Mapping[str, DataType]) -> StructType:
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(name, kind) for name, kind in fields.items()])
