"""One connection to a broker, without a socket: bytes in, events out; requests in, bytes out.

It knows no threads and no clock. The rules:

* Before it is open, only the handshake speaks: answers to its requests, Tune, Close and heartbeats.
* Every answer belongs to a request that waits for one, and is of the same kind. What nobody asked
  for is the peer's error. A request that its sender has given up still waits here: its answer may
  come late. How many may wait is bounded.
* 3.10 answers Route and Partitions without the response bit; both forms are taken.
* After Close, from either side, nothing more is read.
* An error is raised after the events of the frames before it, and then again at every call.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sharding.errors import InvalidInput, RemoteError
from sharding.stream.errors import NotSupported, ProtocolError, TooManyRequests
from sharding.stream.protocol.commands import Request, close_answer_frame, tune_frame
from sharding.stream.protocol.constants import RESPONSE, Key, Limits
from sharding.stream.protocol.events import (
    ActivityAsked,
    Answered,
    ChunkArrived,
    ClosedByPeer,
    Confirmed,
    CreditRefused,
    Event,
    Opened,
    PublishRefused,
    StreamChanged,
    ToSend,
)
from sharding.stream.protocol.frames import Frame, FrameReader
from sharding.stream.protocol.handshake import Handshake, Login
from sharding.stream.protocol.wire import U8, Reader

MAX_WAITING = 16_384
_CORRELATION_IDS = 1 << 32
_ANSWERED_LIKE_REQUESTS = (Key.ROUTE, Key.PARTITIONS)


class Connection:
    """The state of one connection."""

    def __init__(
        self,
        login: Login,
        limits: Limits,
        heartbeat: float,
        properties: Mapping[str, str],
        on_frame: Callable[[Frame], None] | None = None,
    ) -> None:
        """`properties` is what we tell the broker about us; `on_frame` sees what arrives."""
        self._frames = FrameReader(limits)
        self._handshake = Handshake(login, properties, limits.frame_max, heartbeat)
        self._on_frame = on_frame
        self._waiting: dict[int, Request[Any]] = {}
        self._last_id = 0
        self._failure: RemoteError | None = None
        self._ended = False

    @property
    def opened(self) -> Opened | None:
        """What was agreed on, once the handshake is done."""
        return self._handshake.result

    @property
    def awaited(self) -> str:
        """What the peer still owes, for an error message."""
        names = {request.name: None for request in self._waiting.values()}
        return f"the answer to {', '.join(names)}" if names else "Tune"

    def begin(self) -> bytes:
        """The first frame to send."""
        return self._encode(self._handshake.first())[1]

    def request(self, request: Request[Any]) -> tuple[int, bytes]:
        """The id that its `Answered` will have, and the frame to send."""
        opened = self.opened
        if opened is None:
            raise ProtocolError("the connection is not open")
        if not opened.commands.supports(request.key, request.version):
            version = ".".join(map(str, opened.server_version)) or "of unknown version"
            raise NotSupported(f"{request.name} is not known to the broker, RabbitMQ {version}")
        if len(self._waiting) >= MAX_WAITING:
            raise TooManyRequests(f"{MAX_WAITING} requests on the connection have no answer yet")
        correlation_id, frame = self._encode(request)
        if len(frame) > opened.frame_max:
            del self._waiting[correlation_id]
            rule = f"must have at most the agreed frame_max of {opened.frame_max} bytes"
            raise InvalidInput(request.name, rule, len(frame))
        return correlation_id, frame

    def buffer(self) -> memoryview:
        """Where the next bytes from the peer go."""
        if self._failure is not None:
            raise copy.copy(self._failure)
        return self._frames.buffer()

    def received(self, count: int) -> list[Event]:
        """What `count` more bytes in the buffer mean."""
        events: list[Event] = []
        try:
            for frame in self._frames.received(count):
                if self._on_frame is not None:
                    self._on_frame(frame)
                if not self._ended:
                    events.extend(self._understand(frame))
        except RemoteError as error:
            # A copy: the one that is raised refers, by its traceback, to this object.
            self._failure = copy.copy(error)
            if not events:
                raise
        return events

    def _encode(self, request: Request[Any]) -> tuple[int, bytes]:
        self._last_id = (self._last_id + 1) % _CORRELATION_IDS
        while self._last_id in self._waiting:
            self._last_id = (self._last_id + 1) % _CORRELATION_IDS
        frame = request.encode(self._last_id)
        self._waiting[self._last_id] = request
        return self._last_id, frame

    def _understand(self, frame: Frame) -> Iterator[Event]:
        key, version, body = frame
        if version != 1:
            raise ProtocolError(f"a frame with key {key:#06x} has version {version}, not 1")
        if self.opened is not None and (read := _PUSHED.get(key)) is not None:
            yield read(body)
        elif key == Key.CLOSE:
            yield from self._closed(Reader(body))
        elif key in (Key.TUNE, Key.TUNE | RESPONSE):
            yield from self._tuned(Reader(body))
        elif key & RESPONSE or key in _ANSWERED_LIKE_REQUESTS:
            yield from self._answered(key & ~RESPONSE, Reader(body))
        elif key != Key.HEARTBEAT or body:
            raise ProtocolError(f"a frame with key {key:#06x} came where it has no place")

    def _answered(self, key: int, body: Reader) -> Iterator[Event]:
        correlation_id = body.u32()
        request = self._waiting.get(correlation_id)
        if request is None or request.key != key:
            raise ProtocolError(f"an answer with key {key} came that nobody waits for")
        answer = request.answer(body)
        del self._waiting[correlation_id]
        if self.opened is not None:
            yield Answered(correlation_id, request, answer)
            return
        following = self._handshake.answered(request, answer)
        if following is not None:
            yield ToSend(self._encode(following)[1])
        elif self.opened is not None:
            self._frames.authenticated()
            yield self.opened

    def _tuned(self, body: Reader) -> Iterator[Event]:
        frame_max, heartbeat = body.u32(), body.u32()
        body.finish()
        following = self._handshake.tuned(frame_max, heartbeat)
        yield ToSend(tune_frame(self._handshake.frame_max, self._handshake.heartbeat))
        yield ToSend(self._encode(following)[1])

    def _closed(self, body: Reader) -> Iterator[Event]:
        correlation_id, code, reason = body.u32(), body.u16(), body.string()
        body.finish()
        self._ended = True
        yield ToSend(close_answer_frame(correlation_id))
        yield ClosedByPeer(code, reason or "")


def _confirm(body: memoryview) -> Event:
    reader = Reader(body)
    publisher_id = reader.u8()
    return Confirmed(publisher_id, reader.u64s())


def _publish_error(body: memoryview) -> Event:
    reader = Reader(body)
    publisher_id = reader.u8()
    return PublishRefused(publisher_id, reader.numbers_with_codes())


def _deliver(body: memoryview) -> Event:
    if not body:
        raise ProtocolError("a chunk is delivered to no subscription")
    return ChunkArrived(body[0], body[U8.size :])


def _credit_refused(body: memoryview) -> Event:
    reader = Reader(body)
    code, subscription_id = reader.u16(), reader.u8()
    reader.finish()
    return CreditRefused(subscription_id, code)


def _metadata_update(body: memoryview) -> Event:
    reader = Reader(body)
    code, stream = reader.u16(), reader.text()
    reader.finish()
    return StreamChanged(stream, code)


def _consumer_update(body: memoryview) -> Event:
    reader = Reader(body)
    correlation_id, subscription_id, active = reader.u32(), reader.u8(), reader.u8()
    reader.finish()
    if active > 1:
        raise ProtocolError(f"a consumer is made neither active nor inactive, but {active}")
    return ActivityAsked(correlation_id, subscription_id, bool(active))


_PUSHED: dict[int, Callable[[memoryview], Event]] = {
    Key.PUBLISH_CONFIRM: _confirm,
    Key.PUBLISH_ERROR: _publish_error,
    Key.DELIVER: _deliver,
    RESPONSE | Key.CREDIT: _credit_refused,
    Key.METADATA_UPDATE: _metadata_update,
    Key.CONSUMER_UPDATE: _consumer_update,
}


# When to send a heartbeat, and when a silent peer counts as dead. Pure: the time is passed in.
#
# A peer that sends nothing for two intervals is dead. We send something at least every half
# interval, so that one late heartbeat does not make us dead to the peer.


class Heartbeats:
    def __init__(self, interval: float, now: float) -> None:
        """`interval` is what both sides agreed on; with 0 there are no heartbeats."""
        self.interval = interval
        self._sent = self._received = now

    def sent(self, now: float) -> None:
        self._sent = now

    def received(self, now: float) -> None:
        self._received = now

    def is_due(self, now: float) -> bool:
        return self.interval > 0 and now - self._sent >= self.interval / 2

    def is_dead(self, now: float) -> bool:
        return self.interval > 0 and now - self._received >= self.interval * 2

    def next_check(self) -> float:
        """The time when one of them may become true; infinity if there are no heartbeats."""
        if not self.interval:
            return math.inf
        return min(self._sent + self.interval / 2, self._received + self.interval * 2)
