"""Streams as a batch: the driver fixes the ranges, the tasks read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from spark.cluster_view import ClusterView
from spark.connections import environment
from spark.offsets import Extent
from spark.option_values import BadOption
from spark.partitions import StreamRange, cut
from spark.positions import Place, Positions, resolve
from spark.read_options import ReadOptions
from spark.reading import read

if TYPE_CHECKING:
    import pyarrow as pa


class BatchReader(DataSourceReader):
    """Reads what the streams hold when the query is planned."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[StreamRange]:
        options = self._options
        with environment(options.connect) as streams:
            view = ClusterView(streams, options)
            found = view.streams()
            extents = view.extents(found)
            starts = places(options.starting, Place.EARLIEST, extents, view)
            ends = places(options.ending, Place.LATEST, extents, view)
        ranges = [
            StreamRange(stream, number, self._start(starts[stream], extents[stream]), ends[stream])
            for stream, number in found.items()
        ]
        for found_range in ranges:
            if found_range.first > found_range.end:
                rule = (
                    f"must not be after endingOffsets, {found_range.end} in {found_range.stream!r}"
                )
                raise BadOption("startingOffsets", rule, found_range.first)
        return cut(
            ranges,
            min_partitions=options.min_partitions,
            max_records=options.max_records_per_partition,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(self._options, partition)

    def _start(self, offset: int, extent: Extent) -> int:
        # Where a loss is allowed, nothing is gained by planning tasks for what is gone. Where it
        # is not, the task that finds it missing says so.
        return offset if self._options.fail_on_data_loss else max(offset, extent.first)


def places(
    asked: Positions | None,
    default: Place,
    extents: Mapping[str, Extent],
    view: ClusterView,
) -> dict[str, int]:
    """The offset in each stream that the option, or the default, means."""
    asked = asked or Positions("startingOffsets", default)
    offsets = {}
    for stream, position in asked.for_streams(extents).items():
        extent = extents[stream]

        def offset_at(timestamp_ms: int, stream: str = stream) -> int | None:
            return view.offset_at(stream, timestamp_ms)

        offset = resolve(position, extent.first, extent.end, offset_at)
        if offset > extent.end:
            rule = f"must be at most {extent.end}, where {stream!r} ends"
            raise BadOption(asked.option, rule, offset)
        offsets[stream] = offset
    return offsets
