"""One connection to ask on: shared, failed over, never hammered."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from sharding.errors import InvalidInput, LocalError, Unreachable
from sharding.stream.connections.connection import StreamClient
from sharding.stream.connections.locator import ARM_REFERENCE, Locator
from sharding.stream.errors import (
    AuthenticationFailed,
    ConnectionLost,
    NoAnswerInTime,
    StreamNotFound,
    StreamUnavailable,
    refusal,
)
from sharding.stream.protocol import commands
from sharding.stream.protocol.answers import (
    MetadataAnswer,
    OffsetAnswer,
    PartitionsAnswer,
    StreamMetadata,
)
from sharding.stream.protocol.constants import Broker, Code
from sharding.stream.routes.values import Missing, Partitions, StreamRoute
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.hand_time import HandClock
from tests.support.stream_fakes import FakeClient, as_client

pytestmark = pytest.mark.timeout(PATIENCE)  # who waits for ever fails by this

A, B, C = ADDRESSES = Broker("a", 5552), Broker("b", 5552), Broker("c", 5552)
QUESTION = commands.Metadata(("s",))
Answers = Callable[[Any, float], Any]


class Network:
    """Nodes that answer by `answers`; the dials and the connections made to them."""

    def __init__(self) -> None:
        self.dialled: list[Broker] = []
        self.dialled_at: list[float] = []
        self.clients: list[FakeClient] = []
        self.down: set[Broker] = set()
        self.failure: Exception | None = None
        self.answers: dict[Broker, Answers] = {}
        self.may_connect = threading.Event()
        self.may_connect.set()

    def dial(self, address: Broker) -> StreamClient:
        self.dialled.append(address)
        self.dialled_at.append(time.monotonic())
        assert self.may_connect.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        if address in self.down:
            raise Unreachable("connection refused")
        client = FakeClient(address)
        client.answer = self.answers.get(address, lambda _request, _timeout: address)
        self.clients.append(client)
        return as_client(client)


def silence(_request: Any, timeout: float) -> Any:
    raise NoAnswerInTime(f"nothing for {timeout} s")


class InOrder(random.Random):
    """Begins with the first address."""

    def randrange(self, *_: Any, **__: Any) -> int:
        return 0


@contextmanager
def locator_of(network: Network, *addresses: Broker, **options: Any) -> Iterator[Locator]:
    locator = Locator(addresses or ADDRESSES, network.dial, rng=InOrder(), **options)
    try:
        yield locator
    finally:
        locator.close(PATIENCE)
    assert all(client.closed for client in network.clients)


def answered_by(locator: Locator, timeout: float = PATIENCE) -> Any:
    return locator.call(QUESTION, timeout)


def test_all_calls_go_over_one_connection() -> None:
    network = Network()
    with locator_of(network) as locator:
        assert {answered_by(locator) for _ in range(100)} == {A}
        assert network.dialled == [A]
        assert locator.server_version == (4, 0, 5)


def test_hundred_threads_share_one_dial() -> None:
    network = Network()
    network.may_connect.clear()
    with locator_of(network) as locator, ThreadPoolExecutor(100) as threads:
        answers = [threads.submit(answered_by, locator) for _ in range(100)]
        wait_until(lambda: network.dialled == [A], PATIENCE)
        network.may_connect.set()
        assert {answer.result() for answer in answers} == {A}
        assert network.dialled == [A]


def test_clients_with_the_same_list_begin_at_different_addresses() -> None:
    network = Network()
    for seed in range(20):
        locator = Locator(ADDRESSES, network.dial, rng=random.Random(seed))
        answered_by(locator)
        locator.close()
    assert set(network.dialled) == set(ADDRESSES)


def test_address_that_is_down_is_followed_by_the_next() -> None:
    network = Network()
    network.down = {A, B}
    with locator_of(network) as locator:
        assert answered_by(locator) == C
        assert network.dialled == [A, B, C]


def test_lost_connection_is_made_to_the_next_address() -> None:
    network = Network()
    lost = []
    with locator_of(network) as locator:
        locator.on_disconnect = lambda: lost.append(1)
        answered_by(locator)
        network.clients[0].lose()
        assert lost == [1], "told without anybody calling"
        assert answered_by(locator) == B
        assert lost == [1]


def test_end_of_a_connection_is_told_once_even_if_a_call_notices_it_first() -> None:
    network = Network()
    lost = []
    with locator_of(network) as locator:
        locator.on_disconnect = lambda: lost.append(1)
        answered_by(locator)
        network.clients[0].closed = True  # its thread has not told anybody yet
        assert answered_by(locator) == B
        network.clients[0].lose()
        assert lost == [1]


def test_question_lost_on_the_way_is_put_to_the_next_address() -> None:
    network = Network()

    def lose(_request: Any, _timeout: float) -> Any:
        network.clients[0].lose()
        raise ConnectionLost("reset by peer")

    network.answers[A] = lose
    with locator_of(network) as locator:
        assert answered_by(locator) == B


def test_frozen_node_gets_its_share_of_the_time_and_is_given_up() -> None:
    network, clock = Network(), HandClock()
    shares = []

    def frozen(request: Any, timeout: float) -> Any:
        shares.append(timeout)
        clock.now += timeout - 1
        silence(request, timeout)

    network.answers[A] = network.answers[B] = frozen
    with locator_of(network, clock=clock) as locator:
        assert answered_by(locator, 99) == C
        assert answered_by(locator, 99) == C
        assert shares == [99 / 3, (99 - 32) / 2]
        wait_until(lambda: network.clients[0].closed, PATIENCE)


def test_impatient_caller_does_not_cost_the_connection() -> None:
    network = Network()
    network.answers[A] = silence
    with locator_of(network) as locator:
        locator.connect(PATIENCE)
        with pytest.raises(NoAnswerInTime):
            answered_by(locator, 0.1)
        assert not network.clients[0].closed
        assert network.dialled == [A]


def test_what_changes_something_is_not_sent_twice() -> None:
    network = Network()
    network.answers = dict.fromkeys(ADDRESSES, silence)
    with locator_of(network) as locator:
        with pytest.raises(NoAnswerInTime):
            locator.call(commands.Delete("s"), PATIENCE)
        assert sum(len(client.asked) for client in network.clients) == 1


def test_refusal_is_an_answer() -> None:
    network = Network()

    def refuse(request: Any, _timeout: float) -> Any:
        raise refusal(request.name, Code.NO_SUCH_STREAM, "s")

    network.answers[A] = refuse
    with locator_of(network) as locator:
        with pytest.raises(StreamNotFound):
            locator.call(commands.Delete("s"), PATIENCE)
        assert network.dialled == [A]


def test_no_address_answers_is_told_with_each_reason() -> None:
    network = Network()
    network.down = set(ADDRESSES)
    with locator_of(network) as locator:
        with pytest.raises(Unreachable) as error:
            answered_by(locator)
        assert all(f"{address}: connection refused" in str(error.value) for address in ADDRESSES)


def test_unreachable_addresses_are_not_hammered() -> None:
    network = Network()
    network.down = set(ADDRESSES)
    with locator_of(network, retry_delay=0.2) as locator, ThreadPoolExecutor(20) as threads:

        def keep_asking(_: int) -> None:
            while len(network.dialled) < 3 * 3:
                with pytest.raises(Unreachable):
                    answered_by(locator)

        list(threads.map(keep_asking, range(20)))
    first, second, third = (network.dialled_at[start : start + 3] for start in (0, 3, 6))
    assert second[0] - first[-1] >= 0.2
    assert third[0] - second[-1] >= 0.2


def test_refused_login_is_told_at_once() -> None:
    network = Network()
    network.failure = AuthenticationFailed("SaslAuthenticate", Code.AUTHENTICATION_FAILURE)
    with locator_of(network) as locator, pytest.raises(AuthenticationFailed):
        answered_by(locator)
    assert network.dialled == [A]


def test_caller_keeps_its_deadline_while_a_dial_hangs() -> None:
    network = Network()
    network.may_connect.clear()
    with locator_of(network) as locator:
        with pytest.raises(Unreachable, match="within"):
            answered_by(locator, 0.1)
        assert network.clients == [], "it was told before the dial came to an end"
        network.may_connect.set()
        assert answered_by(locator) == A, "the dial went on for the next caller"
        assert network.dialled == [A]


def test_metadata_says_what_is_there_what_has_no_leader_and_what_is_missing() -> None:
    network = Network()
    network.answers[A] = lambda _request, _timeout: MetadataAnswer(
        Code.OK,
        (
            StreamMetadata("led", Code.OK, A, (B,)),
            StreamMetadata("electing", Code.OK, None, (B,)),
            StreamMetadata("away", Code.STREAM_NOT_AVAILABLE, None, ()),
            StreamMetadata("gone", Code.NO_SUCH_STREAM, None, ()),
        ),
    )
    with locator_of(network) as locator:
        assert locator.find_streams(["led", "electing", "away", "gone"], PATIENCE) == {
            "led": StreamRoute("led", A, (B,)),
            "electing": StreamRoute("electing", None, (B,)),
            "away": StreamRoute("away", None),
            "gone": Missing("gone", Code.NO_SUCH_STREAM),
        }


def test_partitions_of_what_is_no_super_stream_are_missing() -> None:
    network = Network()

    def answer(request: commands.Partitions, _timeout: float) -> Any:
        if request.super_stream == "gone":
            raise refusal("Partitions", Code.NO_SUCH_STREAM, "gone")
        if request.super_stream == "away":
            raise refusal("Partitions", Code.STREAM_NOT_AVAILABLE, "away")
        streams = ("p0", "p1") if request.super_stream == "there" else ()
        return PartitionsAnswer(Code.OK, streams)

    network.answers[A] = answer
    with locator_of(network) as locator:
        assert locator.find_partitions("there", PATIENCE) == Partitions("there", ("p0", "p1"))
        assert locator.find_partitions("gone", PATIENCE) == Missing("gone", Code.NO_SUCH_STREAM)
        assert locator.find_partitions("an exchange", PATIENCE).__class__ is Missing
        with pytest.raises(StreamUnavailable):
            locator.find_partitions("away", PATIENCE)


def test_arming_looks_the_leader_up_and_pushes_are_passed_on() -> None:
    network = Network()
    told: list[str] = []

    def answer(request: Any, _timeout: float) -> Any:
        assert request == commands.QueryOffset(ARM_REFERENCE, request.stream)
        if request.stream == "gone":
            raise refusal("QueryOffset", Code.NO_SUCH_STREAM, "gone")
        return OffsetAnswer(Code.NO_OFFSET, None)

    network.answers[A] = answer
    with locator_of(network) as locator:
        locator.on_update = told.append
        assert locator.arm("s", PATIENCE)
        assert not locator.arm("gone", PATIENCE)
        on_metadata_update = network.clients[0].on_metadata_update
        assert on_metadata_update is not None
        on_metadata_update("s", Code.STREAM_NOT_AVAILABLE)
        assert told == ["s"]


def test_closed_locator_refuses_calls() -> None:
    network = Network()
    with locator_of(network) as locator:
        answered_by(locator)
        locator.close()
        with pytest.raises(LocalError, match="closed"):
            answered_by(locator)


def test_locator_without_addresses_is_refused() -> None:
    with pytest.raises(InvalidInput, match="addresses"):
        Locator([], Network().dial)
