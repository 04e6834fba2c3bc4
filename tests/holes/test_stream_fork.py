"""A child that was forked has no part in its parent's connections (20b).

Both wrote to one connection under the same publishing ids: the broker kept the child's messages and
dropped the parent's as duplicates, and the parent reported them as stored.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator

import pytest

from sharding.errors import LocalError
from sharding.stream import StreamEnvironment
from tests.cluster import Cluster
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.streams import environment_of, stream_in

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster, **patient.STREAMS) as opened:
        yield opened


def in_child(*calls: Callable[[], object]) -> list[str]:
    """What calls in a forked child raise, or their results, as text."""
    ours, its = os.pipe()
    child = os.fork()
    if not child:
        for call in calls:
            try:
                said = repr(call())
            except LocalError as error:
                said = f"LocalError: {error}"
            except BaseException as error:
                said = type(error).__name__
            os.write(its, said.encode() + b"\n")
        os._exit(0)
    os.close(its)
    try:
        said_all = b""
        while select.select([ours], [], [], PATIENCE)[0] and (more := os.read(ours, 65536)):
            said_all += more
    finally:
        os.close(ours)
        os.kill(child, 9)  # one that has ended stays until it is waited for
        os.waitpid(child, 0)
    return said_all.decode().splitlines()


def test_child_is_told_and_the_parent_s_messages_are_stored(
    environment: StreamEnvironment,
) -> None:
    with stream_in(environment) as stream, environment.producer(stream, name="parent") as producer:
        producer.send(b"parent 0")
        assert producer.flush(PATIENCE).stored == 1
        consumer = environment.consumer(stream, offset="first", **patient.READER)
        messages = consumer.messages(timeout=PATIENCE)
        found = [next(messages).body]
        under_way = environment.read_range(stream, 0, 1)
        assert next(under_way).num_rows == 1
        said = in_child(
            under_way._found.close,  # what the end of a process does to a range that is being read
            lambda: producer.send(b"child"),
            lambda: producer.flush(1),
            lambda: next(messages),
            lambda: environment.producer(stream, name="parent"),
            lambda: environment.offsets(stream),
            lambda: list(environment.read_range(stream, 0, 1)),
            lambda: producer.close(),
            lambda: consumer.close(),
            lambda: environment.close(),
        )
        assert len(said) == 10
        assert all("made before a fork" in each for each in said[:7])
        # As it leaves its `with` blocks: nothing to say, and nothing to close.
        assert said[7:] == ["None"] * 3
        under_way.close()
        for number in (1, 2):
            producer.send(b"parent %d" % number)
        assert producer.flush(PATIENCE).stored == 2
        found += [next(messages).body for _ in range(2)]
        consumer.close()
        assert found == [b"parent %d" % number for number in range(3)]


def test_child_makes_an_environment_of_its_own(
    environment: StreamEnvironment, cluster: Cluster
) -> None:
    def publish() -> object:
        with environment_of(cluster, **patient.STREAMS) as own, own.producer(stream) as producer:
            producer.send(b"child")
            return producer.flush(PATIENCE).stored

    with stream_in(environment) as stream:
        assert in_child(publish) == ["1"]
