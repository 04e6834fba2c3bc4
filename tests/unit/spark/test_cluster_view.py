"""What a task reads of a range is what was planned, or it says why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from sharding.stream.errors import EndsTooEarly
from spark.options.read import ReadOptions
from spark.read.cluster_view import ClusterView
from spark.read.planning import Seen, StreamGone, StreamRange

PLANNED = StreamRange("s", 0, 0, 1_000, Seen(1_000, 900, 7))


class Reading(Iterator[pa.RecordBatch]):
    node = "n:5552"

    def __init__(self, *batches: pa.RecordBatch | Exception) -> None:
        self._left = iter(batches)

    def __next__(self) -> pa.RecordBatch:
        found = next(self._left)
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        pass


class Environment:
    """A stream of which a range ends at offset 300, and then is said to end there."""

    def __init__(self, chunk_is_there: bool) -> None:
        self.chunk_is_there = chunk_is_there

    def read_range(self, stream: str, first: int, end: int, **how: Any) -> Reading:
        time = pa.array([7], pa.timestamp("ms", "UTC"))
        rows = [pa.record_batch({"offset": [at], "timestamp": time}) for at in (299, 900)]
        doubt = [EndsTooEarly(stream, end, 300)] if how.get("known_end", 0) >= end else []
        if first == 900:
            return Reading(rows[1]) if self.chunk_is_there else Reading(*doubt)
        return Reading(rows[0], *doubt)


def read(chunk_is_there: bool, **options: str) -> int:
    view: Any = ClusterView(
        Environment(chunk_is_there),  # type: ignore[arg-type]
        ReadOptions.parse({"stream": "s", **options}).for_batch(),
    )
    return sum(batch.num_rows for batch, _ in view.read(PLANNED))


@pytest.mark.parametrize("loss", ["true", "false"])
def test_range_that_ends_before_what_was_planned_fails_the_task_if_the_stream_is_the_same(
    loss: str,
) -> None:
    """700 of 1,000 rows were skipped, and the task succeeded."""
    with pytest.raises(EndsTooEarly, match=r"'s' is said to end at offset 300, but had"):
        read(True, failOnDataLoss=loss)


def test_range_that_ends_before_what_was_planned_is_a_loss_if_the_stream_is_another() -> None:
    with pytest.raises(StreamGone, match="was deleted and made again after offsets 0 to 1000"):
        read(False)
    assert read(False, failOnDataLoss="false") == 1
