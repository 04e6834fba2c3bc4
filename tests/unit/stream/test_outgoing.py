"""What the client writes: heartbeats, frames of many threads, and never waiting without bound."""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import pytest

from sharding.errors import TryLater
from sharding.stream.connections import outgoing
from sharding.stream.connections.connection import ConnectOptions, StreamClient, connect
from sharding.stream.connections.outgoing import Outgoing
from sharding.stream.connections.transport import Buffer, PlainTransport, TlsTransport
from sharding.stream.errors import ConnectionLost
from sharding.stream.protocol.commands import Create, activity_answer_frame, credit_frame
from sharding.stream.protocol.constants import Key, OffsetSpec
from tests.cluster.waiting import PATIENCE
from tests.support.certificates import Authority, server_context
from tests.support.fake_broker import FakeBroker, Peer
from tests.support.hand_time import HandClock
from tests.support.stream_frames import PUSHED, frame
from tests.support.stream_recorder import Recorder, attached

pytestmark = pytest.mark.timeout(PATIENCE)  # who waits longer than it was told to fails by this

OPTIONS = ConnectOptions(connect_timeout=PATIENCE, request_timeout=100 * PATIENCE)
HEARTBEAT = frame(Key.HEARTBEAT, b"")


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


def test_a_silent_peer_is_dead_after_two_heartbeats(broker: FakeBroker) -> None:
    clock = HandClock()
    client = connect(broker.address, replace(OPTIONS, heartbeat=1), clock)
    recorder = Recorder()
    client.attach_publisher(recorder, "s")
    peer = broker.peer
    for now in (0.5, 1.9):  # meanwhile the peer is sent heartbeats
        clock.now = now
        assert peer.next_frame()[0] == Key.HEARTBEAT
        assert not client.closed
    clock.now = 2
    (reason,) = recorder.wait_for(1)
    assert "silent for 2 s" in str(reason)
    client.close()


def test_a_peer_that_sends_heartbeats_lives(broker: FakeBroker) -> None:
    clock = HandClock()
    client = connect(broker.address, replace(OPTIONS, heartbeat=1), clock)
    peer = broker.peer
    for _ in range(10):  # far more than two heartbeats
        clock.now += 0.5
        peer.send(HEARTBEAT)
        assert peer.next_frame()[0] == Key.HEARTBEAT
    assert not client.closed
    client.close(0)


def test_a_peer_that_takes_nothing_is_given_up_in_time(connected: Connected) -> None:
    client, _ = connected
    recorder = Recorder()
    client.attach_publisher(recorder, "s")
    large = bytes(16 * 1024 * 1024)
    with pytest.raises(ConnectionLost, match="only in part"):
        client.send(large, large, timeout=0.3)
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
        assert "does not take our answers: 10 wait" in str(publisher.wait_for(1)[0])
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


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_pair(authority: Authority) -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    ours, theirs = socket.socketpair()
    server = server_context(authority.sign("localhost"))
    with ThreadPoolExecutor(1) as threads, ours, theirs:
        accepted = threads.submit(server.wrap_socket, theirs, server_side=True)
        client = authority.client_context().wrap_socket(ours, server_hostname="localhost")
        with client, accepted.result(PATIENCE) as peer:
            peer.settimeout(PATIENCE)
            yield client, peer


def test_over_tls_what_was_given_up_does_not_spoil_what_follows(
    tls_pair: tuple[ssl.SSLSocket, ssl.SSLSocket],
) -> None:
    """OpenSSL has made a record of bytes that it could not send, and sends that one first."""
    client, peer = tls_pair
    sending = Outgoing(TlsTransport(client))
    sent = bytearray()
    with suppress(TryLater):
        for number in itertools.count():
            sent += number.to_bytes(4) * 250
            sending.send([sent[-1000:]], deadline=0)
    later = b"later" * 300
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(_read, peer, len(sent) + len(later))
        sending.send([later], deadline=time.monotonic() + PATIENCE)
        assert received.result(PATIENCE) == sent + later


def _read(sock: ssl.SSLSocket, count: int) -> bytes:
    came = b""
    while len(came) < count:
        came += sock.recv(count - len(came))
    return came


class TakesOnly(PlainTransport):
    """Takes the first `count` bytes, and nothing more."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._left = count
        self._then = then

    def send(self, buffers: Sequence[Buffer]) -> int:
        taken = min(self._left, sum(map(len, buffers)))
        self._left -= taken
        if taken:
            self._then()
        return taken

    def wait(self, timeout: float, *, to_receive: bool = False, to_send: bool = False) -> bool:  # noqa: ARG002
        return False


def test_an_answer_that_is_late_is_no_failure_of_who_wrote_before_it() -> None:
    transport = TakesOnly(3, then=lambda: sending.post(b"answer"))  # while another thread writes
    sending = Outgoing(transport, HandClock())
    sending.send([b"own"], deadline=0)
    assert sending.waits_to_flush


class Slow:
    """A transport that is in the middle of a write until it is let go."""

    keeps_what_it_refused: ClassVar[bool] = False

    def __init__(self) -> None:
        self.writing, self.let_go, self.closed = (threading.Event() for _ in range(3))

    def receive_into(self, buffer: memoryview) -> int | None:  # noqa: ARG002
        return None

    def send(self, buffers: Sequence[Buffer]) -> int:
        self.writing.set()
        assert self.let_go.wait(PATIENCE)
        assert not self.closed.is_set()
        return sum(map(len, buffers))

    def wait(self, timeout: float, **_: bool) -> bool:  # noqa: ARG002
        return True

    def shut_down(self) -> None:
        pass

    def close(self) -> None:
        self.closed.set()


def test_a_socket_that_is_still_written_to_is_closed_by_who_writes() -> None:
    """Else it stayed open until it was collected."""
    transport = Slow()
    sending = Outgoing(transport)
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(sending.send, [b"x"], time.monotonic() + PATIENCE)
        assert transport.writing.wait(PATIENCE)
        sending.close(timeout=0)
        assert not transport.closed.is_set()
        transport.let_go.set()
        writing.result(PATIENCE)
    assert transport.closed.is_set()
