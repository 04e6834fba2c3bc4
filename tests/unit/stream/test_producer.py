"""Producers, on connections that only pretend."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from typing import Any, cast

import pytest

from sharding.errors import InvalidInput, LocalError, OutcomeUnknown, is_retryable
from sharding.maps.slots import murmur3
from sharding.outcomes import NotStored, Outcome, PerhapsNotStored, Report
from sharding.stream.connections.attachments import PublisherHandler
from sharding.stream.connections.background import Recovery
from sharding.stream.connections.connection import StreamClient
from sharding.stream.errors import (
    AccessRefused,
    AuthenticationFailed,
    ConnectionLost,
    NoAnswerInTime,
    Overloaded,
    StreamNotFound,
    StreamRefused,
    StreamUnavailable,
    refusal,
)
from sharding.stream.messages.codecs import Compression
from sharding.stream.messages.message import Properties, encode_data, encode_message
from sharding.stream.options import ProducerOptions
from sharding.stream.producer.partitioning import BrokerRoutes, Unroutable, by_hash
from sharding.stream.producer.producer import Producer
from sharding.stream.producer.reconnecting import STEADY
from sharding.stream.protocol.answers import Answer, RouteAnswer, SequenceAnswer
from sharding.stream.protocol.commands import (
    DeclarePublisher,
    DeletePublisher,
    QueryPublisherSequence,
    Request,
    Route,
)
from sharding.stream.protocol.constants import Broker, Code, Key
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE
from tests.support.hand_time import HandRecovery

pytestmark = pytest.mark.timeout(PATIENCE)  # who waits for ever fails by this

LEADER = Broker("rmq0", 5552)
Entry = tuple[int, bytes]


@dataclass
class FakeClient:
    """A connection: what is sent is stored under its name, and confirmed if `confirms`."""

    world: World
    frame_max: int = 10_000
    node: Broker = LEADER
    server_version: tuple[int, ...] = (4, 0, 5)
    closed: bool = False
    handlers: dict[int, tuple[PublisherHandler, str]] = field(default_factory=dict)
    declared: dict[int, DeclarePublisher] = field(default_factory=dict)
    next_id: int = 0

    def supports(self, key: Key, version: int = 1) -> bool:
        return key is not Key.PUBLISH or version == 1 or self.server_version >= (3, 13)

    def call(self, request: Request[Answer], timeout: float | None = None) -> Answer:
        assert timeout is None or timeout > 0
        self.world.calls.append(request)
        if self.world.silent > 0:
            self.world.silent -= 1
            raise NoAnswerInTime("silent")
        if self.world.alarm and self.declared:  # it is not read
            raise NoAnswerInTime("silent")
        patience = inf if timeout is None else timeout
        self.world.pass_by(min(patience, self.world.slow))
        try:
            answer = self.carry_out(request)
        finally:
            if patience < self.world.slow:
                raise NoAnswerInTime("slow")
        return answer

    def carry_out(self, request: Request[Answer]) -> Answer:
        match request:
            case DeclarePublisher():
                self.declare(request)
            case QueryPublisherSequence(reference=name, stream=stream):
                if self.world.fails_to_ask is not None:
                    raise self.world.fails_to_ask
                return SequenceAnswer(Code.OK, self.world.sequence(name, stream))
            case DeletePublisher(publisher_id=number):
                if self.declared.pop(number, None) is None:
                    raise refusal("DeletePublisher", Code.NO_SUCH_PUBLISHER)
        return Answer(Code.OK)

    def declare(self, request: DeclarePublisher) -> None:
        """As rabbit_stream_reader does: it has one code for all three."""
        has_name = request.reference is not None and any(
            (each.reference, each.stream) == (request.reference, request.stream)
            for each in self.declared.values()
        )
        if self.world.alarm or request.publisher_id in self.declared or has_name:
            raise refusal("DeclarePublisher", Code.PRECONDITION_FAILED, request.stream)
        self.declared[request.publisher_id] = request

    def send(self, *buffers: bytes, timeout: float | None = None) -> None:
        assert timeout is not None
        if self.closed:
            raise ConnectionLost("closed")
        if self.world.alarm:
            return  # it lies in the socket
        if self.world.gate is not None:
            assert self.world.gate.wait(PATIENCE)
        frame = b"".join(buffers)
        assert len(frame) <= self.frame_max
        publisher, entries = read_frame(frame)
        handler, stream = self.handlers[publisher]
        self.world.frames.append((stream, entries))
        self.world.store(stream, self.declared[publisher].reference, entries)
        if self.world.confirms:
            handler.on_confirms(tuple(number for number, _ in entries))

    def detach_publisher(self, number: int) -> None:
        self.handlers.pop(number, None)

    def close(self, timeout: float = 5) -> None:
        assert timeout > 0
        self.lose(ConnectionLost("closed by this side"))

    def lose(self, reason: Exception) -> None:
        self.closed = True
        handlers, self.handlers = self.handlers, {}
        for handler, _ in handlers.values():
            handler.on_lost(reason)


def read_frame(frame: bytes) -> tuple[int, list[Entry]]:
    size, key, version, publisher, count = struct.unpack_from(">IHHBI", frame)
    assert (size, key) == (len(frame) - 4, Key.PUBLISH)
    at = 13
    entries = []
    for _ in range(count):
        number = int.from_bytes(frame[at : at + 8], "big")
        at += 8
        if version == 2:
            (length,) = struct.unpack_from(">h", frame, at)
            at += 2 + max(length, 0)
        skip = 7 if frame[at] & 0x80 else 0
        (length,) = struct.unpack_from(">I", frame, at + skip)
        entries.append((number, frame[at + skip + 4 : at + skip + 4 + length]))
        at += skip + 4 + length
    assert at == len(frame)
    return publisher, entries


@dataclass
class World:
    """The cluster: its streams, and the route cache and pool in front of it."""

    confirms: bool = True
    frame_max: int = 10_000
    server_version: tuple[int, ...] = (4, 0, 5)
    gate: threading.Event | None = None
    frames: list[tuple[str, list[Entry]]] = field(default_factory=list)
    stored: dict[str, list[bytes]] = field(default_factory=dict)
    last_ids: dict[tuple[str, str], int] = field(default_factory=dict)
    calls: list[object] = field(default_factory=list)
    clients: list[FakeClient] = field(default_factory=list)
    suspected: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    """What the next tries to connect end with."""
    always: Exception | None = None
    silent: int = 0
    """So many requests get no answer."""
    fails_to_ask: BaseException | None = None
    """What becomes of the question for the last publishing id."""
    slow: float = 0.0
    """After so many seconds requests are answered, by the clock of `later`."""
    later: HandRecovery | None = None
    alarm: bool = False
    """A disk alarm: connections with publishers are not read, and new publishers refused."""

    def pass_by(self, seconds: float) -> None:
        if self.later is not None:
            self.later.now += seconds

    def sequence(self, name: str, stream: str) -> int:
        return self.last_ids.get((name, stream), 0)

    def store(self, stream: str, name: str | None, entries: Sequence[Entry]) -> None:
        for number, message in entries:
            if name is not None:
                if number <= self.sequence(name, stream):
                    continue
                self.last_ids[name, stream] = number
            self.stored.setdefault(stream, []).append(message)

    def leader(self, stream: str, timeout: float) -> Broker:
        assert stream
        assert timeout > 0
        return LEADER

    def suspect(self, name: str, reason: str) -> None:
        assert reason
        self.suspected.append(name)

    def publisher(
        self, leader: Broker, stream: str, handler: PublisherHandler, deadline: float
    ) -> tuple[StreamClient, int]:
        assert leader == LEADER
        assert deadline > 0
        if self.failures:
            raise self.failures.pop(0)
        if self.always is not None:
            raise self.always
        if not self.clients or self.clients[-1].closed:
            self.clients.append(
                FakeClient(self, self.frame_max, server_version=self.server_version)
            )
        client = self.clients[-1]
        number = client.next_id
        client.next_id = (number + 1) % 256
        client.handlers[number] = handler, stream
        return cast(StreamClient, client), number

    def release(self, client: StreamClient) -> None: ...

    def lose(self, reason: Exception | None = None) -> None:
        self.clients[-1].lose(reason or ConnectionLost("reset by peer"))

    def bodies(self, stream: str = "s") -> list[bytes]:
        return self.stored.get(stream, [])


Make = Callable[..., Producer]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def make(world: World) -> Iterator[Make]:
    recovery = Recovery()
    made: list[Producer] = []

    def build(
        *streams: str, routing: Any = by_hash, later: HandRecovery | None = None, **options: Any
    ) -> Producer:
        """Where `later` is given, nothing happens by time but what it runs."""
        # An entry for each message, unless a test asks for more: most look at single messages.
        world.later = later
        chosen = ProducerOptions(**{"linger": 0.001, "sub_entry_messages": 0, **options})
        producer = Producer(
            streams or ("s",),
            routing,
            world,
            world,
            recovery if later is None else cast(Recovery, later),
            chosen,
            clock=time.monotonic if later is None else later.clock,
        )
        made.append(producer)
        return producer

    yield build
    world.confirms = True
    for producer in made:
        producer.close(timeout=0)
    recovery.close()


@pytest.fixture
def later() -> HandRecovery:
    return HandRecovery()


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does; a test that never gets there fails."""
    wait_until(condition, PATIENCE)


def numbers(report: Report, outcome: Outcome) -> list[int]:
    return [each.number for each in report.not_stored if each.outcome is outcome]


# Sending


def test_numbers_count_from_zero_over_all_ways_to_send(make: Make, world: World) -> None:
    producer = make()
    assert [producer.send(b"a"), producer.send(b"b", key="k")] == [0, 1]
    assert producer.send_many([b"c", b"d"]) == range(2, 4)
    assert producer.send_encoded([encode_data(b"e")]) == range(4, 5)
    report = producer.flush(PATIENCE)
    assert report == Report(stored=5)
    with_key = encode_message(b"b", key="k")
    a, *others = (encode_data(body) for body in (b"a", b"c", b"d", b"e"))
    assert world.bodies() == [a, with_key, *others]


def test_properties_are_written(make: Make, world: World) -> None:
    producer = make()
    properties = Properties(message_id="m-1")
    producer.send(b"x", properties=properties, application_properties={"a": 1}, key=b"k")
    producer.flush(PATIENCE)
    expected = encode_message(b"x", key="k", properties=properties, application_properties={"a": 1})
    assert world.bodies() == [expected]


def test_a_mutable_body_is_copied(make: Make, world: World) -> None:
    producer = make(linger=60)
    body = bytearray(b"before")
    producer.send(body)
    body[:] = b"behind"
    producer.flush(PATIENCE)
    assert world.bodies() == [encode_data(b"before")]


@pytest.mark.parametrize("body", ["text", None, 5])
def test_what_is_not_bytes_is_refused_before_anything_is_sent(
    make: Make, world: World, body: Any
) -> None:
    producer = make()
    with pytest.raises(InvalidInput):
        producer.send(body)
    with pytest.raises(InvalidInput):
        producer.send_many([b"fine", body])
    assert producer.flush(PATIENCE).stored == 0
    assert world.frames == []


def test_publishes_are_split_to_fit_the_frame_and_keep_their_order(
    make: Make, world: World
) -> None:
    producer = make(batch_messages=1_000)
    bodies = [bytes([n % 256]) * (n % 300) for n in range(2_500)]
    producer.send_many(bodies)
    assert producer.flush(PATIENCE).stored == 2_500
    assert world.bodies() == list(map(encode_data, bodies))
    assert len(world.frames) > 30


def test_a_message_too_big_for_a_frame_is_refused_and_the_largest_is_sent(make: Make) -> None:
    producer = make()
    largest = 10_000 - 13 - 14 - 8
    producer.send(b"x" * largest)
    for send in (
        lambda: producer.send(b"x" * (largest + 1)),
        lambda: producer.send(b"x" * largest, key="k"),
        lambda: producer.send_many([b"", b"x" * (largest + 1)]),
    ):
        with pytest.raises(InvalidInput, match="frame_max"):
            send()
    assert producer.flush(PATIENCE).stored == 1


def test_a_message_waits_no_longer_than_the_linger(
    make: Make, world: World, later: HandRecovery
) -> None:
    producer = make(linger=0.02, later=later)
    producer.send(b"x")
    later.run(0.019)
    assert world.frames == []
    later.run(0.001)
    assert world.bodies() == [encode_data(b"x")]


def test_flush_does_not_wait_for_the_linger(make: Make) -> None:
    producer = make(linger=100 * PATIENCE)
    producer.send(b"x")
    assert producer.flush(PATIENCE).stored == 1


def test_a_full_batch_is_written_at_once(make: Make, world: World) -> None:
    by_count, by_size = make(linger=60, batch_messages=3), make(linger=60, batch_bytes=100)
    for _ in range(2):
        by_count.send(b"x")
    by_size.send(b"x" * 60)
    assert world.frames == []
    by_count.send(b"x")
    by_size.send(b"x" * 60)
    assert [len(entries) for _, entries in world.frames] == [3, 2]


def test_sends_from_many_threads_keep_each_threads_order(make: Make, world: World) -> None:
    producer = make(batch_messages=7, max_unconfirmed=50)

    def run(thread: int) -> None:
        for n in range(300):
            producer.send(struct.pack(">BH", thread, n))
        producer.send_many([struct.pack(">BH", thread, n) for n in range(300, 400)])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert producer.flush(PATIENCE).stored == 1_600
    seen: dict[int, list[int]] = {n: [] for n in range(4)}
    for message in world.bodies():
        thread, n = struct.unpack(">BH", message[5:])
        seen[thread].append(n)
    assert all(numbers == list(range(400)) for numbers in seen.values())


# Back-pressure


@pytest.mark.parametrize(
    "bound", [{"max_unconfirmed": 5}, {"max_unconfirmed_bytes": 500}], ids=["count", "bytes"]
)
def test_send_waits_for_room_and_then_is_refused(
    make: Make, world: World, bound: dict[str, int]
) -> None:
    world.confirms = False
    producer = make(linger=60, **bound)
    for _ in range(5):
        producer.send(b"x" * 100)
    begun = time.monotonic()
    with pytest.raises(Overloaded, match="max_unconfirmed"):
        producer.send(b"y", timeout=0.05)
    assert time.monotonic() - begun >= 0.05
    assert is_retryable(Overloaded())
    report = producer.flush(0.05)
    assert report == Report(pending=5)
    assert b"y" not in b"".join(world.bodies())


def test_a_confirm_makes_room_for_who_waits(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(max_unconfirmed=3, linger=0)
    for _ in range(3):
        producer.send(b"x")
    waiting = threading.Thread(target=producer.send, args=(b"y",), kwargs={"timeout": PATIENCE})
    waiting.start()
    handler, _ = world.clients[0].handlers[0]
    world.confirms = True
    handler.on_confirms((1,))
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    handler.on_confirms((2, 3))
    assert producer.flush(PATIENCE).stored == 4


def test_what_send_many_could_not_hand_over_is_reported_as_refused(
    make: Make, world: World
) -> None:
    world.confirms = False
    producer = make(max_unconfirmed=10, linger=0)
    assert producer.send_many([b"x"] * 15, timeout=0.05) == range(15)
    with pytest.raises(Overloaded):
        producer.send_many([b"y"], timeout=0.05)
    report = producer.flush(0.05)
    assert (report.stored, report.pending) == (0, 10)
    assert numbers(report, Outcome.REFUSED) == list(range(10, 15))
    assert isinstance(report.not_stored[0].cause, Overloaded)
    assert "max_unconfirmed" in report.not_stored[0].reason
    last = producer.close(0)
    assert numbers(last, Outcome.UNKNOWN) == list(range(10))
    assert (last.stored, last.refused, last.pending) == (0, 0, 0)


def test_a_broker_that_does_not_read_holds_up_only_who_writes(make: Make, world: World) -> None:
    world.gate = threading.Event()
    producer = make(linger=60, batch_messages=2, max_unconfirmed=4)
    writing = threading.Thread(target=producer.send_many, args=([b"x", b"x"],))
    writing.start()
    eventually(lambda: producer._only is not None and producer._only._is_writing)
    producer.send(b"y")
    producer.send(b"y")
    with pytest.raises(Overloaded):
        producer.send(b"z", timeout=0.05)
    world.gate.set()
    writing.join(PATIENCE)
    assert producer.flush(PATIENCE).stored == 4


# Outcomes


def test_refused_messages_are_named(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(linger=0)
    producer.send_many([b"a", b"b", b"c"])
    handler, _ = world.clients[0].handlers[0]
    handler.on_refusals([(2, Code.INTERNAL_ERROR)])
    handler.on_confirms((1, 3))
    report = producer.flush(PATIENCE)
    assert (report.stored, report.refused, report.unknown, report.pending) == (2, 1, 0, 0)
    (failure,) = report.not_stored
    assert (failure.number, failure.stream, failure.publishing_id) == (1, "s", 2)
    assert "internal error" in failure.reason
    with pytest.raises(NotStored, match="2 stored, 1 refused; the first refused is message 1 to"):
        report.raise_for_failures()


def test_what_has_no_outcome_in_time_is_pending_and_in_one_later_report(
    make: Make, world: World
) -> None:
    world.confirms = False
    producer = make(linger=0)
    producer.send_many([b"a", b"b", b"c"])
    handler, _ = world.clients[0].handlers[0]
    for _ in range(2):
        report = producer.flush(0.02)
        assert report == Report(pending=3)
        with pytest.raises(PerhapsNotStored, match="3 pending"):
            report.raise_for_failures()
    handler.on_confirms((1,))
    handler.on_refusals([(3, Code.INTERNAL_ERROR)])
    report = producer.flush(0)
    assert (report.stored, report.refused, report.pending) == (1, 1, 1)
    with pytest.raises(PerhapsNotStored, match="1 stored, 1 refused, 1 pending"):
        report.raise_for_failures()
    handler.on_confirms((2,))
    assert producer.flush(PATIENCE) == Report(stored=1)
    assert producer.close() == Report()
    counters = producer.counters
    assert (counters["stored"], counters["refused"], counters["unknown"]) == (2, 1, 0)


def test_what_was_never_written_is_pending_too(make: Make, world: World) -> None:
    producer = make("s-0", "s-1", routing=lambda key, _: int(key), linger=60)
    world.always = ConnectionLost("down")
    world.lose()
    producer.send_many([b"x"] * 3, ["0", "1", "1"])
    assert producer.flush(0) == Report(pending=3)


def test_what_others_send_meanwhile_is_not_pending_in_a_flush_that_got_all_it_waited_for(
    make: Make, world: World, later: HandRecovery
) -> None:
    world.confirms = False
    producer = make("s-0", "s-1", routing=lambda key, _: int(key), linger=0, later=later)
    producer.send(b"mine", key="0")
    with ThreadPoolExecutor(1) as other:
        flushed = other.submit(producer.flush, PATIENCE)
        eventually(lambda: bool(producer._shared.changed._waiters))  # type: ignore[attr-defined]
        producer.send(b"another's", key="1")
        world.clients[0].handlers[0][0].on_confirms((1,))
        report = flushed.result(PATIENCE)
    assert report == Report(stored=1)
    report.raise_for_failures()
    assert producer.flush(0) == Report(pending=1)


def test_leaving_a_with_block_raises_what_is_not_stored(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(linger=0, confirm_timeout=0.05, recovery_timeout=0.01)
    with pytest.raises(PerhapsNotStored), producer:  # noqa: PT012
        world.always = ConnectionLost("down")
        producer.send(b"x")


def test_leaving_a_with_block_hides_no_other_error(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(linger=0, confirm_timeout=0.05, recovery_timeout=0.01)
    with pytest.raises(ZeroDivisionError), producer:  # noqa: PT012
        world.always = ConnectionLost("down")
        producer.send(b"x")
        raise ZeroDivisionError


def test_close_flushes_and_reports_and_logs_what_is_unknown(
    make: Make, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make(linger=60)
    producer.send(b"x")
    assert producer.close(PATIENCE).stored == 1
    with pytest.raises(LocalError, match="closed"):
        producer.send(b"y")
    assert producer.close().stored == 0

    world.confirms = False
    unlucky = make(linger=60)
    unlucky.send(b"x")
    unlucky.flush(0)
    eventually(lambda: len(world.frames) == 2)
    report = unlucky.close(timeout=0.05)
    assert (report.unknown, report.refused, report.pending) == (1, 0, 0)
    assert "is closed: 0 stored, 1 unknown; the first unknown is message 0 to 's'" in caplog.text
    assert world.clients[0].declared == {}
    assert world.clients[0].handlers == {}


# Loss and recovery


def test_an_unnamed_producer_never_sends_twice(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(linger=60)
    producer.send_many([b"a", b"b"])
    producer.flush(0)
    eventually(lambda: len(world.frames) == 1)
    producer.send(b"c")
    world.confirms = True
    world.lose()
    report = producer.flush(PATIENCE)
    assert numbers(report, Outcome.UNKNOWN) == [0, 1]
    cause = report.not_stored[0].cause
    assert isinstance(cause, OutcomeUnknown)
    assert isinstance(cause.__cause__, ConnectionLost)
    assert not is_retryable(cause)
    assert (report.stored, report.refused, report.pending) == (1, 0, 0)
    assert world.bodies() == list(map(encode_data, (b"a", b"b", b"c")))


def test_a_named_producer_sends_the_unconfirmed_again_in_order_before_anything_new(
    make: Make, world: World
) -> None:
    world.confirms = False
    producer = make(name="p", linger=60, batch_messages=2)
    producer.send_many([b"a", b"b", b"c", b"d"])
    producer.send(b"e")
    world.clients[0].handlers[0][0].on_confirms((1,))
    world.stored["s"] = world.stored["s"][:2]  # the leader that took over has these only
    world.last_ids["p", "s"] = 2
    world.frames.clear()
    world.confirms = True
    world.lose()
    assert producer.flush(PATIENCE).stored == 5
    sent = [number for _, entries in world.frames for number, _ in entries]
    assert sent == [2, 3, 4, 5]
    assert world.bodies() == list(map(encode_data, (b"a", b"b", b"c", b"d", b"e")))


def test_what_the_broker_counts_is_not_taken_as_stored_before_it_is_confirmed(
    make: Make, world: World
) -> None:
    world.confirms = False
    producer = make(name="p", linger=0)
    producer.send(b"a")
    world.lose()
    eventually(lambda: len(world.frames) == 2)
    assert world.sequence("p", "s") == 1
    assert producer.flush(0.02) == Report(pending=1)


def test_news_of_an_earlier_connection_is_ignored(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(linger=0)
    producer.send(b"a")
    earlier, _ = world.clients[0].handlers[0]
    world.lose()
    eventually(lambda: len(world.clients) == 2)
    producer.send(b"b")
    eventually(lambda: len(world.frames) == 2)
    earlier.on_confirms((1, 2))
    earlier.on_refusals([(2, Code.INTERNAL_ERROR)])
    earlier.on_lost(ConnectionLost("again"))
    present, _ = world.clients[1].handlers[0]
    present.on_confirms((2,))
    report = producer.flush(PATIENCE)
    assert (report.stored, report.refused, report.pending) == (1, 0, 0)
    assert numbers(report, Outcome.UNKNOWN) == [0]


def test_a_connection_that_does_not_answer_is_replaced(make: Make, world: World) -> None:
    world.silent = 1
    producer = make()
    assert [client.closed for client in world.clients] == [True, False]
    producer.send(b"x")
    assert producer.flush(PATIENCE).stored == 1


def test_an_impatient_close_leaves_the_connection_to_the_others(
    make: Make, world: World, later: HandRecovery
) -> None:
    patient = make("a", linger=0, later=later)
    impatient = make("b", later=later)
    world.slow = 5
    impatient.close(timeout=1)
    assert len(world.clients[0].handlers) == 2, "the id is nobody else's before there is an answer"
    later.run(60)
    assert [each.stream for each in world.clients[0].declared.values()] == ["a"]
    assert len(world.clients[0].handlers) == 1
    patient.send(b"x")
    later.run()
    assert patient.flush(0).stored == 1
    assert patient.counters["recoveries"] == 0


def test_a_close_that_is_never_answered_ends_the_connection(
    make: Make, world: World, later: HandRecovery
) -> None:
    producer = make(later=later)
    world.slow = inf
    producer.close(timeout=1)
    assert not world.clients[0].closed
    later.run(60)
    assert world.clients[0].closed


def test_a_close_waits_its_time_once_and_not_for_each_partition(
    make: Make, world: World, later: HandRecovery
) -> None:
    producer = make(*(f"s-{number}" for number in range(50)), later=later)
    world.slow = 5
    producer.close(timeout=2)
    assert later.now < 3
    told = [call for call in world.calls if isinstance(call, DeletePublisher)]
    assert len(told) == 50, "who makes a producer of the name next is read after these"
    assert len(world.clients[0].handlers) == 50
    world.slow = 0
    later.run(60)
    assert not world.clients[0].handlers
    assert not world.clients[0].declared
    assert not world.clients[0].closed


@pytest.mark.parametrize("name", ["p", None])
def test_an_impatient_producer_leaves_the_connection_to_the_others(
    make: Make, world: World, later: HandRecovery, name: str | None
) -> None:
    patient = make("a", later=later)
    world.slow = 5
    with pytest.raises(NoAnswerInTime):
        make("b", name=name, open_timeout=1, later=later)
    later.run(60)
    assert [each.stream for each in world.clients[0].declared.values()] == ["a"]
    assert len(world.clients[0].handlers) == 1
    assert patient.counters["recoveries"] == 0


def test_odd_answers_during_a_recovery_are_tried_again(make: Make, world: World) -> None:
    producer = make(name="p")
    world.failures = [
        AuthenticationFailed("SaslAuthenticate", Code.AUTHENTICATION_FAILURE),
        StreamNotFound("DeclarePublisher", Code.NO_SUCH_STREAM, "s"),
        refusal("DeclarePublisher", Code.STREAM_NOT_AVAILABLE, "s"),
    ]
    world.lose()
    producer.send(b"x")
    assert producer.flush(PATIENCE).stored == 1
    assert world.failures == []
    assert producer.counters["recoveries"] == 1
    assert "s" in world.suspected


def test_a_producer_whose_stream_was_deleted_fails(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(name="p", linger=60)
    producer.send(b"sent")
    producer.flush(0)
    eventually(lambda: len(world.frames) == 1)
    producer.send(b"not sent")
    world.always = StreamNotFound("Metadata", Code.NO_SUCH_STREAM, "s")
    world.lose()
    report = producer.flush(PATIENCE)
    assert numbers(report, Outcome.UNKNOWN) == [0]
    assert numbers(report, Outcome.REFUSED) == [1]
    assert isinstance(report.not_stored[1].cause, StreamNotFound)
    for _ in range(2):
        with pytest.raises(StreamNotFound):
            producer.send(b"x")
    with pytest.raises(StreamNotFound):
        producer.send_many([b"x"])


def test_recovery_gives_up_after_its_time(make: Make, world: World, later: HandRecovery) -> None:
    producer = make(name="p", recovery_timeout=20, later=later)
    world.always = ConnectionLost("down")
    world.lose()
    later.run(19.9)
    producer.send(b"x")
    later.run(0.1)
    report = producer.flush(0)
    assert (report.refused, report.unknown, report.pending) == (1, 0, 0)
    with pytest.raises(ConnectionLost):
        producer.send(b"y")


def test_messages_sent_during_an_outage_are_kept_up_to_the_bound(make: Make, world: World) -> None:
    producer = make(max_unconfirmed=3)
    world.always = ConnectionLost("down")
    world.lose()
    for _ in range(3):
        producer.send(b"x")
    with pytest.raises(Overloaded):
        producer.send(b"y", timeout=0.02)
    world.always = None
    assert producer.flush(PATIENCE).stored == 3


def test_an_overdue_confirm_makes_a_named_producer_connect_anew_and_send_again(
    make: Make, world: World, later: HandRecovery
) -> None:
    world.confirms = False
    producer = make(name="p", linger=0, confirm_timeout=30, later=later)
    producer.send(b"x")
    world.confirms = True
    later.run(29.9)
    assert len(world.frames) == 1
    later.run(0.1)
    assert producer.flush(0).stored == 1
    assert [type(call) for call in world.calls].count(DeletePublisher) == 1
    assert len(world.bodies()) == 1


def test_an_overdue_confirm_is_unknown_to_an_unnamed_producer(make: Make, world: World) -> None:
    world.confirms = False
    producer = make(linger=0, confirm_timeout=0.05)
    producer.send(b"x")
    report = producer.flush(PATIENCE)
    assert numbers(report, Outcome.UNKNOWN) == [0]
    assert "no confirm within" in report.not_stored[0].reason
    assert len(world.frames) == 1


def test_a_partition_that_never_confirms_again_fails_in_the_end(
    make: Make, world: World, later: HandRecovery
) -> None:
    world.confirms = False
    producer = make(name="p", linger=0, confirm_timeout=3, recovery_timeout=20, later=later)
    producer.send(b"x")
    later.run(3 + 20 + 3)  # it is asked for last within the time, and then waited for
    report = producer.flush(0)
    assert (report.unknown, report.pending) == (1, 0)
    assert 2 < len(world.frames) < 10
    with pytest.raises(NoAnswerInTime):
        producer.send(b"y")
    later.run()
    assert world.clients[0].declared == {}


@pytest.mark.parametrize("name", ["p", None])
def test_an_alarm_of_any_length_ends_no_producer(
    make: Make,
    world: World,
    later: HandRecovery,
    caplog: pytest.LogCaptureFixture,
    name: str | None,
) -> None:
    producer = make(name=name, linger=0, max_unconfirmed=3, later=later)
    world.alarm = True
    producer.send(b"on its way")
    later.run(900)
    assert producer.flush(0).unknown == (name is None)
    with pytest.raises(Overloaded):  # noqa: PT012
        for _ in range(4):
            producer.send(b"kept", timeout=0)
    later.run(900)
    told = [each for each in caplog.records if "alarm" in each.message]
    assert [each.levelname for each in told] == ["WARNING"]
    world.alarm = False
    later.run(5)
    assert producer.flush(0).stored == 3
    assert len(world.bodies()) == 3


def test_what_stands_in_the_way_after_an_alarm_has_the_whole_time_and_no_more(
    make: Make, world: World, later: HandRecovery
) -> None:
    producer = make(name="p", linger=0, recovery_timeout=20, later=later)
    world.alarm = True
    producer.send(b"x")
    later.run(600)
    world.always = ConnectionLost("down")
    later.run(17)
    producer.send(b"y")
    later.run(20)
    with pytest.raises(ConnectionLost):
        producer.send(b"z")


def test_a_name_that_another_producer_has_is_no_alarm(
    make: Make, world: World, later: HandRecovery
) -> None:
    """The broker has one code for both; only an alarm is waited for without an end."""
    producer = make(name="p", linger=0, recovery_timeout=20, later=later)
    world.lose()
    make(name="p")
    with pytest.raises(StreamRefused) as refused:
        make(name="p")
    assert not is_retryable(refused.value)
    later.run(20)
    with pytest.raises(StreamRefused, match="precondition failed"):
        producer.send(b"x")
    assert [each.reference for each in world.clients[-1].declared.values()] == ["p"]


@pytest.mark.parametrize("name", ["p", None])
def test_a_producer_that_is_made_under_an_alarm_says_so_and_may_be_made_again(
    make: Make, world: World, name: str | None
) -> None:
    world.alarm = True
    with pytest.raises(StreamUnavailable, match="alarm") as refused:
        make(name=name)
    assert is_retryable(refused.value)
    assert world.clients[-1].handlers == {}
    world.alarm = False
    producer = make(name=name)
    producer.send(b"x")
    assert producer.flush(PATIENCE).stored == 1


def test_a_publisher_that_is_lost_again_and_again_is_not_opened_in_a_tight_loop(
    make: Make, world: World, later: HandRecovery
) -> None:
    world.confirms = False
    producer = make(name="p", linger=0, recovery_timeout=4, later=later)
    producer.send(b"x")
    with pytest.raises(ConnectionLost):  # noqa: PT012
        while later.now < 50:
            if world.clients[-1].handlers:
                world.lose()
            later.run(0.01)
            producer.send(b"y")
    assert 4 <= later.now < 4.1
    assert 2 < len(world.clients) < 12


def test_an_idle_publisher_that_is_lost_again_and_again_is_not_opened_in_a_tight_loop(
    make: Make, world: World, later: HandRecovery
) -> None:
    producer = make(linger=0, recovery_timeout=4, later=later)
    while later.now < 50:
        if world.clients[-1].handlers:
            world.lose()
        later.run(0.01)
    assert 25 < len(world.clients) < 100
    later.run(2)
    producer.send(b"x")
    assert producer.flush(0).stored == 1


@pytest.mark.parametrize("proof", ["a confirm", "time"])
def test_a_publisher_that_worked_is_opened_again_at_once(
    make: Make, world: World, later: HandRecovery, proof: str
) -> None:
    producer = make(linger=0, later=later)
    for _ in range(5):
        world.lose()
        later.run(5)
    if proof == "time":
        later.run(STEADY)
    else:
        producer.send(b"x")
    count = len(world.clients)
    world.lose()
    later.run(0)
    assert len(world.clients) == count + 1


def test_an_election_is_not_waited_for_on_the_threads_of_all(
    make: Make, world: World, later: HandRecovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four streams without a leader held up all others of the environment, a quarter of a minute
    each time."""
    asked: list[float] = []

    def leader(_: str, timeout: float) -> Broker:
        asked.append(timeout)
        return LEADER

    monkeypatch.setattr(world, "leader", leader)
    make(later=later, linger=0)
    assert asked[0] > 1
    world.lose()
    later.run(0)
    assert asked[1:] == [1.0]


def test_a_closed_environment_fails_its_producers(world: World) -> None:
    recovery = Recovery()
    options = ProducerOptions(linger=60)
    producer = Producer(("s",), by_hash, world, world, recovery, options)
    producer.send(b"x")
    recovery.close()
    world.lose()
    report = producer.flush(PATIENCE)
    assert numbers(report, Outcome.REFUSED) == [0]
    assert "environment is closed" in report.not_stored[0].reason


# Names and ids


def test_a_named_producer_goes_on_after_the_last_id_of_each_partition(
    make: Make, world: World
) -> None:
    world.last_ids = {("p", "s-0"): 41, ("p", "s-1"): 7}
    producer = make("s-0", "s-1", name="p", routing=lambda key, _: int(key))
    assert producer.last_publishing_ids == {"s-0": 41, "s-1": 7}
    for key in "0100":
        producer.send(b"x", key=key)
    assert producer.last_publishing_ids == {"s-0": 44, "s-1": 8}
    producer.flush(PATIENCE)
    assert world.last_ids == {("p", "s-0"): 44, ("p", "s-1"): 8}


def test_a_name_whose_last_id_may_not_be_read_is_refused_for_that_each_time(
    make: Make, world: World
) -> None:
    """The publisher was left declared, and the next try was told that the name is taken."""
    other = make("a")
    world.fails_to_ask = refusal("QueryPublisherSequence", Code.ACCESS_REFUSED, "s")
    for _ in range(2):
        with pytest.raises(AccessRefused, match="read it too"):
            make(name="p")
    (client,) = world.clients
    assert [each.stream for each in client.declared.values()] == ["a"]
    assert len(client.handlers) == 1
    other.send(b"x")
    assert other.flush(PATIENCE).stored == 1


def test_a_producer_whose_making_is_interrupted_leaves_nothing_behind(
    make: Make, world: World, later: HandRecovery
) -> None:
    world.fails_to_ask = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        make(name="p", later=later)
    later.run()
    assert not world.clients[0].declared
    assert not world.clients[0].handlers
    assert not world.clients[0].closed


def test_explicit_ids_must_rise(make: Make, world: World) -> None:
    world.last_ids["p", "s"] = 100
    producer = make(name="p", linger=60)
    producer.send(b"a", publishing_id=5)  # the broker has it, and drops it
    for bad in (5, 4, 0, -1, 2**63):
        with pytest.raises(InvalidInput, match="must rise on 's'"):
            producer.send(b"b", publishing_id=bad)
    with pytest.raises(InvalidInput):
        producer.send_many([b"b", b"c"], publishing_ids=[7, 7])
    producer.send_many([b"b", b"c"], publishing_ids=[101, 200])
    producer.send(b"d")
    assert producer.flush(PATIENCE).stored == 4
    assert [number for number, _ in world.frames[0][1]] == [5, 101, 200, 201]
    assert len(world.bodies()) == 3
    with pytest.raises(InvalidInput):
        producer.send(b"e", publishing_id=201)


def test_explicit_ids_need_a_name(make: Make) -> None:
    with pytest.raises(InvalidInput, match="needs a producer with a name"):
        make().send(b"x", publishing_id=1)


@pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128])
def test_a_name_has_1_to_255_bytes(name: str) -> None:
    with pytest.raises(InvalidInput, match="255 bytes"):
        ProducerOptions(name=name)


# Sub-entries and filters


def test_a_sub_entry_batch_has_the_id_of_its_last_message_and_is_sent_again_as_it_was(
    make: Make, world: World
) -> None:
    world.confirms = False
    producer = make(name="p", linger=60, sub_entry_messages=4, compression=Compression.GZIP)
    producer.send_many([b"x" * 50] * 10)
    producer.flush(0)
    eventually(lambda: len(world.frames) == 1)
    world.confirms = True
    world.lose()
    assert producer.flush(PATIENCE).stored == 10
    first, again = ([number for number, _ in entries] for _, entries in world.frames)
    assert first == again == [4, 8, 10]
    assert len(world.bodies()) == 3


def test_filters_and_sub_entries_do_not_go_together() -> None:
    with pytest.raises(InvalidInput, match="sub_entry_messages"):
        ProducerOptions(filtering=True, sub_entry_messages=10)
    with pytest.raises(InvalidInput, match="sub_entry_messages"):
        ProducerOptions(name="p", compression=Compression.GZIP)


def test_each_message_is_an_entry_of_its_own_unless_asked_otherwise() -> None:
    """Not every client reads shared entries whole."""
    assert ProducerOptions().sub_entry_messages == 0


def test_messages_share_entries_if_asked_for(make: Make, world: World) -> None:
    producer = make(sub_entry_messages=250, linger=60)
    producer.send_many([b"%d" % n for n in range(600)])
    producer.send(b"keyed", key="k")
    assert producer.flush(PATIENCE).stored == 601
    ((_, entries),) = world.frames
    assert [number for number, _ in entries] == [250, 500, 601]
    last = b"".join(
        len(message).to_bytes(4, "big") + message
        for message in [
            *(encode_data(b"%d" % n) for n in range(500, 600)),
            encode_message(b"keyed", key="k"),
        ]
    )
    assert entries[-1][1] == last


def test_filter_values_are_sent_with_version_2(make: Make, world: World) -> None:
    producer = make(filtering=True)
    producer.send(b"a", filter_value="de")
    producer.send(b"b")
    producer.send_many([b"c", b"d"], filter_values=["fr", None])
    assert producer.flush(PATIENCE).stored == 4
    assert world.bodies() == list(map(encode_data, (b"a", b"b", b"c", b"d")))


def test_a_broker_too_old_for_filter_values_is_named_at_once(make: Make, world: World) -> None:
    world.server_version = (3, 10, 8)
    with pytest.raises(LocalError, match=r"need RabbitMQ 3\.13 or newer; rmq0:5552 has 3\.10\.8"):
        make(filtering=True)
    assert world.clients[0].handlers == {}
    with pytest.raises(InvalidInput, match="filtering=True"):
        make().send(b"x", filter_value="de")


# Keys


def test_keys_go_to_their_partition_by_hash(make: Make, world: World) -> None:
    streams = [f"s-{n}" for n in range(5)]
    producer = make(*streams)
    keys = [f"key-{n}" for n in range(200)]
    for key in keys[:100]:
        producer.send(key.encode(), key=key)
    producer.send_many([key.encode() for key in keys[100:]], keys[100:])
    assert producer.flush(PATIENCE).stored == 200
    for n, stream in enumerate(streams):
        mine = [key for key in keys if murmur3(key) % 5 == n]
        assert world.bodies(stream) == [encode_message(k.encode(), key=k) for k in mine]


def test_a_partition_that_is_bound_twice_is_one_and_the_hash_chooses_from_all_bindings(
    make: Make, world: World
) -> None:
    """As the Java client does; a named producer opened the partition twice, and was refused."""
    bound = ("emea", "emea", "apac")
    producer = make(*bound, name="billing")
    assert set(producer.last_publishing_ids) == {"emea", "apac"}
    keys = [f"key-{n}" for n in range(200)]
    producer.send_many([key.encode() for key in keys], keys)
    assert producer.flush(PATIENCE).stored == 200
    for key in keys:
        assert producer.partition(key) == bound[murmur3(key) % 3]
        stored = world.bodies(bound[murmur3(key) % 3])
        assert encode_message(key.encode(), key=key) in stored
    own = make(*bound, routing=lambda _key, partitions: partitions - 1)
    assert own.partition("any") == "apac"


@pytest.mark.parametrize("key", [7, True, 1.5, None.__class__, ["k"], "\ud800"])
def test_a_key_is_text_or_bytes_whatever_chooses_the_partition(
    make: Make, world: World, key: Any
) -> None:
    """The key 7 was stored as seven NUL bytes."""
    producer = make("s-0", "s-1", routing=lambda _key, _partitions: 0)
    with pytest.raises(InvalidInput, match="must be text"):
        producer.send(b"x", key=key)
    with pytest.raises(InvalidInput, match="must be text"):
        producer.send_many([b"x"], [key])
    with pytest.raises(InvalidInput, match="must be text"):
        producer.send(b"x", key=key, application_properties={"a": 1})
    assert producer.flush(PATIENCE).stored == 0
    assert not world.bodies("s-0")


def test_a_super_stream_needs_a_key(make: Make) -> None:
    producer = make("s-0", "s-1")
    with pytest.raises(InvalidInput, match="key"):
        producer.send(b"x")
    with pytest.raises(InvalidInput, match="key"):
        producer.send_many([b"x"])


def test_a_function_must_give_a_partition_there_is(make: Make) -> None:
    producer = make("s-0", "s-1", routing=lambda _key, partitions: partitions)
    with pytest.raises(InvalidInput, match="0 to 1"):
        producer.send(b"x", key="k")


@dataclass
class FakeLocator:
    bound: dict[str, tuple[str, ...]]
    asked: list[str] = field(default_factory=list)

    def call(self, request: Any, timeout: float) -> Any:
        assert isinstance(request, Route)
        assert timeout > 0
        self.asked.append(request.routing_key)
        return RouteAnswer(Code.OK, self.bound.get(request.routing_key, ()))


def test_the_broker_may_route_a_key_to_none_one_or_several_partitions(
    make: Make, world: World
) -> None:
    locator = FakeLocator({"eu": ("s-0",), "all": ("s-0", "s-1")})
    producer = make("s-0", "s-1", routing=BrokerRoutes("s", locator, 5))
    for _ in range(3):
        producer.send(b"1", key="eu")
    producer.send(b"2", key="all")
    with pytest.raises(Unroutable, match="'mars'"):
        producer.send(b"3", key="mars")
    assert producer.send_many([b"4", b"5"], ["mars", "eu"]) == range(4, 6)
    report = producer.flush(PATIENCE)
    assert (report.stored, numbers(report, Outcome.UNROUTABLE)) == (6, [4])
    assert isinstance(report.not_stored[0].cause, Unroutable)
    with pytest.raises(NotStored, match=r"the first unroutable is message 4: .*'mars'"):
        report.raise_for_failures()
    assert [len(world.bodies(stream)) for stream in ("s-0", "s-1")] == [5, 1]
    assert locator.asked == ["eu", "all", "mars"]


def test_a_partition_that_fails_while_another_has_no_room_is_not_given_the_message(
    make: Make, world: World
) -> None:
    world.confirms = False
    locator = FakeLocator({"us": ("s-1",), "all": ("s-0", "s-1")})
    routing = BrokerRoutes("s", locator, 5)
    producer = make("s-0", "s-1", routing=routing, max_unconfirmed=1, linger=0)
    producer.send(b"fills s-1", key="us")
    raised: list[Exception] = []

    def send() -> None:
        try:
            producer.send(b"to both", key="all", timeout=PATIENCE)
        except StreamNotFound as error:
            raised.append(error)

    waiting = threading.Thread(target=send)
    waiting.start()
    eventually(lambda: "all" in locator.asked)
    handler, _ = world.clients[0].handlers.pop(0)
    world.always = StreamNotFound("Metadata", Code.NO_SUCH_STREAM, "s-0")
    handler.on_lost(ConnectionLost("gone"))
    eventually(lambda: _has_failed(producer, "s-0"))
    there, _ = world.clients[0].handlers[1]
    there.on_confirms((1,))
    waiting.join(PATIENCE)
    assert [type(each) for each in raised] == [StreamNotFound]
    report = producer.flush(0)
    assert (report.stored, report.pending) == (1, 0)


def _has_failed(producer: Producer, stream: str) -> bool:
    """Whether nothing can be sent there any more; asked with nothing to send."""
    return any(each.stream == stream and each._failure is not None for each in producer._writers)


def test_remembered_keys_are_bounded_and_age() -> None:
    now = [0.0]
    locator = FakeLocator({})
    routes = BrokerRoutes("s", locator, 5, max_keys=2, max_age=10, clock=lambda: now[0])
    for key in ("a", "b", "a", "c", "a", "b"):
        routes.streams(key)
    assert locator.asked == ["a", "b", "c", "b"]
    now[0] = 11
    routes.streams("b")
    assert locator.asked[-1] == "b"
    assert len(locator.asked) == 5


def test_a_partition_that_is_away_does_not_hold_up_the_others(make: Make, world: World) -> None:
    producer = make("s-0", "s-1", routing=lambda key, _: int(key), max_unconfirmed=2)
    handler, _ = world.clients[0].handlers.pop(0)
    world.always = ConnectionLost("down")
    handler.on_lost(ConnectionLost("reset"))
    producer.send_many([b"x", b"x"], ["0", "0"])
    with pytest.raises(Overloaded):
        producer.send(b"x", key="0", timeout=0.01)
    for _ in range(10):
        producer.send(b"y", key="1", timeout=PATIENCE)
    eventually(lambda: len(world.bodies("s-1")) == 10)
    world.always = None
    assert producer.flush(PATIENCE).stored == 12


def test_a_producer_that_can_not_be_opened_leaves_nothing_behind(make: Make, world: World) -> None:
    world.failures = []
    routing_fails = ConnectionLost("down")

    def second_fails(
        leader: Broker, stream: str, handler: PublisherHandler, deadline: float
    ) -> tuple[StreamClient, int]:
        if stream == "s-1":
            raise routing_fails
        return World.publisher(world, leader, stream, handler, deadline)

    world.publisher = second_fails  # type: ignore[method-assign]
    with pytest.raises(ConnectionLost):
        make("s-0", "s-1")
    assert world.clients[0].handlers == {}
    assert world.clients[0].declared == {}
