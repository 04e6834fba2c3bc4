"""The blocking client: calls, handlers and the end of a connection, against a peer on a socket."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from sharding.stream.connections.connection import ConnectOptions, Login, StreamClient, connect
from sharding.stream.errors import (
    ClientFull,
    ConnectionLost,
    NoAnswerInTime,
    NotSupported,
    StreamExists,
    StreamUnavailable,
)
from sharding.stream.protocol.commands import (
    Create,
    QueryOffset,
    StreamStats,
    activity_answer_frame,
    credit_frame,
)
from sharding.stream.protocol.constants import Broker, Code, Key, OffsetSpec
from tests.cluster.waiting import PATIENCE
from tests.support.fake_broker import FakeBroker, Peer
from tests.support.stream_frames import CHUNK, CLOSE, PUSHED, answer, frame
from tests.support.stream_recorder import Recorder, attached

pytestmark = pytest.mark.timeout(PATIENCE)  # who waits longer than it was told to fails by this

OPTIONS = ConnectOptions(connect_timeout=PATIENCE, request_timeout=100 * PATIENCE)


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as running:
        yield running


Connected = tuple[StreamClient, Peer]


@pytest.fixture
def connected(broker: FakeBroker) -> Iterator[Connected]:
    client = connect(broker.address, OPTIONS)
    yield client, broker.peer
    client.close(0)


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
    client = connect(broker.address, OPTIONS)
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


def test_an_answer_about_activity_may_come_later_and_holds_up_nothing_else(
    connected: Connected,
) -> None:
    client, peer = connected
    _, subscriber = attached(client)
    subscriber.answer = later = Future[OffsetSpec]()
    peer.send(PUSHED[5])
    peer.send(PUSHED[2])
    assert [kind for kind, _ in subscriber.wait_for(2)] == ["activity", "chunk"]
    client.send(credit_frame(3, 1))
    assert peer.next_frame()[0] == Key.CREDIT, "nothing was answered before"
    later.set_result(OffsetSpec.at(42))
    body = peer.next_frame_with(0x8000 | Key.CONSUMER_UPDATE)
    assert body == activity_answer_frame(99, OffsetSpec.at(42))[8:]


def test_an_answer_about_activity_that_comes_after_the_end_is_nobodys(
    connected: Connected,
) -> None:
    client, peer = connected
    _, subscriber = attached(client)
    subscriber.answer = later = Future[OffsetSpec]()
    peer.send(PUSHED[5])
    subscriber.wait_for(1)
    client.close(0)
    later.set_result(OffsetSpec.at(42))
    assert (0x8000 | Key.CONSUMER_UPDATE).to_bytes(2, "big") not in peer.drain()


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
    client.on_metadata_update = lambda stream, code: updates.tell((stream, code))
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
    assert client.lost_credit
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
        client.close(PATIENCE)
    assert client.closed
    assert not client._reading.is_alive()
    for handler in handlers:
        (reason,) = handler.told
        assert "closed by this side" in str(reason)


def test_closing_is_bounded_when_the_peer_is_silent(
    connected: Connected, caplog: pytest.LogCaptureFixture
) -> None:
    client, peer = connected
    with caplog.at_level(logging.DEBUG, "warren.stream"):
        client.close(0.2)
    assert client.closed
    assert "did not answer Close within 0.2 s" in caplog.text
    assert frame(Key.CLOSE, b"")[4:8] in peer.drain(), "it was asked to"


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


@pytest.mark.parametrize("harm", [PUSHED[4], CLOSE], ids=["the stream left", "the peer closed"])
def test_a_handler_that_fails_when_told_of_the_end_keeps_it_from_nobody(
    connected: Connected, harm: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client, peer = connected

    class Failing(Recorder):
        def on_lost(self, reason: Exception) -> None:
            raise ValueError(reason)

    client.attach_publisher(Failing(), "invoices-0")
    others = [Recorder(), Recorder()]
    client.attach_publisher(others[0], "invoices-0")
    client.attach_subscriber(others[1], "invoices-0")
    peer.send(harm)
    for other in others:
        assert len(other.wait_for(1)) == 1
    assert "ValueError" in caplog.text


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


def test_no_secret_is_shown_by_options() -> None:
    assert "hidden" not in repr(ConnectOptions(Login("me", "hidden")))
