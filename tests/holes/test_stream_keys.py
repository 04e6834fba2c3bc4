"""What a key may be is one rule: text or bytes, else an error that says so (s07)."""

from __future__ import annotations

from typing import Any

import pytest

from sharding.errors import InvalidInput
from tests.cluster import Cluster
from tests.support import patient
from tests.support.streams import environment_of, super_stream_in

pytestmark = pytest.mark.cluster


def test_keys_of_other_types_are_refused(cluster: Cluster) -> None:
    odd: list[Any] = [7, 7.0, None, ("a",), object()]
    with (
        environment_of(cluster, **patient.STREAMS) as environment,
        super_stream_in(environment, 2) as stream,
    ):
        with environment.producer(stream, partitioning=lambda *_: 0) as producer:
            for key in odd:
                with pytest.raises(InvalidInput, match="key"):
                    producer.send(b"x", key=key)
                with pytest.raises(InvalidInput, match="key"):
                    producer.send_many([b"y"], [key])
        assert [environment.offsets(each) for each in environment.partitions(stream)] == [None] * 2
