"""With offsets stored by themselves, what is in the application's hands counts when the application
comes back for more, and in no other way (s03)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from sharding.stream import Consumer, StreamEnvironment
from sharding.stream.consumer.consumer import _at_work
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.support import patient
from tests.support.streams import environment_of, publish, stream_in

pytestmark = pytest.mark.cluster

COUNT = 500


@pytest.fixture(scope="module")
def environment(cluster: Cluster) -> Iterator[StreamEnvironment]:
    with environment_of(cluster, **patient.STREAMS) as opened:
        yield opened


@pytest.fixture(scope="module")
def stream(environment: StreamEnvironment) -> Iterator[str]:
    with stream_in(environment) as made:
        publish(environment, made, [b"%d" % number for number in range(COUNT)])
        yield made


class DatabaseDown(Exception):
    pass


def failing(consumer: Consumer) -> None:  # noqa: ARG001
    raise DatabaseDown


def closing_in_a_signal_handler(consumer: Consumer) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: consumer.close())
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    raise SystemExit


def closing_in_another_thread(consumer: Consumer) -> None:
    thread = threading.Thread(target=consumer.close)
    thread.start()
    thread.join()
    raise SystemExit


def leaving_without_a_word(consumer: Consumer) -> None:  # noqa: ARG001
    raise StopIteration  # a `return`, as it were


@pytest.mark.parametrize("of", ["batches", "messages"])
@pytest.mark.parametrize(
    "fail",
    [failing, closing_in_a_signal_handler, closing_in_another_thread, leaving_without_a_word],
)
def test_what_the_application_failed_at_comes_again(
    cluster: Cluster,
    environment: StreamEnvironment,
    stream: str,
    fail: Callable[[Consumer], None],
    of: str,
) -> None:
    name = f"{of} {fail.__name__}"
    with (
        suppress(DatabaseDown, SystemExit, StopIteration),
        environment_of(cluster, **patient.STREAMS) as own,  # it closes what is left open in it
    ):
        consumer = own.consumer(
            stream, offset="first", name=name, store_every_messages=1000, **patient.READER
        )
        for _ in getattr(consumer, of)(PATIENCE):
            fail(consumer)
    assert environment.stored_offset(name, stream) is None
    with environment.consumer(stream, offset="first", name=name, **patient.READER) as again:
        assert next(again.messages(PATIENCE)).offset == 0


def test_what_the_application_came_back_from_is_stored_at_close(
    environment: StreamEnvironment, stream: str
) -> None:
    with environment.consumer(
        stream, offset="first", name="done", store_every_messages=1000, **patient.READER
    ) as consumer:
        iteration = consumer.messages(PATIENCE)
        for _ in range(10):
            next(iteration)
    assert environment.stored_offset("done", stream) == 8, "the tenth is in hand"


def test_signal_handler_may_close_what_waits_for_messages(
    environment: StreamEnvironment, stream: str
) -> None:
    name = "waiting"
    consumer = environment.consumer(
        stream, offset="first", name=name, store_every_messages=1000, **patient.READER
    )
    before = signal.signal(signal.SIGTERM, lambda *_: consumer.close())
    main = threading.get_ident()

    def ring() -> None:
        wait_until(lambda: main in _at_work and consumer.positions == {stream: COUNT})
        signal.pthread_kill(main, signal.SIGTERM)

    ringing = threading.Thread(target=ring)
    ringing.start()
    try:
        assert sum(1 for _ in consumer.messages(PATIENCE)) == COUNT
    finally:
        ringing.join()
        signal.signal(signal.SIGTERM, before)
    consumer.close()  # waits for the one under way
    assert environment.stored_offset(name, stream) == COUNT - 1


LEFT_OPEN = """
import sys
from sharding.stream import StreamEnvironment
from sharding.stream.consumer.consumer import _at_work
environment = StreamEnvironment(sys.argv[1])
consumer = environment.consumer(sys.argv[2], offset="first", name="left", store_every_messages=1000)
for message in consumer.messages(60):
    sys.exit(message.offset)
"""


def test_process_that_ends_with_a_message_in_hand_has_not_dealt_with_it(
    cluster: Cluster, environment: StreamEnvironment, stream: str
) -> None:
    url = cluster.nodes[0].endpoint.stream_url
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, url, stream], cwd=PROJECT, check=False, timeout=PATIENCE
    )
    assert ended.returncode == 0, "the offset of the first message"
    assert environment.stored_offset("left", stream) is None
