"""Which partitions the broker binds a key to, asked with Route and remembered for a while."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, TypeVar

from sharding.stream.frames.answers import Answer
from sharding.stream.frames.requests import Request, Route

A = TypeVar("A", bound=Answer)

MAX_KEYS = 10_000
MAX_AGE = 30.0
"""Seconds; a binding that was added or removed is seen after that."""


class Locator(Protocol):
    """Who can be asked about the whole cluster."""

    def call(self, request: Request[A], timeout: float) -> A: ...


class BrokerRoutes:
    """The partitions of a super stream by key. Safe for threads.

    A key that is bound nowhere has none, and one may be bound to several.
    """

    def __init__(
        self,
        super_stream: str,
        locator: Locator,
        timeout: float,
        *,
        max_keys: int = MAX_KEYS,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._super_stream = super_stream
        self._locator = locator
        self._timeout = timeout
        self._max_keys = max_keys
        self._max_age = max_age
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()

    def streams(self, key: str) -> tuple[str, ...]:
        """The streams that a message with this key goes to."""
        now = self._clock()
        with self._lock:
            asked_at, streams = self._known.get(key, (None, ()))
            if asked_at is not None and now - asked_at < self._max_age:
                self._known.move_to_end(key)
                return streams
        streams = self._locator.call(Route(key, self._super_stream), self._timeout).streams
        with self._lock:
            self._known[key] = now, streams
            self._known.move_to_end(key)
            while len(self._known) > self._max_keys:
                self._known.popitem(last=False)
        return streams
