"""Peers that lie, hang or speak something else: an error in time, and no password to the wrong one.

Every peer here is a socket of the test's own, and everything that reaches it is recorded.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest

from sharding.errors import Unreachable
from sharding.stream.connections.connection import ConnectOptions, Login, connect
from sharding.stream.errors import AuthenticationFailed, PeerNotTrusted, ProtocolError
from sharding.stream.protocol.constants import FIRST, Broker, Key, OffsetSpec
from tests.cluster.waiting import PATIENCE
from tests.support.certificates import Authority, server_context
from tests.support.fake_broker import FakeBroker, Peer
from tests.support.stream_frames import LOGIN, PASSWORD, answer, frame, handshake, strings

pytestmark = pytest.mark.timeout(PATIENCE)  # "in time" fails by this: peers here hang for ever

STEPS = range(len(handshake()))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def fails_in_time(
    address: Broker, options: ConnectOptions, clock: Callable[[], float] = time.monotonic
) -> Exception:
    with pytest.raises((ProtocolError, Unreachable, AuthenticationFailed)) as caught:
        connect(address, options, clock)
    assert PASSWORD not in str(caught.value)
    return caught.value


PATIENT = ConnectOptions(LOGIN, connect_timeout=100 * PATIENCE)
"""For what has to be noticed by itself: who waits for the deadline fails the test."""


# Who gets the password.


def secret_options(authority: Authority, server_name: str | None = None) -> ConnectOptions:
    return ConnectOptions(
        LOGIN, tls=authority.client_context(), server_name=server_name, connect_timeout=PATIENCE
    )


def test_a_trusted_peer_gets_the_password(authority: Authority) -> None:
    """The control: what the tests below look for is found where it belongs."""
    context = server_context(authority.sign("trusted", "IP:127.0.0.1,DNS:trusted"))
    for server_name in (None, "trusted"):
        with FakeBroker(context) as broker:
            client = connect(broker.address, secret_options(authority, server_name))
            assert PASSWORD.encode() in broker.peer.bytes_seen
            client.close(0)


def test_a_certificate_for_another_host_gets_no_password(authority: Authority) -> None:
    with FakeBroker(server_context(authority.sign("other", "DNS:other.test"))) as broker:
        error = fails_in_time(broker.address, secret_options(authority))
        assert isinstance(error, PeerNotTrusted)
        assert "127.0.0.1" in str(error)
        assert broker.everything_seen() == b""


def test_a_certificate_without_the_name_asked_for_gets_no_password(authority: Authority) -> None:
    context = server_context(authority.sign("named", "IP:127.0.0.1,DNS:named.test"))
    with FakeBroker(context) as broker:
        error = fails_in_time(broker.address, secret_options(authority, "wanted.test"))
        assert isinstance(error, PeerNotTrusted)
        assert broker.everything_seen() == b""


def test_a_certificate_of_another_authority_gets_no_password(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    with FakeBroker(server_context(stranger.sign("trusted", "IP:127.0.0.1"))) as broker:
        error = fails_in_time(broker.address, secret_options(authority))
        assert isinstance(error, PeerNotTrusted)
        assert broker.everything_seen() == b""


@pytest.mark.parametrize("speaks_first", [b"", b"".join(handshake()), b"HTTP/1.1 400 Bad\r\n\r\n"])
def test_a_plain_text_peer_gets_no_password_where_tls_was_asked_for(
    authority: Authority, speaks_first: bytes
) -> None:
    def answer_in_plain_text(peer: Peer) -> None:
        peer.send(speaks_first or handshake()[0])
        peer.drain()

    with FakeBroker() as broker:
        broker.on_connect = answer_in_plain_text
        error = fails_in_time(broker.address, secret_options(authority))
        assert isinstance(error, PeerNotTrusted)
        seen = broker.peer.bytes_seen
        assert seen[:1] == b"\x16"  # a TLS handshake, and no frame of ours
        assert PASSWORD.encode() not in seen
        assert LOGIN.user.encode() not in seen


def test_a_peer_that_offers_no_mechanism_of_ours_gets_no_password() -> None:
    def offer_nothing(peer: Peer) -> None:
        peer.open(until=1)
        peer.next_frame()
        peer.send(answer(Key.SASL_HANDSHAKE, 2, strings("EXTERNAL", "X-OTHER")))
        peer.drain()

    with FakeBroker() as broker:
        broker.on_connect = offer_nothing
        assert isinstance(fails_in_time(broker.address, PATIENT), AuthenticationFailed)
        seen = broker.peer.bytes_seen
        assert b"Warren" in seen  # our properties are there,
        assert PASSWORD.encode() not in seen
        assert LOGIN.user.encode() not in seen


# Who hangs, lies or leaves.


def hang(peer: Peer, data: bytes = b"") -> None:
    peer.send(data)
    peer.drain()


def leave(peer: Peer, data: bytes = b"") -> None:
    peer.send(data)
    peer.socket.close()


def drip(peer: Peer, data: bytes) -> None:
    """Byte by byte, and from the beginning again, until the other side leaves."""
    waiting = threading.Event()
    for byte in cycle(data):
        peer.send(bytes([byte]))
        waiting.wait(0.05)


def flood(peer: Peer) -> None:
    """Heartbeats without a pause, until the other side leaves."""
    while True:
        peer.send(frame(Key.HEARTBEAT, b"") * 1000)


MISDEEDS: dict[str, Callable[[Peer, bytes], None]] = {
    "says nothing": lambda peer, _: hang(peer),
    "leaves": lambda peer, _: leave(peer),
    "sends half a frame and hangs": lambda peer, good: hang(peer, good[: len(good) // 2]),
    "sends half a frame and leaves": lambda peer, good: leave(peer, good[: len(good) // 2]),
    "drips": drip,
    "sends rubbish": lambda peer, _: peer.send(b"\x9c" * 1000),
    "sends zeros": lambda peer, _: peer.send(bytes(1000)),
    "speaks HTTP": lambda peer, _: peer.send(b"HTTP/1.1 200 OK\r\n\r\n"),
    "declares a huge frame": lambda peer, _: peer.send(struct.pack(">IH", 2**32 - 1, 0x8011)),
    "declares a frame too large for now": lambda peer, _: peer.send(
        struct.pack(">IHH", 8193, 0x8011, 1)
    ),
    "delivers a chunk": lambda peer, _: peer.send(frame(Key.DELIVER, bytes(100))),
    "sends heartbeats for ever": lambda peer, _: drip(peer, frame(Key.HEARTBEAT, b"")),
    "floods": lambda peer, _: flood(peer),
    "answers something else": lambda peer, _: peer.send(answer(Key.CREATE, 1)),
    "closes": lambda peer, _: peer.send(
        frame(Key.CLOSE, struct.pack(">IH", 1, 15) + b"\0\6no way")
    ),
}
ENDLESS = (
    *("says nothing", "sends half a frame and hangs", "drips", "floods"),
    "sends heartbeats for ever",
)
"""What nothing but the deadline ends; everything else is noticed by itself."""


class LateClock:
    """Stands still until a peer has come to its misdeed; then little is left of the time."""

    def __init__(self) -> None:
        self._runs_since: float | None = None

    def __call__(self) -> float:
        if self._runs_since is None:
            return 0.0
        return PATIENT.connect_timeout - 0.2 + time.monotonic() - self._runs_since

    def run(self, peer: Peer) -> None:
        self._runs_since = time.monotonic()
        peer.send(frame(Key.HEARTBEAT, b""))  # has the other side look at the clock


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_misdeed_at_any_step_of_the_handshake_is_an_error_in_time(
    misdeed: str, step: int
) -> None:
    clock = LateClock()

    def misbehave(peer: Peer) -> None:
        peer.open(until=step)
        if misdeed in ENDLESS:
            clock.run(peer)
        MISDEEDS[misdeed](peer, handshake()[step])

    with FakeBroker() as broker:
        broker.on_connect = misbehave
        error = fails_in_time(broker.address, PATIENT, clock)
    assert ("the time is up" in str(error)) is (misdeed in ENDLESS)


def test_the_reason_of_a_peer_that_closes_is_told() -> None:
    with FakeBroker() as broker:
        broker.on_connect = lambda peer: MISDEEDS["closes"](peer, b"")
        assert "no way" in str(fails_in_time(broker.address, PATIENT))


def test_a_peer_that_hangs_is_named_with_what_it_owes() -> None:
    clock = LateClock()

    def hang_after_two_steps(peer: Peer) -> None:
        peer.open(until=2)
        clock.run(peer)
        hang(peer)

    with FakeBroker() as broker:
        broker.on_connect = hang_after_two_steps
        text = str(fails_in_time(broker.address, PATIENT, clock))
        assert str(broker.address) in text
        assert "the answer to SaslAuthenticate" in text


@pytest.mark.parametrize(
    "hangs", [hang, lambda peer: drip(peer, bytes.fromhex("160303007a02000076"))]
)
def test_a_peer_that_hangs_in_the_tls_handshake_is_given_up_in_time(
    authority: Authority, hangs: Callable[[Peer], None]
) -> None:
    with FakeBroker() as broker:
        broker.on_connect = hangs
        options = ConnectOptions(LOGIN, tls=authority.client_context(), connect_timeout=0.6)
        fails_in_time(broker.address, options)


def test_an_address_where_nobody_listens_is_unreachable_at_once() -> None:
    with socket.socket() as bound:  # nobody else gets the port meanwhile
        bound.bind(("127.0.0.1", 0))
        free = Broker(*bound.getsockname())
        error = fails_in_time(free, PATIENT)
    assert isinstance(error, Unreachable)
    assert str(free) in str(error)
    assert "refused" in str(error)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, "é" * 100])
def test_a_name_that_is_nobodys_is_unreachable(host: str) -> None:
    error = fails_in_time(Broker(host, 5552), ConnectOptions(LOGIN, connect_timeout=5))
    assert isinstance(error, Unreachable)


class Lost:
    """A subscription that waits to hear of the end."""

    def __init__(self) -> None:
        self.heard = threading.Event()
        self.reason: Exception | None = None

    def on_chunk(self, chunk: memoryview) -> None:
        pass

    def on_activity(self, active: bool) -> OffsetSpec:  # noqa: ARG002
        return FIRST

    def on_lost(self, reason: Exception) -> None:
        self.reason = reason
        self.heard.set()


LIVELY = ("drips", "floods", "sends heartbeats for ever", "delivers a chunk")
"""What does no harm to an open connection."""
AFTER_OPENING = [name for name in MISDEEDS if name not in LIVELY]


@pytest.mark.parametrize("misdeed", AFTER_OPENING)
def test_a_misdeed_after_the_handshake_ends_the_connection_in_time(misdeed: str) -> None:
    def misbehave(peer: Peer) -> None:
        peer.open()
        MISDEEDS[misdeed](peer, frame(Key.DELIVER, bytes(1000)))

    with FakeBroker() as broker:
        broker.on_connect = misbehave
        client = connect(
            broker.address, ConnectOptions(Login(), heartbeat=1, connect_timeout=PATIENCE)
        )
        lost = Lost()
        try:
            client.attach_subscriber(lost, "s")
        except Unreachable:
            lost.heard.set()  # it was quicker than we
        assert lost.heard.wait(PATIENCE)
        assert client.closed
        client.close()
