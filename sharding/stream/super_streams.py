"""Super streams on brokers before 3.13, which have no command for them.

There a super stream is what its parts are: a direct exchange marked as one, a stream for each
partition, and bindings that carry the partitions' order. They are made over AMQP 0-9-1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pika
import pika.exceptions
from pika.adapters.blocking_connection import BlockingChannel

from sharding.errors import LocalError, RemoteError, Unreachable
from sharding.stream.errors import StreamExists, StreamNotFound
from sharding.stream.protocol import Code
from sharding.stream.stream_arguments import StreamArguments

_NOT_FOUND = 404


class SuperStreamsOverAmqp:
    """Creates and deletes super streams through an AMQP port of the cluster."""

    def __init__(self, amqp_url: str | None, timeout: float) -> None:
        self._url = amqp_url
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
        if self._url is None:
            raise LocalError(
                "this broker is older than 3.13 and makes super streams over AMQP only; "
                "give the environment amqp_url='amqp://…'"
            )
        parameters = pika.URLParameters(self._url)
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
