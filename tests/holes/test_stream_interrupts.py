"""A signal handler's exception in the middle of `send` leaves a producer that works (s14)."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest

from sharding.stream import StreamEnvironment
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.streams import environment_of, stream_in

pytestmark = pytest.mark.cluster

ROUNDS = 10


class Interrupted(Exception):
    """As an application's own time-out is one."""


class Stopped(KeyboardInterrupt):
    pass


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster, **patient.STREAMS) as opened:
        yield opened


@pytest.mark.parametrize("kind", [Interrupted, Stopped])
def test_a_producer_works_after_an_interrupt(
    environment: StreamEnvironment, kind: type[BaseException]
) -> None:
    def ring(*_: object) -> None:
        raise kind

    moments = random.Random(14)
    with stream_in(environment) as stream:
        before = signal.signal(signal.SIGALRM, ring)
        try:
            for turn in range(ROUNDS):
                with environment.producer(stream, name=f"p{turn}") as producer:
                    returned = 0
                    try:
                        signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0005, 0.01))
                        while True:
                            producer.send(b"%d" % returned)
                            returned += 1
                    except kind:
                        pass
                    for _ in range(100):
                        producer.send(b"later")
                    report = producer.flush(PATIENCE)
                    assert report.all_stored
                    # The one that was interrupted is in the stream, or it is not.
                    assert report.stored - returned - 100 in (0, 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
