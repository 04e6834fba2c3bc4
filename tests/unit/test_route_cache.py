"""The route cache's thread: callers share it, keep their deadlines, and hear of failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from sharding.errors import InvalidInput, LocalError, Unreachable
from sharding.route_cache import RouteCache
from sharding.route_options import RouteOptions
from sharding.routes import Finding, Missing, Partitions, StreamRoute
from sharding.stream.errors import AuthenticationFailed, NoAnswerInTime, NoLeader, StreamNotFound
from sharding.stream.locator import Locator
from sharding.stream.protocol import Broker, Code
from tests.cluster import wait_until

A, B, C = Broker("a", 5552), Broker("b", 5552), Broker("c", 5552)


class Source:
    """A cluster that answers at once, or when it is let."""

    def __init__(self) -> None:
        self.on_update: Callable[[str], None] | None = None
        self.on_disconnect: Callable[[], None] | None = None
        self.routes: dict[str, StreamRoute] = {}
        self.partitions: dict[str, tuple[str, ...]] = {}
        self.queries: list[list[str]] = []
        self.armed: list[str] = []
        self.arm_answer: bool | Exception = True
        self.failure: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()

    def _answer(self, names: Sequence[str]) -> None:
        self.queries.append(list(names))
        assert self.may_answer.wait(5)
        if self.failure is not None:
            raise self.failure

    def find_streams(self, names: Sequence[str], _timeout: float) -> Mapping[str, Finding]:
        self._answer(names)
        return {
            name: self.routes.get(name) or Missing(name, Code.NO_SUCH_STREAM) for name in names
        }

    def find_partitions(self, super_stream: str, _timeout: float) -> Finding:
        self._answer([super_stream])
        return Partitions(super_stream, self.partitions[super_stream])

    def arm(self, stream: str, _timeout: float) -> bool:
        self.armed.append(stream)
        if isinstance(self.arm_answer, Exception):
            raise self.arm_answer
        return self.arm_answer

    not_found = Locator.not_found
    no_leader = Locator.no_leader

    def push(self, stream: str) -> None:
        assert self.on_update is not None
        self.on_update(stream)


@contextmanager
def cache_of(
    source: Source, options: RouteOptions | None = None, pressure: float = 0.0
) -> Iterator[RouteCache]:
    cache = RouteCache(source, options or RouteOptions(), pressure=lambda: pressure)  # type: ignore[arg-type]
    try:
        yield cache
    finally:
        cache.close()
