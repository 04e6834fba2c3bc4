"""Names and addresses that a connection is made to."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from sharding.errors import Unreachable
from sharding.stream.connections.transport import resolved
from sharding.stream.protocol.constants import Broker


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_numeric_address_needs_no_thread_that_asks_a_resolver(
    host: str, family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", start)
    ((found, where),) = resolved(Broker(host, 5552), time.monotonic())
    assert (found, where[:2]) == (family, (host, 5552))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "." * 300, "\udcff"])
def test_what_is_no_address_is_left_to_the_resolver(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def start(thread: threading.Thread) -> None:
        asked.append(thread.name)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Unreachable, match="not resolved in time"):
        resolved(Broker(host, 5552), time.monotonic())
    assert asked == [f"warren-resolve-{host}"]
