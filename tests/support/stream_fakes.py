"""A stream connection without a socket, for what only needs to be connected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from sharding.stream.connections.attachments import PublisherHandler, SubscriberHandler
from sharding.stream.connections.connection import StreamClient
from sharding.stream.errors import ClientFull, ConnectionLost
from sharding.stream.protocol.constants import MAX_PUBLISHERS, Broker


class Handler:
    """A publisher or subscription that only hears of its end."""

    def __init__(self) -> None:
        self.lost: list[Exception] = []

    def on_confirms(self, publishing_ids: Sequence[int]) -> None: ...

    def on_refusals(self, refusals: Sequence[tuple[int, int]]) -> None: ...

    def on_chunk(self, chunk: memoryview) -> None: ...

    def on_activity(self, active: bool) -> Any: ...

    def on_lost(self, reason: Exception) -> None:
        self.lost.append(reason)


class FakeClient:
    """What the pool and the locator see of a `StreamClient`."""

    def __init__(self, address: Broker, node: Broker | None = None) -> None:
        self.address = address
        self.node = node or address
        self.server_version = (4, 0, 5)
        self.on_metadata_update: Callable[[str, int], None] | None = None
        self.closed = False
        self.lost_credit = False
        self.asked: list[Any] = []
        self.answer: Callable[[Any, float], Any] = lambda _request, _timeout: None
        self._lock = threading.Lock()
        self._publishers: dict[int, PublisherHandler] = {}
        self._subscribers: dict[int, SubscriberHandler] = {}

    @property
    def publishers(self) -> int:
        return len(self._publishers)

    @property
    def subscribers(self) -> int:
        return len(self._subscribers)

    def attach_publisher(self, handler: PublisherHandler, _stream: str) -> int:
        return self._attach(self._publishers, handler)

    def attach_subscriber(self, handler: SubscriberHandler, _stream: str) -> int:
        return self._attach(self._subscribers, handler)

    def detach_publisher(self, number: int) -> None:
        self._publishers.pop(number, None)

    def detach_subscriber(self, number: int) -> None:
        self._subscribers.pop(number, None)

    def call(self, request: Any, timeout: float) -> Any:
        if self.closed:
            raise ConnectionLost(f"{self.node} is gone")
        self.asked.append(request)
        return self.answer(request, timeout)

    def close(self, _timeout: float = 5) -> None:
        self.lose()

    def lose(self) -> None:
        self.closed = True
        for handlers in (self._publishers, self._subscribers):
            for number in list(handlers):
                handlers.pop(number).on_lost(ConnectionLost(f"{self.node} is gone"))

    def _attach(self, handlers: dict[int, Any], handler: object) -> int:
        with self._lock:
            if self.closed:
                raise ConnectionLost(f"{self.node} is gone")
            free = next((n for n in range(MAX_PUBLISHERS) if n not in handlers), None)
            if free is None:
                raise ClientFull("all ids are taken")
            handlers[free] = handler
            return free


def as_client(fake: FakeClient) -> StreamClient:
    return cast(StreamClient, fake)


def fake_of(client: StreamClient) -> FakeClient:
    return cast(FakeClient, client)
