"""A publisher declared at a stream's leader: opening, writing and ending one. Thin I/O."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeVar

from sharding.errors import LocalError, WarrenError
from sharding.stream.connections.access import Later
from sharding.stream.connections.attachments import PublisherHandler
from sharding.stream.errors import NoAnswerInTime, PublishersBlocked, StreamRefused
from sharding.stream.producer.outbox import Batch
from sharding.stream.protocol.answers import Answer
from sharding.stream.protocol.commands import (
    DeclarePublisher,
    DeletePublisher,
    QueryPublisherSequence,
    Request,
)
from sharding.stream.protocol.constants import Broker, Code, Key

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient

logger = logging.getLogger("warren.stream.producer")

# A broker stops reading a connection for good when too many of its messages were lost with their
# leaders: their credits never come back (seen on 4.0.5). One that is silent so long is replaced.
_ANSWER_TIMEOUT = 10.0

A = TypeVar("A", bound=Answer)

Deadline = Callable[[], float]
"""How many seconds are left."""


class Leaders(Protocol):
    """What a producer asks of the route cache."""

    def leader(self, stream: str, timeout: float) -> Broker: ...

    def suspect(self, name: str, reason: str) -> None: ...


class Connections(Protocol):
    """What a producer asks of the pool."""

    def publisher(
        self, leader: Broker, stream: str, handler: PublisherHandler, deadline: float
    ) -> tuple[StreamClient, int]: ...

    def release(self, client: StreamClient) -> None: ...


class Listener(Protocol):
    """Who is told what becomes of what was published, on the connection's reading thread."""

    def confirmed(self, source: Attachment, publishing_ids: Sequence[int]) -> None: ...

    def refused(self, source: Attachment, refusals: Sequence[tuple[int, int]]) -> None: ...

    def lost(self, source: Attachment, reason: Exception) -> None: ...


class Attachment:
    """A connection's handler for one publisher. It names itself to its listener, so that news of
    an earlier connection can be told from news of the present one."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.is_lost = False

    def on_confirms(self, publishing_ids: Sequence[int]) -> None:
        self._listener.confirmed(self, publishing_ids)

    def on_refusals(self, refusals: Sequence[tuple[int, int]]) -> None:
        self._listener.refused(self, refusals)

    def on_lost(self, reason: Exception) -> None:
        self.is_lost = True
        self._listener.lost(self, reason)


class Publishing:
    """One publisher on one connection."""

    def __init__(
        self,
        client: StreamClient,
        publisher_id: int,
        attachment: Attachment,
        connections: Connections,
        later: Later,
    ) -> None:
        self._client = client
        self._publisher_id = publisher_id
        self._connections = connections
        self._later = later
        self._may_be_declared = False
        self.is_silent = False
        """Whether the broker left a request without an answer for the whole `_ANSWER_TIMEOUT`."""
        self.attachment = attachment
        self.last_id = 0
        """The last publishing id in the stream under the producer's name; 0 for none."""
        self.frame_max = client.frame_max
        self.node = client.node

    def write(self, batch: Batch, timeout: float) -> None:
        """All frames of the batch, in order; `ConnectionLost` if that can't be finished."""
        for header, entries in batch.frames(self._publisher_id, self.frame_max):
            self._client.send(header, entries, timeout=timeout)

    def declare(self, name: str | None, stream: str, deadline: Deadline) -> None:
        """Who fails at this ends the publisher: the broker may have it already."""
        try:
            self._declare(name, stream, deadline())
        except StreamRefused as error:
            if error.code == Code.PRECONDITION_FAILED and (
                name is None or not self._takes_unnamed(stream, deadline())
            ):
                raise PublishersBlocked(error.command, error.code, stream) from error
            raise
        if name is not None:
            answer = self._ask(QueryPublisherSequence(name, stream), deadline())
            self.last_id = answer.publishing_id

    def _takes_unnamed(self, stream: str, timeout: float) -> bool:
        """Whether the connection takes a publisher of the same id without a name.

        A broker has one code for an alarm and for a name that the connection has on the stream
        already (rabbit_stream_reader, 4.0.5). The third cause, an id in use, does not last: each
        try has another id.
        """
        try:
            self._declare(None, stream, timeout)
        except StreamRefused as error:
            return error.code != Code.PRECONDITION_FAILED
        return True

    def _declare(self, name: str | None, stream: str, timeout: float) -> None:
        self._may_be_declared = True
        try:
            self._ask(DeclarePublisher(self._publisher_id, name, stream), timeout)
        except StreamRefused:
            self._may_be_declared = False
            raise

    def end(self, timeout: float = _ANSWER_TIMEOUT) -> None:
        """Take the publisher off its connection. Who has no time lets others do that."""
        if self._may_be_declared and not self.attachment.is_lost:
            try:
                self._ask(DeletePublisher(self._publisher_id), timeout)
            except NoAnswerInTime:
                self.unanswered()
                return
            except WarrenError as error:
                logger.debug("a publisher was not deleted in order: %s", error)
        self.leave()

    def unanswered(self) -> None:
        """What to do with a publisher of which nobody knows whether the broker still has it.

        A broker that is silent is not trusted with further requests: the connection is closed, with
        all publishers that share it. That one caller had little time is no reason for that: then
        the publisher stays attached, and a thread that has the time ends it.
        """
        if not self.is_silent and not self._later.schedule(0, self.end).cancelled:
            return
        self._client.close(timeout=1)
        self.leave()

    def _ask(self, request: Request[A], timeout: float) -> A:
        try:
            if timeout <= 0:
                raise NoAnswerInTime(f"no time was left for {request.name}")
            return self._client.call(request, timeout)
        except NoAnswerInTime:
            self.is_silent = timeout >= _ANSWER_TIMEOUT
            raise

    def leave(self) -> None:
        """Give the id back, unless the connection has taken it away already."""
        if not self.attachment.is_lost:
            self._client.detach_publisher(self._publisher_id)
        self._connections.release(self._client)


class Publishers:
    """Opens publishers under one name, or none."""

    def __init__(
        self,
        leaders: Leaders,
        connections: Connections,
        *,
        name: str | None,
        later: Later,
        filtering: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leaders = leaders
        self._connections = connections
        self._name = name
        self._later = later
        self._filtering = filtering
        self._clock = clock

    def open(
        self, stream: str, listener: Listener, deadline: float, *, election: float = inf
    ) -> Publishing:
        """A publisher at the stream's leader. Whatever fails, nothing stays behind.

        An election is waited for up to `election` seconds.
        """

        def left() -> float:
            # Never 0: that could mean "no wait at all", and a late try is still a try.
            return max(0.05, deadline - self._clock())

        try:
            leader = self._leaders.leader(stream, min(left(), election))
            attachment = Attachment(listener)
            client, number = self._connections.publisher(leader, stream, attachment, deadline)
            publishing = Publishing(client, number, attachment, self._connections, self._later)
            try:
                self._check_filtering(client)
                publishing.declare(self._name, stream, lambda: min(left(), _ANSWER_TIMEOUT))
            except NoAnswerInTime:
                publishing.unanswered()
                if not publishing.is_silent or self._clock() >= deadline:
                    raise
                return self.open(stream, listener, deadline, election=election)
            except WarrenError:
                publishing.end(min(left(), _ANSWER_TIMEOUT))
                raise
            except BaseException:  # who is interrupted does not wait for answers
                publishing.end(0)
                raise
        except WarrenError as error:
            self.suspect(stream, error)
            raise
        return publishing

    def suspect(self, stream: str, reason: Exception) -> None:
        """The next `open` asks for the leader again."""
        self._leaders.suspect(stream, str(reason))

    def _check_filtering(self, client: StreamClient) -> None:
        if self._filtering and not client.supports(Key.PUBLISH, 2):
            version = ".".join(map(str, client.server_version))
            raise LocalError(
                f"filter values need RabbitMQ 3.13 or newer; {client.node} has {version}"
            )
