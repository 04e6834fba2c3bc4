"""The client's record batches as Spark takes them: exactly its types, names and order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from sharding.stream.arrow.batches import PROPERTIES
from spark.options.read import ReadOptions
from spark.process import environment
from spark.read.cluster_view import ClusterView
from spark.read.planning import StreamRange

if TYPE_CHECKING:
    import pyarrow as pa

_TIME = pa.timestamp("us", "UTC")  # Spark knows no other unit
_PROPERTIES = pa.struct(
    [
        (field.name, _TIME if pa.types.is_timestamp(field.type) else field.type)
        for field in PROPERTIES
    ]
)
_ARROW = {
    "key": pa.string(),
    "value": pa.binary(),
    "stream": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": _TIME,
    "properties": _PROPERTIES,
    "headers": pa.map_(pa.string(), pa.string()),
    "node": pa.string(),
}
_CLIENT_NAMES = {"value": "body", "headers": "application_properties"}
_SMALL_MAX = 2**31 - 1
"""Bytes that one column of a batch may hold in Spark, which has no large types."""


@dataclass(frozen=True)
class Origin:
    """What all rows of a batch have in common."""

    stream: str
    partition: int
    node: str


class RowMaker:
    """Makes batches of the same columns, one after the other."""

    def __init__(self, columns: Sequence[str], small_max: int = _SMALL_MAX) -> None:
        self.schema = pa.schema([(column, _ARROW[column]) for column in columns])
        self._small_max = small_max
        self._constants: dict[str, tuple[str | int, pa.Array]] = {}

    def batches(self, batch: pa.RecordBatch, origin: Origin) -> Iterator[pa.RecordBatch]:
        """`batch` in Spark's schema: one, or several if it is larger than Spark can take."""
        for part in _small_enough(batch, self._small_max):
            arrays = [self._array(part, origin, field) for field in self.schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _array(self, batch: pa.RecordBatch, origin: Origin, field: pa.Field) -> pa.Array:
        if field.name in ("stream", "partition", "node"):
            return self._constant(getattr(origin, field.name), field, batch.num_rows)
        name = _CLIENT_NAMES.get(field.name, field.name)
        if name not in batch.schema.names:  # the key of a raw message
            return pa.nulls(batch.num_rows, field.type)
        array = batch.column(name)
        return array if array.type == field.type else array.cast(field.type)

    def _constant(self, value: str | int, field: pa.Field, count: int) -> pa.Array:
        """`value`, `count` times: a part of a longer array, which is made again only to grow."""
        kept, array = self._constants.get(field.name, (None, None))
        if array is None or kept != value or len(array) < count:
            array = pa.repeat(pa.scalar(value, field.type), count)
            self._constants[field.name] = value, array
        return array.slice(0, count)


def _small_enough(batch: pa.RecordBatch, most: int) -> Iterator[pa.RecordBatch]:
    """Parts of the batch whose bodies fit into a small column; a row is never cut."""
    bodies = batch.column("body")
    if pa.types.is_binary(bodies.type) and most == _SMALL_MAX:
        yield batch
        return
    total = pc.sum(pc.binary_length(bodies)).as_py() or 0
    if total <= most or batch.num_rows <= 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _small_enough(batch.slice(0, half), most)
    yield from _small_enough(batch.slice(half), most)


def read(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of `partition`, from a near replica, over the connections that the process keeps."""
    from spark.read.rows import Origin, RowMaker

    if not isinstance(partition, StreamRange):
        return  # Spark makes a partition of its own where a source has none
    rows = RowMaker(options.columns)
    with environment(options.connect) as streams:
        for batch, node in ClusterView(streams, options).read(partition):
            origin = Origin(partition.stream, partition.partition, node)
            yield from rows.batches(batch, origin)
