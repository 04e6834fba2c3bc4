"""Making, deleting and looking at streams and super streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from sharding.errors import InvalidInput
from sharding.stream.errors import StreamExists, StreamNotFound
from sharding.stream.frames.admin_requests import (
    Create,
    CreateSuperStream,
    Delete,
    DeleteSuperStream,
    StreamStats,
)
from sharding.stream.frames.answers import Answer
from sharding.stream.frames.requests import Request
from sharding.stream.protocol import Key
from sharding.stream.routes.cache import RouteCache
from sharding.stream.stream_arguments import StreamArguments
from sharding.stream.super_streams import SuperStreamsOverAmqp

_COMMAND_SINCE = (3, 13)
_STATS_SINCE = (3, 11)
A = TypeVar("A", bound=Answer)


class Calls(Protocol):
    """A connection to any node, whichever answers."""

    def call(self, request: Request[A], timeout: float) -> A: ...

    @property
    def server_version(self) -> tuple[int, ...]: ...


class Administration:
    def __init__(
        self, calls: Calls, routes: RouteCache, over_amqp: SuperStreamsOverAmqp, timeout: float
    ) -> None:
        self._calls = calls
        self._routes = routes
        self._over_amqp = over_amqp
        self._timeout = timeout

    def create_stream(self, name: str, arguments: StreamArguments, exist_ok: bool) -> None:
        check_name("stream", name)
        try:
            self._calls.call(Create(name, arguments.over_streams()), self._timeout)
        except StreamExists:
            if not exist_ok:
                raise
        self._routes.suspect(name, "created")

    def delete_stream(self, name: str, missing_ok: bool) -> None:
        try:
            self._calls.call(Delete(name), self._timeout)
        except StreamNotFound:
            if not missing_ok:
                raise
        self._routes.suspect(name, "deleted")

    def create_super_stream(
        self,
        name: str,
        partitions: int,
        binding_keys: Sequence[str] | None,
        arguments: StreamArguments,
        exist_ok: bool,
    ) -> None:
        check_name("super stream", name)
        if binding_keys is None and partitions < 1:
            raise InvalidInput("partitions", "must be at least 1", partitions)
        keys = [str(n) for n in range(partitions)] if binding_keys is None else list(binding_keys)
        if not keys or len(set(keys)) != len(keys):
            raise InvalidInput("binding_keys", "must differ, and be at least one", binding_keys)
        streams = [f"{name}-{key}" for key in keys]
        try:
            if self._calls.server_version >= _COMMAND_SINCE:
                request = CreateSuperStream(
                    name, tuple(streams), tuple(keys), arguments.over_streams()
                )
                self._calls.call(request, self._timeout)
            else:
                self._over_amqp.create(name, streams, keys, arguments)
        except StreamExists:
            if not exist_ok:
                raise
        self._routes.suspect(name, "created")

    def delete_super_stream(self, name: str, missing_ok: bool) -> None:
        try:
            if self._calls.server_version >= _COMMAND_SINCE:
                self._calls.call(DeleteSuperStream(name), self._timeout)
            else:
                streams = self._routes.partitions(name, self._timeout)
                self._over_amqp.delete(name, streams)
        except StreamNotFound:
            if not missing_ok:
                raise
        self._routes.suspect(name, "deleted")

    def stats(self, name: str) -> dict[str, int]:
        """The broker's own numbers of a stream, as it names them; since 3.11."""
        version = self._calls.server_version
        if version < _STATS_SINCE:
            found = ".".join(map(str, version))
            raise InvalidInput(
                "broker", f"must be 3.11 or later for {Key.STREAM_STATS.name}", found
            )
        return dict(self._calls.call(StreamStats(name), self._timeout).stats)


def check_name(what: str, name: str) -> None:
    """A name that the broker would take, before it is sent: the protocol allows more."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidInput(what, "must be text that UTF-8 can express", name) from None
    if not 1 <= size <= 255 or name != name.strip():
        raise InvalidInput(what, "must have 1 to 255 bytes and no space at its ends", name)
