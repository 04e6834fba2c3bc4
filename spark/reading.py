"""What a task of a read does, batch or streaming: exactly its range of offsets, as Spark's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from spark.cluster_view import ClusterView
from spark.connections import environment
from spark.partitions import StreamRange
from spark.read_options import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa


def read(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of `partition`, from a near replica, over the connections that the process keeps."""
    from spark.rows import Origin, RowMaker

    if not isinstance(partition, StreamRange):
        return  # Spark makes a partition of its own where a source has none
    rows = RowMaker(options.columns)
    with environment(options.connect) as streams:
        for batch, node in ClusterView(streams, options).read(partition):
            origin = Origin(partition.stream, partition.partition, node)
            yield from rows.batches(batch, origin)
