"""A wrapped connection is what its callbacks get."""

from __future__ import annotations

from typing import Any

import pytest

from interceptors import ShardedConnection


class Blocking:
    """The part of pika's connection that tells of alarms; a broker has none on demand."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def add_on_connection_blocked_callback(self, callback: Any) -> None:
        self.told["blocked"] = callback

    def add_on_connection_unblocked_callback(self, callback: Any) -> None:
        self.told["unblocked"] = callback


@pytest.mark.parametrize("what", ["blocked", "unblocked"])
def test_callbacks_of_alarms_get_the_wrapped_connection(what: str) -> None:
    inner: Any = Blocking()
    topology: Any = None
    connection = ShardedConnection(inner, topology)
    seen: list[Any] = []
    add = getattr(connection, f"add_on_connection_{what}_callback")
    add(lambda *given: seen.append(given))
    inner.told[what](inner, "frame")
    assert seen == [(connection, "frame")]
