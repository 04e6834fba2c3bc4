"""One connection to a node, shared by many publishers and subscriptions: blocking, with threads.

A thread per connection reads, tells the handlers, and sends and checks heartbeats. Every other
thread may `call` and `send`. The rules:

* Whatever ends the connection (the peer, an error, `close`) is noted once, as the reason; the
  socket is shut down; the reading thread then sees its end and tells everyone: each waiting call
  and each handler that is still attached, once.
* A handler that raises ends the connection: what it missed can't be given to it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from sharding.errors import LocalError, RemoteError, TryLater, WarrenError
from sharding.stream.connections.attachments import (
    Attachments,
    PublisherHandler,
    SubscriberHandler,
    tell_lost,
)
from sharding.stream.connections.opening import (
    ConnectOptions,
    OpenConnection,
    closed_by_peer,
    open_connection,
)
from sharding.stream.connections.transport import Buffer
from sharding.stream.errors import (
    ConnectionLost,
    NoAnswerInTime,
    StreamUnavailable,
    code_name,
    refusal,
)
from sharding.stream.forks import of_this_process
from sharding.stream.protocol.answers import Answer
from sharding.stream.protocol.commands import Request, activity_answer_frame, heartbeat_frame
from sharding.stream.protocol.constants import (
    MAX_PUBLISHERS,
    MAX_SUBSCRIPTIONS,
    NEXT,
    Broker,
    Key,
    OffsetSpec,
)
from sharding.stream.protocol.events import (
    ActivityAsked,
    Answered,
    ChunkArrived,
    ClosedByPeer,
    Confirmed,
    CreditRefused,
    Event,
    PublishRefused,
    StreamChanged,
    ToSend,
)
from sharding.stream.protocol.handshake import Close, Login
from sharding.stream.protocol.session import Heartbeats

__all__ = ["ConnectOptions", "Login", "StreamClient", "connect"]

logger = logging.getLogger("warren.stream")
_CLOSED_HERE = ConnectionLost("closed by this side")
A = TypeVar("A", bound=Answer)


def connect(
    address: Broker, options: ConnectOptions, clock: Callable[[], float] = time.monotonic
) -> StreamClient:
    """An open connection, or `Unreachable`, `AuthenticationFailed`, `AccessRefused` or
    `ProtocolError`."""
    return StreamClient(address, options, open_connection(address, options, clock), clock)


class StreamClient:
    """An open connection; `connect` makes it."""

    def __init__(
        self,
        address: Broker,
        options: ConnectOptions,
        parts: OpenConnection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        opened = parts.opened
        self.address = address
        """What was dialled."""
        self.node = opened.node or address
        """What the node calls itself, which behind a load balancer is not what was dialled."""
        self.server_version = opened.server_version
        self.frame_max = opened.frame_max
        """The agreed limit of outgoing frames, sizes included."""
        self.on_metadata_update: Callable[[str, int], None] | None = None
        """Called on the reading thread with a stream that is not here any more, and a code."""
        self.lost_credit = False
        """Whether a publisher lost its stream here. The broker takes credit from the connection for
        each message and gives it back with the confirm, so what was in flight then costs it credit
        for good; a connection without any is read no more. New publishers belong on another."""
        self._options = options
        self._clock = clock
        self._connection = parts.connection
        self._transport = parts.transport
        self._outgoing = parts.outgoing
        self._log = parts.log
        self._commands = opened.commands
        self._heartbeats = Heartbeats(opened.heartbeat, clock())
        self._publishers = Attachments[PublisherHandler]("publishers", MAX_PUBLISHERS)
        self._subscribers = Attachments[SubscriberHandler]("subscriptions", MAX_SUBSCRIPTIONS)
        self._lock = threading.Lock()  # for the connection's requests, the waiters and the reason
        self._waiters: dict[int, Future[Any]] = {}
        self._closing = False
        self._reason: RemoteError | None = None
        self._on_event: dict[type, Callable[[Any], None]] = {
            ChunkArrived: self._on_chunk,
            Confirmed: self._on_confirmed,
            PublishRefused: self._on_publish_refused,
            Answered: self._on_answered,
            ToSend: self._on_to_send,
            ActivityAsked: self._on_activity_asked,
            StreamChanged: self._on_stream_changed,
            CreditRefused: self._on_credit_refused,
            ClosedByPeer: self._on_closed_by_peer,
        }
        of_this_process(self)
        self._reading = threading.Thread(
            target=self._read, args=(parts.early,), name=f"warren-stream-{self.node}", daemon=True
        )
        self._reading.start()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        used = f"{self.publishers} publishers, {self.subscribers} subscribers"
        return f"<StreamClient of {self.node}: {state}, {used}>"

    def supports(self, key: Key, version: int = 1) -> bool:
        """Whether the broker knows a command."""
        return self._commands.supports(key, version)

    @property
    def closed(self) -> bool:
        return self._reason is not None

    @property
    def publishers(self) -> int:
        return len(self._publishers)

    @property
    def subscribers(self) -> int:
        return len(self._subscribers)

    def attach_publisher(self, handler: PublisherHandler, stream: str) -> int:
        """A free id; the caller then declares the publisher. `ClientFull`, `ConnectionLost`."""
        return self._publishers.attach(handler, stream)

    def detach_publisher(self, publisher_id: int) -> None:
        self._publishers.detach(publisher_id)

    def attach_subscriber(self, handler: SubscriberHandler, stream: str) -> int:
        """A free id; the caller then subscribes. `ClientFull`, `ConnectionLost`."""
        return self._subscribers.attach(handler, stream)

    def detach_subscriber(self, subscription_id: int) -> None:
        self._subscribers.detach(subscription_id)

    def call(self, request: Request[A], timeout: float | None = None) -> A:
        """The broker's answer. A refusal is raised, so are `ConnectionLost`, `NoAnswerInTime` and,
        before anything is sent, `NotSupported`."""
        if threading.current_thread() is self._reading:
            raise LocalError("a handler can't wait for an answer: it would never be read")
        timeout = self._options.request_timeout if timeout is None else timeout
        deadline = self._clock() + timeout
        waiter: Future[A] = Future()
        with self._lock:
            if self._reason is not None:
                raise self._lost()
            correlation_id, frame = self._connection.request(request)
            self._waiters[correlation_id] = waiter
        try:
            # A short time-out must not end a connection that others use: unlike `send`.
            self._write((frame,), deadline)
            answer = waiter.result(max(deadline - self._clock(), 0))
        except (TimeoutError, TryLater):
            raise NoAnswerInTime(
                f"{self.node} did not answer {request.name} within {timeout:g} s"
            ) from None
        finally:
            with self._lock:
                self._waiters.pop(correlation_id, None)
        if answer.code not in request.accepted_codes:
            raise refusal(request.name, answer.code, request.subject)
        return answer

    def send(self, *buffers: Buffer, timeout: float | None = None) -> None:
        """Write whole frames, as one. `ConnectionLost` if the peer does not take them in time.

        On the reading thread, in a handler, it returns at once and the frames follow soon.
        """
        if threading.current_thread() is self._reading:
            self._post(b"".join(buffers))
            return
        timeout = self._options.request_timeout if timeout is None else timeout
        try:
            self._write(buffers, self._clock() + timeout)
        except TryLater as error:
            self._end(ConnectionLost(f"the peer took nothing for {timeout:g} s"))
            raise self._lost() from error

    def _write(self, buffers: Sequence[Buffer], deadline: float) -> None:
        if self._reason is not None:
            raise self._lost()
        if self._log:
            self._log.sent(buffers)
        try:
            self._outgoing.send(buffers, deadline)
        except ConnectionLost as error:
            self._end(error)
            raise self._lost() from error
        self._heartbeats.sent(self._clock())

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"{self.node}: {self._reason}")

    def close(self, timeout: float = 5) -> None:
        """End the connection in order. Handlers that are still attached are told."""
        deadline = self._clock() + timeout
        on_reading_thread = threading.current_thread() is self._reading
        self._closing = True
        if not on_reading_thread and not self.closed:
            try:
                self.call(Close(), timeout)
            except WarrenError as error:
                logger.debug("%s did not end in order: %s", self.node, error)
        self._end(_CLOSED_HERE)
        if not on_reading_thread:
            self._reading.join(max(deadline - self._clock(), 0))

    def _end(self, reason: RemoteError) -> None:
        """Note why, the first time; the reading thread does the rest."""
        with self._lock:
            if self._reason is None:
                self._reason = _CLOSED_HERE if self._closing else reason
        self._transport.shut_down()

    # The reading thread.

    def _read(self, early: Iterable[Event]) -> None:
        try:
            self._dispatch(early)
            while not self.closed:
                self._read_once()
        except RemoteError as error:
            self._end(error)
        except Exception as error:
            logger.exception("a handler failed; the connection to %s is given up", self.node)
            self._end(ConnectionLost(f"a handler failed: {error!r}"))
        self._tell_everyone()

    def _read_once(self) -> None:
        count = self._transport.receive_into(self._connection.buffer())
        now = self._clock()
        if count == 0:
            raise ConnectionLost("the peer ended the connection")
        if count is not None:
            self._heartbeats.received(now)
            with self._lock:
                events = self._connection.received(count)
            self._dispatch(events)
        if now >= self._heartbeats.next_check():
            self._check_heartbeats(now)
        if count is None:
            flush = self._outgoing.waits_to_flush
            timeout = self._heartbeats.next_check() - now
            if self._transport.wait(timeout, to_receive=True, to_send=flush) and flush:
                self._outgoing.flush()

    def _check_heartbeats(self, now: float) -> None:
        if self._heartbeats.is_dead(now):
            silence = 2 * self._heartbeats.interval
            raise ConnectionLost(f"the peer was silent for {silence:g} s, two heartbeats")
        if self._heartbeats.is_due(now):
            self._post(heartbeat_frame())

    def _post(self, frame: bytes) -> None:
        if self._log:
            self._log.sent([frame])
        self._heartbeats.sent(self._clock())  # noted before the peer can have seen it
        self._outgoing.post(frame)

    def _dispatch(self, events: Iterable[Event]) -> None:
        for event in events:
            self._on_event[type(event)](event)

    def _on_chunk(self, event: ChunkArrived) -> None:
        handler = self._subscribers.get(event.subscription_id)
        if handler is not None:  # else it was detached while the chunk was on its way
            handler.on_chunk(event.chunk)

    def _on_confirmed(self, event: Confirmed) -> None:
        handler = self._publishers.get(event.publisher_id)
        if handler is not None:
            handler.on_confirms(event.publishing_ids)

    def _on_publish_refused(self, event: PublishRefused) -> None:
        handler = self._publishers.get(event.publisher_id)
        if handler is not None:
            handler.on_refusals(event.refusals)

    def _on_answered(self, event: Answered) -> None:
        with self._lock:
            waiter = self._waiters.pop(event.correlation_id, None)
        if waiter is not None:  # else the caller has given up
            waiter.set_result(event.answer)

    def _on_to_send(self, event: ToSend) -> None:
        self._post(event.frame)

    def _on_activity_asked(self, event: ActivityAsked) -> None:
        handler = self._subscribers.get(event.subscription_id)
        # One that was detached gets nothing more, wherever it would go on; but an answer is due.
        answer = NEXT if handler is None else handler.on_activity(event.active)
        if isinstance(answer, Future):
            answer.add_done_callback(lambda later: self._answer(event, later.result()))
        else:
            self._answer(event, answer)

    def _answer(self, event: ActivityAsked, offset: OffsetSpec) -> None:
        with suppress(ConnectionLost):  # then nobody waits for the answer any more
            self.send(activity_answer_frame(event.correlation_id, offset))

    def _on_stream_changed(self, event: StreamChanged) -> None:
        reason = StreamUnavailable("Use", event.code, event.stream)
        publishers = self._publishers.take(event.stream)
        self.lost_credit = self.lost_credit or bool(publishers)
        tell_lost(publishers, reason)
        tell_lost(self._subscribers.take(event.stream), reason)
        if self.on_metadata_update is not None:
            self.on_metadata_update(event.stream, event.code)

    def _on_credit_refused(self, event: CreditRefused) -> None:
        logger.debug(
            "%s refused credit for subscription %d: %s",
            *(self.node, event.subscription_id, code_name(event.code)),
        )

    def _on_closed_by_peer(self, event: ClosedByPeer) -> None:
        raise ConnectionLost(closed_by_peer(event))

    def _tell_everyone(self) -> None:
        self._outgoing.close(self._options.request_timeout)
        with self._lock:
            waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            waiter.set_exception(self._lost())
        tell_lost(self._publishers.close(), self._lost())
        tell_lost(self._subscribers.close(), self._lost())
