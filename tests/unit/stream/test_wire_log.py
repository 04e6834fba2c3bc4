"""The wire log shows every frame in both directions, and no secret."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from sharding.stream.connections.connection import ConnectOptions, connect
from sharding.stream.protocol import frames as module
from sharding.stream.protocol.commands import credit_frame, heartbeat_frame, publish_header
from sharding.stream.protocol.frames import VARIABLE, Frame, WireLog, described, wire_log
from sharding.stream.protocol.handshake import SaslAuthenticate
from tests.cluster.waiting import PATIENCE
from tests.support.fake_broker import FakeBroker
from tests.support.stream_frames import LOGIN, PASSWORD


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """One of the test's own, that nobody else finds by its name."""
    own = logging.Logger("warren.wire")
    monkeypatch.setattr(module, "LOGGER", own)
    return own


def test_a_whole_connection_is_logged_without_its_password(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(WireLog.__init__, "__defaults__", (logger,))
    monkeypatch.setenv(VARIABLE, "1")
    with FakeBroker() as broker:
        client = connect(broker.address, ConnectOptions(LOGIN, connect_timeout=PATIENCE))
        client.send(credit_frame(7, 10))
        client.close(0)
    lines = stderr.getvalue().splitlines()
    frames = [line.split(" ", 1)[1].replace(str(broker.address), "peer") for line in lines]
    names = [frame.split(" v1")[0] for frame in frames]
    assert names[:12] == [
        "→ peer PeerProperties",
        "← peer PeerProperties answer",
        "→ peer SaslHandshake",
        "← peer SaslHandshake answer",
        "→ peer SaslAuthenticate",
        "← peer SaslAuthenticate answer",
        "← peer Tune",
        "→ peer Tune",
        "→ peer Open",
        "← peer Open answer",
        "→ peer ExchangeCommandVersions",
        "← peer ExchangeCommandVersions answer",
    ]
    assert "→ peer Credit v1, 3 bytes: 07 00 0a" in frames
    assert PASSWORD not in stderr.getvalue()
    assert PASSWORD.encode().hex(" ") not in stderr.getvalue()


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_logged_unless_asked_for(logger: logging.Logger, value: str | None) -> None:
    assert wire_log("peer", {} if value is None else {VARIABLE: value}) is None
    assert not logger.handlers


def test_several_connections_share_one_output(logger: logging.Logger) -> None:
    assert wire_log("one", {VARIABLE: "1"}) is not None
    assert wire_log("other", {VARIABLE: "1"}) is not None
    assert len(logger.handlers) == 1


def test_a_frame_in_several_buffers_is_one_and_several_frames_in_one_are_several(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    logger.addHandler(caplog.handler)
    log = WireLog("peer", logger)
    log.sent([publish_header(1, 1, 100), bytes(60), bytes(40)])
    log.sent([heartbeat_frame() + heartbeat_frame()])
    assert [message.split(":")[0] for message in caplog.messages] == [
        "→ peer Publish v1, 105 bytes",
        "→ peer Heartbeat v1, 0 bytes",
        "→ peer Heartbeat v1, 0 bytes",
    ]


def test_long_content_is_cut() -> None:
    assert len(described(Frame(2, 1, memoryview(bytes(10_000))))) < 200


def test_a_secret_is_masked_and_an_unknown_key_named() -> None:
    written = SaslAuthenticate("PLAIN", LOGIN.secret(), LOGIN.user).encode(3)
    text = described(Frame(19, 1, memoryview(written)[8:]))
    assert text.endswith("bytes: ***")
    assert described(Frame(999, 1, memoryview(b""))) == "key 0x03e7 v1, 0 bytes: "
