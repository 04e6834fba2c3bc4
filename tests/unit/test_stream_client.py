"""The blocking client: calls, handlers and the end of a connection, against a peer on a socket."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sharding.stream import outgoing
from sharding.stream.admin_requests import Create, StreamStats
from sharding.stream.client import ConnectOptions, Login, StreamClient, connect
from sharding.stream.errors import (
    ClientFull,
    ConnectionLost,
    NoAnswerInTime,
    NotSupported,
    StreamExists,
    StreamUnavailable,
)
from sharding.stream.protocol import Broker, Code, Key, OffsetSpec
from sharding.stream.requests import QueryOffset, activity_answer_frame, credit_frame
from tests.fake_broker import FakeBroker, Peer
from tests.stream_frames import CHUNK, CLOSE, PUSHED, answer, frame

PATIENCE = 5.0


class Recorder:
    """A handler that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.changed = threading.Condition()
        self.answer = OffsetSpec.at(42)

    def _tell(self, what: object) -> None:
        with self.changed:
            self.told.append(what)
            self.changed.notify_all()

    def on_confirms(self, publishing_ids: Sequence[int]) -> None:
        self._tell(("confirms", publishing_ids))

    def on_refusals(self, refusals: Sequence[tuple[int, int]]) -> None:
        self._tell(("refusals", refusals))

    def on_chunk(self, chunk: memoryview) -> None:
        self._tell(("chunk", bytes(chunk)))

    def on_activity(self, active: bool) -> OffsetSpec:
        self._tell(("activity", active))
        return self.answer

    def on_lost(self, reason: Exception) -> None:
        self._tell(reason)

    def wait_for(self, count: int) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.told) >= count, PATIENCE), self.told
            return list(self.told)


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as running:
        yield running


Connected = tuple[StreamClient, Peer]


@pytest.fixture
def connected(broker: FakeBroker) -> Iterator[Connected]:
    client = connect(broker.address, ConnectOptions(request_timeout=PATIENCE))
    yield client, broker.peer
    client.close(0)


def attached(client: StreamClient, stream: str = "invoices-0") -> tuple[Recorder, Recorder]:
    """A publisher with id 4 and a subscription with id 3, as in the frames of the tests."""
    publisher, subscriber = Recorder(), Recorder()
    fillers = [client.attach_publisher(Recorder(), "other") for _ in range(4)]
    assert client.attach_publisher(publisher, stream) == 4
    others = [client.attach_subscriber(Recorder(), "other") for _ in range(3)]
    assert client.attach_subscriber(subscriber, stream) == 3
    for number in fillers:
        client.detach_publisher(number)
    for number in others:
        client.detach_subscriber(number)
    return publisher, subscriber


def test_a_connection_knows_the_node_it_has_reached(
    connected: Connected, broker: FakeBroker
) -> None:
    client, _ = connected
    assert client.address == broker.address
    assert client.node == Broker("rmq1", 5552)
    assert client.server_version == (4, 0, 5)
    assert client.supports(Key.PUBLISH, 2)
    assert not client.closed
    assert repr(client) == "<StreamClient of rmq1:5552: open, 0 publishers, 0 subscribers>"


def test_many_threads_get_their_own_answers(connected: Connected) -> None:
    client, peer = connected
    callers = 20

    def answer_in_reverse() -> None:
        asked = [peer.next_frame_with(Key.QUERY_OFFSET) for _ in range(callers)]
        for body in reversed(asked):
            offset = int(body[body.index(b"ref-") + 4 :][:2])
            peer.send(
                answer(
                    Key.QUERY_OFFSET,
                    struct.unpack_from(">I", body)[0],
                    struct.pack(">HQ", 1, offset),
                )
            )

    with ThreadPoolExecutor(callers + 1) as threads:
        threads.submit(answer_in_reverse)
        calls = [
            threads.submit(client.call, QueryOffset(f"ref-{number:02}", "s"))
            for number in range(callers)
        ]
        offsets = [call.result(PATIENCE).offset for call in calls]
    assert offsets == list(range(callers))


def test_a_refusal_is_raised_with_what_it_is_about(connected: Connected) -> None:
    client, peer = connected
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.call, Create("invoices"))
        correlation_id = struct.unpack_from(">I", peer.next_frame_with(Key.CREATE))[0]
        peer.send(answer(Key.CREATE, correlation_id, struct.pack(">H", Code.STREAM_EXISTS)))
        with pytest.raises(StreamExists, match="'invoices'"):
            call.result(PATIENCE)


def test_an_answer_that_does_not_come_is_unknown_and_a_late_one_harms_nobody(
    connected: Connected,
) -> None:
    client, peer = connected
    with pytest.raises(NoAnswerInTime, match="Create"):
        client.call(Create("s"), timeout=0.05)
    correlation_id = struct.unpack_from(">I", peer.next_frame_with(Key.CREATE))[0]
    recorder = Recorder()
    client.attach_publisher(recorder, "s")
    peer.send(answer(Key.CREATE, correlation_id))
    peer.send(frame(Key.PUBLISH_CONFIRM, struct.pack(">BIQ", 0, 1, 7)))
    assert recorder.wait_for(1) == [("confirms", (7,))]
    assert not client.closed


def test_what_a_broker_is_too_old_for_is_refused_here(broker: FakeBroker) -> None:
    broker.on_connect = lambda peer: peer.open("3.10.8")
    client = connect(broker.address, ConnectOptions())
    with pytest.raises(NotSupported):
        client.call(StreamStats("s"))
    assert not client.closed
    client.close(0)


def test_handlers_are_told_what_is_theirs(connected: Connected) -> None:
    client, peer = connected
    publisher, subscriber = attached(client)
    peer.send(b"".join(PUSHED[:3]))
    assert publisher.wait_for(2) == [
        ("confirms", (1, 2, 2**64 - 1)),
        ("refusals", ((1, 18), (2, 6))),
    ]
    assert subscriber.wait_for(1) == [("chunk", CHUNK)]


def test_what_arrives_for_a_detached_handler_is_dropped(connected: Connected) -> None:
    client, peer = connected
    publisher, subscriber = attached(client)
    client.detach_publisher(4)
    client.detach_subscriber(3)
    peer.send(b"".join(PUSHED[:4]))
    last = Recorder()
    number = client.attach_publisher(last, "s")
    peer.send(frame(Key.PUBLISH_CONFIRM, struct.pack(">BIQ", number, 1, 7)))
    last.wait_for(1)
    assert not publisher.told
    assert not subscriber.told


def test_being_made_active_is_answered_with_where_to_go_on(connected: Connected) -> None:
    client, peer = connected
    _, subscriber = attached(client)
    peer.send(PUSHED[5])
    body = peer.next_frame_with(0x8000 | Key.CONSUMER_UPDATE)
    assert body == activity_answer_frame(99, OffsetSpec.at(42))[8:]
    assert subscriber.told == [("activity", True)]


def test_being_made_active_is_answered_for_a_detached_subscription_too(
    connected: Connected,
) -> None:
    _, peer = connected
    peer.send(PUSHED[5])
    assert peer.next_frame_with(0x8000 | Key.CONSUMER_UPDATE)[:4] == struct.pack(">I", 99)


def test_a_stream_that_leaves_the_node_is_told_to_its_handlers_and_to_nobody_else(
    connected: Connected,
) -> None:
    client, peer = connected
    updates = Recorder()
    client.on_metadata_update = lambda stream, code: updates._tell((stream, code))
    publisher, subscriber = attached(client)
    other = Recorder()
    client.attach_publisher(other, "another")
    peer.send(PUSHED[4])
    for handler in (publisher, subscriber):
        (reason,) = handler.wait_for(1)
        assert isinstance(reason, StreamUnavailable)
        assert reason.subject == "invoices-0"
    assert updates.wait_for(1) == [("invoices-0", 6)]
    assert (client.publishers, client.subscribers) == (1, 0)
    client.close(0)
    assert isinstance(other.wait_for(1)[0], ConnectionLost)
    assert len(publisher.told) == len(subscriber.told) == 1


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda peer: peer.socket.close(), "the peer ended the connection"),
        (lambda peer: peer.send(CLOSE), "unknown frame"),
        (lambda peer: peer.send(bytes(100)), "4 are the least"),
        (lambda peer: peer.send(frame(999, b"")), "0x03e7"),
    ],
)
def test_everyone_is_told_once_of_the_end_of_a_connection(
    connected: Connected, harm: Callable[[Peer], None], text: str
) -> None:
    client, peer = connected
    handlers = attached(client)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.call, Create("s"))
        peer.next_frame_with(Key.CREATE)
        harm(peer)
        with pytest.raises(ConnectionLost, match=text):
            call.result(PATIENCE)
    for handler in handlers:
        (told,) = handler.wait_for(1)
        assert isinstance(told, ConnectionLost)
        assert text in str(told)
    assert client.closed
    with pytest.raises(ConnectionLost):
        client.call(Create("s"))
    with pytest.raises(ConnectionLost):
        client.send(credit_frame(1, 1))
    client._reading.join(PATIENCE)
    with pytest.raises(ConnectionLost):
        client.attach_publisher(Recorder(), "s")
    client.close()
    assert [len(handler.told) for handler in handlers] == [1, 1]


def test_closing_is_done_in_order_and_told(connected: Connected) -> None:
    client, peer = connected
    handlers = attached(client)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(peer.answer_close)
        client.close()
    assert client.closed
    assert not client._reading.is_alive()
    for handler in handlers:
        (reason,) = handler.told
        assert "closed by this side" in str(reason)


def test_closing_is_bounded_when_the_peer_is_silent(connected: Connected) -> None:
    client, _ = connected
    began = time.monotonic()
    client.close(0.2)
    assert time.monotonic() - began < 2
    assert client.closed


def test_a_handler_that_fails_ends_the_connection(
    connected: Connected, caplog: pytest.LogCaptureFixture
) -> None:
    client, peer = connected
    publisher, subscriber = attached(client)
    subscriber.answer = None  # type: ignore[assignment]
    peer.send(PUSHED[5])
    (reason,) = publisher.wait_for(1)
    assert "a handler failed" in str(reason)
    assert "Traceback" in caplog.text


def test_a_connection_takes_255_publishers_and_no_more(connected: Connected) -> None:
    client, _ = connected
    numbers = [client.attach_publisher(Recorder(), "s") for _ in range(255)]
    assert numbers == list(range(255))
    with pytest.raises(ClientFull):
        client.attach_publisher(Recorder(), "s")
    assert client.publishers == 255
    client.detach_publisher(17)
    assert client.attach_publisher(Recorder(), "s") == 17


def test_an_id_is_used_again_as_late_as_can_be(connected: Connected) -> None:
    client, _ = connected
    first = client.attach_subscriber(Recorder(), "s")
    client.detach_subscriber(first)
    assert client.attach_subscriber(Recorder(), "s") != first


def test_a_silent_peer_is_dead_after_two_heartbeats(broker: FakeBroker) -> None:
    client = connect(broker.address, ConnectOptions(heartbeat=1))
    recorder = Recorder()
    client.attach_publisher(recorder, "s")
    began = time.monotonic()
    (reason,) = recorder.wait_for(1)
    assert 1.8 < time.monotonic() - began < 4
    assert "silent for 2 s" in str(reason)
    # Meanwhile the peer was sent heartbeats.
    assert broker.peer.drain().count(frame(Key.HEARTBEAT, b"")) >= 2
    client.close()


def test_a_peer_that_sends_heartbeats_lives(broker: FakeBroker) -> None:
    client = connect(broker.address, ConnectOptions(heartbeat=1))
    peer = broker.peer
    until = time.monotonic() + 2.3  # more than two heartbeats
    while time.monotonic() < until:
        peer.send(frame(Key.HEARTBEAT, b""))
        peer.next_frame_with(Key.HEARTBEAT)  # comes every half second
    assert not client.closed
    client.close(0)


def test_a_peer_that_takes_nothing_is_given_up_in_time(connected: Connected) -> None:
    client, _ = connected
    recorder = Recorder()
    client.attach_publisher(recorder, "s")
    large = bytes(16 * 1024 * 1024)
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="only in part"):
        client.send(large, large, timeout=0.3)
    assert time.monotonic() - began < 3
    assert isinstance(recorder.wait_for(1)[0], ConnectionLost)


def test_the_reader_answers_while_another_thread_waits_to_write(connected: Connected) -> None:
    """A broker that waits for us to read, while we wait for it to read, must not hang us both."""
    client, peer = connected
    publisher, _ = attached(client)
    large = frame(Key.PUBLISH, bytes(16 * 1024 * 1024))
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(client.send, large, timeout=PATIENCE)
        peer.receive(1)  # it has begun, and the rest does not fit the socket's buffers
        peer.send(PUSHED[5] + PUSHED[0])  # the first wants an answer from the reading thread
        publisher.wait_for(1)  # and it still reads
        rest = peer.receive(len(large) - 1)
        assert rest == large[1:]
        assert peer.next_frame() == (
            0x8000 | Key.CONSUMER_UPDATE,
            activity_answer_frame(99, OffsetSpec.at(42))[8:],
        )
        writing.result(PATIENCE)
    assert not client.closed


def test_a_peer_that_asks_and_takes_no_answers_is_given_up(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, peer = connected
    monkeypatch.setattr(outgoing, "MOST_POSTED", 10)
    publisher, _ = attached(client)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(client.send, bytes(16 * 1024 * 1024), timeout=PATIENCE)
        peer.receive(1)
        peer.send(PUSHED[5] * 11)
        assert "took none of 10 answers" in str(publisher.wait_for(1)[0])
        with pytest.raises(ConnectionLost):
            writing.result(PATIENCE)


def test_a_handler_may_send_but_not_call(connected: Connected) -> None:
    client, peer = connected
    outcomes: list[Exception] = []

    class Caller(Recorder):
        def on_chunk(self, chunk: memoryview) -> None:
            client.send(credit_frame(3, 1))
            try:
                client.call(Create("s"))
            except Exception as error:
                outcomes.append(error)
            super().on_chunk(chunk)

    attached(client)
    client.detach_subscriber(3)
    caller = Caller()
    numbers = []
    while 3 not in numbers:
        numbers.append(client.attach_subscriber(caller, "s"))
    peer.send(PUSHED[2])
    assert peer.next_frame_with(Key.CREDIT) == credit_frame(3, 1)[8:]
    caller.wait_for(1)
    assert "never be read" in str(outcomes[0])


def test_frames_of_many_threads_are_never_mixed(connected: Connected) -> None:
    client, peer = connected
    frames = [frame(Key.PUBLISH, bytes([number]) * 70_000) for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for one in frames:
            for _ in range(5):
                threads.submit(client.send, one[:8], one[8:30_000], one[30_000:])
        found = [peer.next_frame_with(Key.PUBLISH) for _ in range(40)]
    assert sorted(found) == sorted(one[8:] for one in frames for _ in range(5))


def test_no_secret_is_shown_by_options() -> None:
    assert "hidden" not in repr(ConnectOptions(Login("me", "hidden")))
