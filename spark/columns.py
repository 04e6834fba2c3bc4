"""The columns of the source: their types in Spark, and batches of the client turned into them.

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

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sharding.stream.columns import Columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

DEFAULT_COLUMNS = ("key", "value", "stream", "partition", "offset", "timestamp")
COLUMNS = (*DEFAULT_COLUMNS, "properties", "headers", "node")

_TEXT_PROPERTIES = (
    "message_id string, user_id binary, to string, subject string, reply_to string, "
    "correlation_id string, content_type string, content_encoding string, "
    "absolute_expiry_time timestamp, creation_time timestamp, group_id string, "
    "group_sequence bigint, reply_to_group_id string"
)
_SPARK_TYPES = {
    "key": "string",
    "value": "binary",
    "stream": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "properties": f"struct<{_TEXT_PROPERTIES}>",
    "headers": "map<string, string>",
    "node": "string",
}
_CLIENT_NAMES = {
    "key": "key",
    "value": "body",
    "offset": "offset",
    "timestamp": "timestamp",
    "properties": "properties",
    "headers": "application_properties",
}
_LARGEST_BATCH = 2**31 - 1
"""Bytes in one Arrow column that Spark can take: it has no large types."""


def spark_schema(columns: Sequence[str]) -> str:
    """As Spark's data definition language has it."""
    return ", ".join(f"`{column}` {_SPARK_TYPES[column]}" for column in columns)
