"""TLS and logins at a real broker: what is verified works, and what is not is refused."""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sharding.errors import Unreachable
from sharding.stream.connections.connection import ConnectOptions, Login, StreamClient, connect
from sharding.stream.errors import (
    AccessRefused,
    AuthenticationFailed,
    PeerNotTrusted,
    ProtocolError,
)
from sharding.stream.protocol.commands import (
    Create,
    DeclarePublisher,
    Delete,
    Subscribe,
    credit_frame,
    publish_header,
)
from sharding.stream.protocol.constants import FIRST, NEXT, Broker, OffsetSpec
from tests.cluster.secured import NAME, Secured
from tests.cluster.waiting import PATIENCE
from tests.support.certificates import Authority

pytestmark = pytest.mark.cluster


def options(
    secured: Secured, login: Login | None = None, name: str | None = None
) -> ConnectOptions:
    return ConnectOptions(
        login or Login(), secured.authority.client_context(), name, connect_timeout=PATIENCE
    )


@pytest.mark.parametrize("name", [None, NAME])
def test_a_verified_broker_is_used(secured: Secured, name: str | None) -> None:
    client = connect(secured.tls, options(secured, name=name))
    try:
        assert client.server_version[:2] == tuple(map(int, secured.version.split(".")))
        stream = f"tls-{secrets.token_hex(4)}"
        client.call(Create(stream))
        client.call(Delete(stream))
    finally:
        client.close()


class Both:
    """Publishes and reads on one connection at the same time."""

    def __init__(self, client: StreamClient, expected: int) -> None:
        self._client = client
        self._expected = expected
        self.subscription = 0
        self.confirmed = self.read = 0
        self.done = threading.Event()
        self.lost: Exception | None = None

    def on_confirms(self, publishing_ids: Sequence[int]) -> None:
        self.confirmed += len(publishing_ids)
        self._check()

    def on_refusals(self, refusals: Sequence[tuple[int, int]]) -> None:
        self.on_lost(AssertionError(refusals))

    def on_chunk(self, chunk: memoryview) -> None:
        self.read += struct.unpack_from(">I", chunk, 4)[0]
        self._client.send(credit_frame(self.subscription, 1))
        self._check()

    def on_activity(self, active: bool) -> OffsetSpec:  # noqa: ARG002
        return NEXT

    def on_lost(self, reason: Exception) -> None:
        self.lost = reason
        self.done.set()

    def _check(self) -> None:
        if self.confirmed == self.read == self._expected:
            self.done.set()


def test_many_threads_write_while_one_reads_over_one_tls_connection(secured: Secured) -> None:
    threads, frames, messages = 4, 40, 200
    client = connect(secured.tls, options(secured))
    stream = f"tls-{secrets.token_hex(4)}"
    client.call(Create(stream))
    both = Both(client, threads * frames * messages)
    try:
        publisher = client.attach_publisher(both, stream)
        client.call(DeclarePublisher(publisher, None, stream))
        both.subscription = client.attach_subscriber(both, stream)
        client.call(Subscribe(both.subscription, stream, FIRST, 10))

        def publish(number: int) -> None:
            for one in range(frames):
                first = (number * frames + one) * messages
                entries = [
                    struct.pack(">QI", first + at, 200) + secrets.token_bytes(200)
                    for at in range(messages)
                ]
                content = b"".join(entries)
                client.send(publish_header(publisher, messages, len(content)), *entries)

        with ThreadPoolExecutor(threads) as writers:
            list(writers.map(publish, range(threads)))
        assert both.done.wait(PATIENCE), (both.confirmed, both.read)
        assert both.lost is None
    finally:
        client.detach_publisher(publisher)
        client.detach_subscriber(both.subscription)
        client.call(Delete(stream))
        client.close()


def refused(address: Broker, options: ConnectOptions) -> Exception:
    with pytest.raises((AuthenticationFailed, Unreachable, ProtocolError)) as caught:
        connect(address, options)
    return caught.value


def test_a_broker_of_another_name_is_refused(secured: Secured) -> None:
    error = refused(secured.tls, options(secured, name="other.test"))
    assert isinstance(error, PeerNotTrusted)
    assert "other.test" in str(error)


def test_a_broker_of_another_authority_is_refused(secured: Secured, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger").client_context()
    error = refused(secured.tls, ConnectOptions(tls=stranger, connect_timeout=PATIENCE))
    assert isinstance(error, PeerNotTrusted)


def test_tls_at_a_plain_port_and_plain_text_at_a_tls_port_are_refused(secured: Secured) -> None:
    soon = ConnectOptions(tls=secured.authority.client_context(), connect_timeout=2)
    refused(secured.plain, soon)
    refused(secured.tls, ConnectOptions(connect_timeout=2))


@pytest.mark.parametrize("over_tls", [True, False])
def test_a_wrong_password_is_refused_and_not_shown(secured: Secured, over_tls: bool) -> None:
    login = Login("guest", "not-the-password")
    chosen = (
        options(secured, login) if over_tls else ConnectOptions(login, connect_timeout=PATIENCE)
    )
    error = refused(secured.tls if over_tls else secured.plain, chosen)
    assert isinstance(error, AuthenticationFailed)
    assert "'guest'" in str(error)
    assert "not-the-password" not in str(error)


def test_a_virtual_host_that_is_not_there_is_refused(secured: Secured) -> None:
    with pytest.raises(AccessRefused, match="'nowhere'"):
        connect(secured.plain, ConnectOptions(Login(vhost="nowhere"), connect_timeout=PATIENCE))


def test_external_logs_in_by_certificate(secured: Secured) -> None:
    context = secured.authority.client_context(secured.authority.sign("guest"))
    chosen = ConnectOptions(Login("", "", mechanism="EXTERNAL"), context, connect_timeout=PATIENCE)
    if secured.version == "3.10":
        refused(secured.tls, chosen)  # 3.10.8 itself fails at it
        return
    client = connect(secured.tls, chosen)
    stream = f"tls-{secrets.token_hex(4)}"
    client.call(Create(stream))
    client.call(Delete(stream))
    client.close()


def test_external_with_a_certificate_of_nobody_is_refused(secured: Secured) -> None:
    context = secured.authority.client_context(secured.authority.sign("nobody"))
    chosen = ConnectOptions(Login("", "", mechanism="EXTERNAL"), context, connect_timeout=PATIENCE)
    refused(secured.tls, chosen)


def test_anonymous_logs_in_where_the_broker_offers_it(secured: Secured) -> None:
    chosen = ConnectOptions(Login("", "", mechanism="ANONYMOUS"), connect_timeout=PATIENCE)
    if secured.version == "3.10":
        error = refused(secured.plain, chosen)
        assert isinstance(error, AuthenticationFailed)
        assert "PLAIN" in str(error)
        return
    connect(secured.plain, chosen).close()
