"""A handler of publishers and subscriptions that keeps what it is told."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from sharding.stream.connections.attachments import ActivityAnswer
from sharding.stream.connections.connection import StreamClient
from sharding.stream.protocol.constants import OffsetSpec
from tests.cluster.waiting import PATIENCE


class Recorder:
    """Tells what it heard, in order; `wait_for` waits until it is so much."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.changed = threading.Condition()
        self.answer: ActivityAnswer = OffsetSpec.at(42)

    def tell(self, what: object) -> None:
        with self.changed:
            self.told.append(what)
            self.changed.notify_all()

    def on_confirms(self, publishing_ids: Sequence[int]) -> None:
        self.tell(("confirms", publishing_ids))

    def on_refusals(self, refusals: Sequence[tuple[int, int]]) -> None:
        self.tell(("refusals", refusals))

    def on_chunk(self, chunk: memoryview) -> None:
        self.tell(("chunk", bytes(chunk)))

    def on_activity(self, active: bool) -> ActivityAnswer:
        self.tell(("activity", active))
        return self.answer

    def on_lost(self, reason: Exception) -> None:
        self.tell(reason)

    def wait_for(self, count: int) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.told) >= count, PATIENCE), self.told
            return list(self.told)


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
