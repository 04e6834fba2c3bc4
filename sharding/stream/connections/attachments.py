"""What a connection tells the publishers and subscriptions that share it.

Every method is called on the connection's reading thread, one at a time, and must return at once:
while it runs, nothing else is read. It must not call back into the connection and wait for an
answer, nor raise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, Protocol, TypeVar

from sharding.errors import RemoteError
from sharding.stream.errors import ClientFull, ConnectionLost
from sharding.stream.protocol.constants import OffsetSpec

ActivityAnswer = OffsetSpec | Future[OffsetSpec]
"""Where a single active consumer goes on: at once, or when the future is settled."""


class PublisherHandler(Protocol):
    def on_confirms(self, publishing_ids: Sequence[int]) -> None:
        """The broker has stored these, in this order."""

    def on_refusals(self, refusals: Sequence[tuple[int, int]]) -> None:
        """The broker has not stored these: pairs of publishing id and code."""

    def on_lost(self, reason: Exception) -> None:
        """The connection ended, or the stream left this node. Called once, and last."""


class SubscriberHandler(Protocol):
    def on_chunk(self, chunk: memoryview) -> None:
        """A whole chunk, header included. The memory is the handler's own from now on."""

    def on_activity(self, active: bool) -> ActivityAnswer:
        """A single active consumer is made active or not; the answer is where it goes on.

        While the answer to "not" is a future that is not settled, the broker makes no other one
        active. After 60 s without an answer it closes the connection.
        """

    def on_lost(self, reason: Exception) -> None:
        """The connection ended, or the stream left this node. Called once, and last."""


logger = logging.getLogger("warren.stream")

H = TypeVar("H")


class _Attached(NamedTuple, Generic[H]):
    stream: str
    handler: H


class Attachments(Generic[H]):
    """Handlers by id. Who takes one out, tells it: so each is told once."""

    def __init__(self, kind: str, capacity: int) -> None:
        self._kind = kind
        self._capacity = capacity
        self._attached: dict[int, _Attached[H]] = {}
        self._next = 0
        self._closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._attached)

    def attach(self, handler: H, stream: str) -> int:
        """An id. One that was freed is used again as late as can be: frames may be on their way."""
        with self._lock:
            if self._closed:
                raise ConnectionLost("the connection is closed")
            for number in range(self._next, self._next + self._capacity):
                candidate = number % self._capacity
                if candidate not in self._attached:
                    self._attached[candidate] = _Attached(stream, handler)
                    self._next = candidate + 1
                    return candidate
        raise ClientFull(f"the connection has {self._capacity} {self._kind} already")

    def detach(self, number: int) -> None:
        with self._lock:
            self._attached.pop(number, None)

    def get(self, number: int) -> H | None:
        attached = self._attached.get(number)
        return None if attached is None else attached.handler

    def take(self, stream: str) -> list[H]:
        """Take out those of one stream."""
        with self._lock:
            numbers = [n for n, attached in self._attached.items() if attached.stream == stream]
            return [self._attached.pop(number).handler for number in numbers]

    def close(self) -> list[H]:
        """Take out all, and let nobody in any more."""
        with self._lock:
            self._closed = True
            handlers = [attached.handler for attached in self._attached.values()]
            self._attached.clear()
            return handlers


def tell_lost(
    handlers: Iterable[PublisherHandler | SubscriberHandler], reason: RemoteError
) -> None:
    """Tell all of them, also when one fails at it."""
    for handler in handlers:
        try:
            handler.on_lost(reason)
        except Exception:
            logger.exception("a handler failed when it was told: %s", reason)
