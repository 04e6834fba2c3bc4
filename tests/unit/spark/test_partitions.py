"""Ranges are cut into tasks without losing or repeating an offset."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from spark.read.planning import StreamRange, cut

RANGES = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 400)).map(
        lambda found: (found[0], found[0] + found[1])
    ),
    max_size=6,
).map(lambda pairs: [StreamRange(f"s{n}", n, *pair) for n, pair in enumerate(pairs)])
COUNTS = st.one_of(st.none(), st.integers(1, 40))


@given(RANGES, COUNTS, COUNTS)
def test_every_offset_is_in_exactly_one_task(
    ranges: list[StreamRange], least: int | None, most: int | None
) -> None:
    tasks = cut(ranges, min_partitions=least, max_records=most)
    read = [(task.stream, at) for task in tasks for at in range(task.first, task.end)]
    assert read == [(found.stream, at) for found in ranges for at in range(found.first, found.end)]
    assert all(task.size > 0 for task in tasks)
    if most is not None:
        assert all(task.size <= most for task in tasks)
    if least is not None:
        assert len(tasks) >= min(least, len(read))


def test_without_limits_a_stream_is_one_task() -> None:
    ranges = [StreamRange("a", 0, 5, 9), StreamRange("b", 1, 7, 7), StreamRange("c", 2, 0, 1)]
    assert cut(ranges) == [ranges[0], ranges[2]]


def test_more_tasks_are_cut_where_the_rows_are() -> None:
    tasks = cut([StreamRange("a", 0, 0, 900), StreamRange("b", 1, 0, 100)], min_partitions=10)
    assert [task.size for task in tasks] == [100] * 10


def test_a_task_survives_pickling() -> None:
    task = StreamRange("a", 3, 5, 9)
    assert pickle.loads(pickle.dumps(task)) == task
