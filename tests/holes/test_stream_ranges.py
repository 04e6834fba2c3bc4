"""A range is read whole, with filters too, or what is gone is named (s04)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sharding.stream import DataLost, StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.streams import environment_of, stream_in

pytestmark = pytest.mark.cluster

KEPT = {"max_length_bytes": 400_000, "max_segment_bytes": 100_000}
FILTERED = {"filter_values": ("emea",)}


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster, **patient.STREAMS) as opened:
        if opened.server_version < (3, 13):
            pytest.skip("filter values came with RabbitMQ 3.13")
        yield opened


def fill(environment: StreamEnvironment, stream: str, first: int, count: int) -> None:
    with environment.producer(stream, filtering=True) as producer:
        for number in range(first, first + count):
            producer.send(b"%08d" % number + bytes(992), filter_value="emea")
            if number % 20 == 19:
                producer.flush(PATIENCE).raise_for_failures()


@pytest.mark.parametrize("how", [{}, FILTERED], ids=["all", "filtered"])
@pytest.mark.parametrize("on_data_loss", ["raise", "skip"])
def test_what_is_deleted_while_a_range_is_read_is_named(
    environment: StreamEnvironment, how: dict[str, tuple[str]], on_data_loss: str
) -> None:
    with stream_in(environment, **KEPT) as stream:
        fill(environment, stream, 0, 300)
        begins = environment.offsets(stream)
        assert begins is not None
        reading = environment.read_range(
            stream, begins.first, 300, credits=2, timeout=PATIENCE, on_data_loss=on_data_loss, **how
        )
        rows = next(reading).num_rows
        fill(environment, stream, 300, 1500)  # while the application is at work on its first batch

        def is_deleted() -> bool:
            stats = [environment.offsets(stream)]
            return all(each is not None and each.first > 300 for each in stats)

        wait_until(is_deleted)
        loss = None
        try:
            rows += sum(batch.num_rows for batch in reading)
        except DataLost as error:
            loss = error
        # What was delivered before it was deleted may still be read; but not less without a word.
        if on_data_loss == "raise":
            assert loss is not None or rows == 300 - begins.first
        else:
            assert loss is None


def test_range_that_is_gone_as_a_whole_is_named(environment: StreamEnvironment) -> None:
    with stream_in(environment, **KEPT) as stream:
        fill(environment, stream, 0, 1500)
        wait_until(lambda: (ends := environment.offsets(stream)) is not None and ends.first > 300)
        for how in ({}, FILTERED):
            with pytest.raises(DataLost):
                list(environment.read_range(stream, 0, 300, timeout=PATIENCE, **how))
