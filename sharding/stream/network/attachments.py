"""The publishers, or the subscriptions, of one connection: their ids and who is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from sharding.errors import RemoteError
from sharding.stream.errors import ClientFull, ConnectionLost
from sharding.stream.handlers import PublisherHandler, SubscriberHandler

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
