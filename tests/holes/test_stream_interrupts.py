"""A signal handler's exception in the middle of `send` leaves a producer that works (s14), and out
of a loop over messages a consumer that skips nothing: it skipped one in some ten interrupts."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest

from sharding.stream import ConsumerInterrupted, StreamEnvironment
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.streams import environment_of, publish, stream_in

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


COUNT = 100_000
INTERRUPTS = 150


def test_who_goes_on_with_a_consumer_after_interrupts_misses_nothing(
    environment: StreamEnvironment,
) -> None:
    awaits_one = True

    def ring(*_: object) -> None:
        if awaits_one:
            raise Interrupted

    moments = random.Random(14)
    with stream_in(environment) as stream:
        publish(environment, stream, [b"%d" % number for number in range(COUNT)])
        last = environment.offsets(stream)
        assert last is not None
        found: list[int] = []
        consumer = environment.consumer(stream, offset="first", credits=4)
        before = signal.signal(signal.SIGALRM, ring)
        try:
            for _ in range(INTERRUPTS):
                message = None
                try:
                    awaits_one = True
                    signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.00005, 0.003))
                    for message in consumer.messages(PATIENCE):
                        found.append(message.offset or 0)
                except Interrupted:
                    awaits_one = False
                except ConsumerInterrupted:
                    awaits_one = False
                    begin = consumer.positions[stream]
                    consumer.close()
                    consumer = environment.consumer(stream, offset=begin, credits=4)
                # The loop has it, though what came between was the append.
                if message is not None and message.offset not in found[-1:]:
                    found.append(message.offset or 0)
        finally:
            awaits_one = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            consumer.close()
        with environment.consumer(stream, offset=len(found)) as rest:
            for message in rest.messages(PATIENCE):
                found.append(message.offset or 0)
                if message.offset == last.last:
                    break
        assert found == list(range(last.last + 1))
