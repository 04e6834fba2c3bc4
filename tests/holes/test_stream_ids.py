"""A publishing id that the producer gives itself is one that the stream does not have.

After a message with an id of the application's own the producer went on from there, also below what
the stream had: the broker dropped the next messages as duplicates and confirmed them, and they were
reported as stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sharding.stream import StreamEnvironment
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.streams import environment_of, publish, read_all, stream_in

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def environment(nodes: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(nodes, **patient.STREAMS) as opened:
        yield opened


@pytest.mark.parametrize("flushes", [False, True])
def test_message_without_an_id_is_stored_after_one_that_repeats_an_old_one(
    environment: StreamEnvironment, flushes: bool
) -> None:
    old = [b"old %d" % number for number in range(20)]
    new = [b"new %d" % number for number in range(3)]
    with stream_in(environment) as stream:
        publish(environment, stream, old, name="p")
        with environment.producer(stream, name="p") as producer:
            producer.send(old[4], publishing_id=5)
            if flushes:
                assert producer.flush(PATIENCE).stored == 1
            for body in new:
                producer.send(body)
            assert producer.flush(PATIENCE).all_stored
        with environment.consumer(stream, offset="first") as consumer:
            assert read_all(consumer, len(old) + len(new)) == {stream: old + new}
