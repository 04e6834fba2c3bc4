"""Making, deleting and looking at streams and super streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any, Protocol, TypeVar

import pika
import pika.exceptions
from pika.adapters.blocking_connection import BlockingChannel

from sharding.amqp.addresses import amqp_parameters
from sharding.errors import InvalidInput, LocalError, RemoteError, Unreachable
from sharding.maps.naming import check_name
from sharding.stream.errors import StreamExists, StreamNotFound
from sharding.stream.options import StreamArguments
from sharding.stream.protocol.answers import Answer
from sharding.stream.protocol.commands import (
    Create,
    CreateSuperStream,
    Delete,
    DeleteSuperStream,
    Request,
    StreamStats,
)
from sharding.stream.protocol.constants import Code, Key
from sharding.stream.routes.cache import RouteCache

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
        check_stream_name("stream", name)
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
        check_stream_name("super stream", name)
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
                streams = self._routes.partitions(name, self._timeout).streams
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


def check_stream_name(field: str, name: str) -> None:
    """A name that the broker would take, before it is sent: the protocol allows more."""
    if check_name(field, name) != name.strip():
        raise InvalidInput(field, "must have no space at its ends", name)


_NOT_FOUND = 404


# Super streams on brokers before 3.13, which have no command for them.
#
# There a super stream is what its parts are: a direct exchange marked as one, a stream for each
# partition, and bindings that carry the partitions' order. They are made over AMQP 0-9-1.


class SuperStreamsOverAmqp:
    """Creates and deletes super streams through an AMQP port of the cluster."""

    def __init__(self, amqp_url: str | None, timeout: float) -> None:
        self._parameters = None if amqp_url is None else amqp_parameters(amqp_url, "amqp_url")
        self._timeout = timeout

    def create(
        self,
        name: str,
        partitions: Sequence[str],
        binding_keys: Sequence[str],
        arguments: StreamArguments,
    ) -> None:
        with self._connection() as connection:
            if _exchange_exists(connection, name):
                raise StreamExists("CreateSuperStream", Code.STREAM_EXISTS, name)
            made: list[str] = []
            try:
                channel = connection.channel()
                for order, (stream, key) in enumerate(zip(partitions, binding_keys, strict=True)):
                    channel.queue_declare(stream, durable=True, arguments=arguments.over_amqp())
                    made.append(stream)
                    if order == 0:
                        # After a stream: an exchange alone would be a super stream of nothing.
                        channel.exchange_declare(
                            name, "direct", durable=True, arguments={"x-super-stream": True}
                        )
                    ordered = {"x-stream-partition-order": order}
                    channel.queue_bind(stream, name, key, arguments=ordered)
            except BaseException:
                _undo(connection, name, made)
                raise

    def delete(self, name: str, partitions: Sequence[str]) -> None:
        with self._connection() as connection:
            if not _exchange_exists(connection, name):
                raise StreamNotFound("DeleteSuperStream", Code.NO_SUCH_STREAM, name)
            channel = connection.channel()
            channel.exchange_delete(name)
            for stream in partitions:
                channel.queue_delete(stream)

    @contextmanager
    def _connection(self) -> Iterator[pika.BlockingConnection]:
        if self._parameters is None:
            raise LocalError(
                "this broker is older than 3.13 and makes super streams over AMQP only; "
                "give the environment amqp_url='amqp://…'"
            )
        parameters = copy(self._parameters)
        parameters.socket_timeout = parameters.stack_timeout = self._timeout
        parameters.blocked_connection_timeout = self._timeout
        try:
            connection = pika.BlockingConnection(parameters)
        except pika.exceptions.AMQPError as error:
            where = f"{parameters.host}:{parameters.port}"
            raise Unreachable(f"no AMQP connection to {where}: {type(error).__name__}") from None
        try:
            yield connection
        except pika.exceptions.AMQPError as error:
            raise RemoteError(f"the broker refused a part of the super stream: {error}") from None
        finally:
            with suppress(pika.exceptions.AMQPError):
                connection.close()


def _exchange_exists(connection: pika.BlockingConnection, name: str) -> bool:
    try:
        connection.channel().exchange_declare(name, passive=True)
    except pika.exceptions.ChannelClosedByBroker as closed:
        if closed.reply_code == _NOT_FOUND:
            return False
        raise
    return True


def _undo(connection: pika.BlockingConnection, name: str, streams: Sequence[str]) -> None:
    """Take back a half-made super stream, as far as the broker lets us."""
    with suppress(pika.exceptions.AMQPError):
        channel: BlockingChannel | Any = connection.channel()
        channel.exchange_delete(name)
        for stream in streams:
            channel.queue_delete(stream)
