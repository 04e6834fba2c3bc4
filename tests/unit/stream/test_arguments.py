"""How a stream is made, as the two protocols are told."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sharding import InvalidInput
from sharding.stream.admin import check_stream_name
from sharding.stream.options import StreamArguments


def test_nothing_given_leaves_everything_to_the_broker() -> None:
    assert StreamArguments().over_streams() == {}
    assert StreamArguments().over_amqp() == {"x-queue-type": "stream"}


def test_both_protocols_say_the_same() -> None:
    arguments = StreamArguments(
        max_length_bytes=1_000_000,
        max_age=timedelta(minutes=2, milliseconds=1),
        max_segment_bytes=500_000,
        filter_bytes=32,
        initial_cluster_size=2,
        leader_locator="balanced",
    )
    over_streams = arguments.over_streams()
    assert over_streams == {
        "max-length-bytes": "1000000",
        "max-age": "121s",
        "stream-max-segment-size-bytes": "500000",
        "stream-filter-size-bytes": "32",
        "initial-cluster-size": "2",
        "queue-leader-locator": "balanced",
    }
    over_amqp = arguments.over_amqp()
    assert over_amqp.pop("x-queue-type") == "stream"
    assert {name: str(value) for name, value in over_amqp.items()} == {
        f"x-{name}": value for name, value in over_streams.items()
    }
    assert over_amqp["x-max-length-bytes"] == 1_000_000


def test_impossible_sizes_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="max_length_bytes"):
        StreamArguments(max_length_bytes=0)
    with pytest.raises(InvalidInput, match="max_age"):
        StreamArguments(max_age=timedelta())


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 256, "\ud800", "ä" * 128])
def test_names_that_brokers_do_not_take_are_refused_here(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_stream_name("stream", name)
