"""A stream in memory, and connections to it that answer as a broker does, for tests of consumers.

Chunks are delivered on the thread that calls; jobs for later run when the test says so, on a clock
that the test moves.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from sharding.stream.connections.access import Access
from sharding.stream.connections.attachments import SubscriberHandler
from sharding.stream.consumer.probe import PROBE_NAME
from sharding.stream.consumer.starting import BEGUN
from sharding.stream.errors import ConnectionLost, refusal
from sharding.stream.messages.message import encode_data
from sharding.stream.protocol.answers import Answer, MetadataAnswer, OffsetAnswer, StatsAnswer
from sharding.stream.protocol.commands import Subscribe, Unsubscribe
from sharding.stream.protocol.constants import Broker, Code, Key, Limits, OffsetSpec, OffsetType
from sharding.stream.routes.near_replicas import Placement
from sharding.stream.routes.values import Partitions, StreamRoute

A, B, C = Broker("a", 1), Broker("b", 1), Broker("c", 1)


def chunk_of(first: int, bodies: Sequence[bytes]) -> memoryview:
    messages = [encode_data(body) for body in bodies]
    data = b"".join(struct.pack(">I", len(each)) + each for each in messages)
    count = len(bodies)
    header = struct.pack(
        ">BBHIqQQIIII", 0x50, 0, count, count, 1_000, 1, first, zlib.crc32(data), len(data), 0, 0
    )
    return memoryview(header + data)


@dataclass
class FakeStream:
    """What is stored: chunks by their first offset. A gap is made by `skip`."""

    name: str = "s"
    chunks: list[tuple[int, list[bytes]]] = field(default_factory=list)
    next_offset: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    """That an offset was stored: under names of their own, and retention leaves them alone."""
    loses_offsets: bool = False
    """The leader is away: what is sent to be stored is lost, and nobody is told."""
    begins_at: int = 0
    watchers: list[FakeClient] = field(default_factory=list)

    def append(self, *sizes: int) -> None:
        """Add a chunk for each size; a body is the message's offset."""
        for size in sizes:
            offsets = range(self.next_offset, self.next_offset + size)
            self.chunks.append((self.next_offset, [b"%d" % offset for offset in offsets]))
            self.next_offset += size
        for client in self.watchers:
            client.deliver()

    def skip(self, offsets: int) -> None:
        """What a tracking chunk does."""
        self.next_offset += offsets

    def truncate(self, chunks: int) -> None:
        """What retention does."""
        del self.chunks[:chunks]
        self.begins_at = self.chunks[0][0]

    def index_of(self, spec: OffsetSpec) -> int:
        match spec.kind:
            case OffsetType.FIRST:
                return 0
            case OffsetType.LAST:
                return max(0, len(self.chunks) - 1)
            case OffsetType.NEXT:
                return len(self.chunks)
        ends = [first + len(bodies) for first, bodies in self.chunks]
        return next((n for n, end in enumerate(ends) if end > spec.value), len(self.chunks))


@dataclass
class _Subscribed:
    following: int  # the first offset of the next chunk is at or after this
    credit: int


class FakeClient:
    def __init__(
        self, node: Broker, stream: FakeStream, version: tuple[int, ...] = (4, 0, 5)
    ) -> None:
        self.node = node
        self.server_version = version
        self.closed = False
        self.stream = stream
        self.handlers: dict[int, SubscriberHandler] = {}
        self.subscribed: dict[int, _Subscribed] = {}
        self.requests: list[object] = []
        self.delivered = 0
        self.refuses: Exception | None = None
        self.hold_back = False
        self.waiting: set[int] = set()
        """Subscriptions of single active consumers whose turn it is not."""
        self.active: set[int] = set()
        """Subscriptions that were told that they are active, and not yet the contrary."""
        self.on_the_way: list[memoryview] = []
        """Chunks that are seen after the next answer to a ConsumerUpdate, and were sent before."""
        self.answered: list[tuple[bool, OffsetSpec]] = []
        """What was said to each ConsumerUpdate."""
        self.visible: int | None = None
        """How many chunks this node has; None for all."""
        self.loses_after_subscribe = False
        self.before_answer: Callable[[], object] = lambda: None
        """Called when a Subscribe was carried out, before its answer is seen."""
        stream.watchers.append(self)

    def supports(self, key: Key, version: int = 1) -> bool:  # noqa: ARG002
        return self.server_version >= (3, 11) or key <= Key.PARTITIONS

    def attach_subscriber(self, handler: SubscriberHandler, stream: str) -> int:  # noqa: ARG002
        number = next(n for n in range(255) if n not in self.handlers)
        self.handlers[number] = handler
        return number

    def detach_subscriber(self, number: int) -> None:
        del self.handlers[number]
        self.waiting.discard(number)
        self.subscribed.pop(number, None)

    def call(self, request: Any, timeout: float | None = None) -> Answer:  # noqa: ARG002
        if self.closed:
            raise ConnectionLost("closed")
        if self.refuses is not None:
            raise self.refuses
        self.requests.append(request)
        match request.key:
            case Key.SUBSCRIBE:
                return self._subscribe(request)
            case Key.UNSUBSCRIBE:
                self.subscribed.pop(request.subscription_id, None)
            case Key.QUERY_OFFSET:
                known = self.stream.stored | self.stream.notes
                return OffsetAnswer(Code.OK, known.get(request.reference))
            case Key.STREAM_STATS:
                chunks = self.stream.chunks
                last = chunks[-1][0] if chunks else -1
                ends = {"last_chunk_id": last, "committed_chunk_id": last}
                return StatsAnswer(Code.OK, {"first_chunk_id": self.stream.begins_at} | ends)
            case Key.METADATA:
                return MetadataAnswer(Code.OK)
        return Answer(Code.OK)

    def send(self, frame: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        if self.closed:
            raise ConnectionLost("closed")
        key = int.from_bytes(frame[4:6], "big")
        if key == Key.CREDIT:
            number, credit = struct.unpack(">BH", frame[8:11])
            subscribed = self.subscribed.get(number)
            if subscribed is None:  # another thread has just lost it
                raise ConnectionLost("closed")
            subscribed.credit += credit
            self.deliver()
        else:
            assert key == Key.STORE_OFFSET
            length = int.from_bytes(frame[8:10], "big")
            name = frame[10 : 10 + length].decode()
            if self.stream.loses_offsets:
                return
            offset = int.from_bytes(frame[-8:], "big")
            (self.stream.notes if offset == BEGUN else self.stream.stored)[name] = offset

    def _subscribe(self, request: Subscribe) -> Answer:
        if self.stream.name != request.stream:
            raise refusal("Subscribe", Code.NO_SUCH_STREAM, request.stream)
        self._start(request.subscription_id, request.offset, request.credit)
        if "single-active-consumer" in request.properties:
            self.waiting.add(request.subscription_id)
        self.deliver()
        self.before_answer()
        if self.loses_after_subscribe:
            self.lose()
        return Answer(Code.OK)

    def _start(self, number: int, spec: OffsetSpec, credit: int) -> None:
        chunks = self.stream.chunks[: self.visible]
        index = min(self.stream.index_of(spec), max(0, len(chunks) - 1))
        following = chunks[index][0] if index < len(chunks) else self.stream.next_offset
        self.subscribed[number] = _Subscribed(following, credit)

    def make_active(self, number: int, active: bool) -> None:
        """What ConsumerUpdate does; an answer may come later.

        Who is asked while it is active already is sent more in the meantime; and any answer counts
        for who is active now, whatever question it belongs to (so the source of 4.0.5).
        """
        if active:
            self.active.add(number)
        else:
            self.active.discard(number)
            self.waiting.add(number)
        answer = self.handlers[number].on_activity(active)
        if isinstance(answer, Future):
            answer.add_done_callback(lambda later: self._go_on(number, active, later.result()))
        else:
            self._go_on(number, active, answer)

    def _go_on(self, number: int, active: bool, spec: OffsetSpec) -> None:
        self.answered.append((active, spec))
        subscribed = self.subscribed.get(number)
        if number in self.active and subscribed is not None:
            strays, self.on_the_way = self.on_the_way, []
            for chunk in strays:
                subscribed.credit -= 1
                self.handlers[number].on_chunk(chunk)
            self.waiting.discard(number)
            self._start(number, spec, subscribed.credit)
            self.deliver()

    def deliver(self) -> None:
        if self.hold_back or self.closed:
            return
        for number, subscribed in list(self.subscribed.items()):
            if number in self.waiting:
                continue
            for first, bodies in self.stream.chunks[: self.visible]:
                handler = self.handlers.get(number)  # none: another thread has just lost it
                if handler and subscribed.credit > 0 and first >= subscribed.following:
                    subscribed.following = first + len(bodies)
                    subscribed.credit -= 1
                    self.delivered += 1
                    handler.on_chunk(chunk_of(first, bodies))

    def lose(self, reason: Exception | None = None) -> None:
        """The connection breaks."""
        self.closed = True
        self.subscribed.clear()
        handlers, self.handlers = self.handlers, {}
        for handler in handlers.values():
            handler.on_lost(reason or ConnectionLost("lost"))

    def asked(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    @property
    def reads(self) -> bool:
        subscribed = self.asked(Subscribe)
        return any(each.properties.get("name") != PROBE_NAME for each in subscribed)

    @property
    def unsubscribed(self) -> bool:
        return bool(self.asked(Unsubscribe)) and not self.handlers


@dataclass(frozen=True)
class FakeTimer:
    cancelled: bool


class FakeCluster:
    """Three nodes with the stream, and what an environment lends to a consumer."""

    def __init__(self, *sizes: int, version: tuple[int, ...] = (4, 0, 5)) -> None:
        self.stream = FakeStream()
        self.stream.append(*sizes)
        self.version = version
        self.now = 0.0
        self.clients: list[FakeClient] = []
        self.released: list[FakeClient] = []
        self.jobs: list[tuple[float, Callable[[], None]]] = []
        self.down: Exception | None = None
        self.no_stream: Exception | None = None
        self.suspected: list[str] = []
        self.closed = False
        self.limits = Limits()
        self.on_connect: Callable[[FakeClient], None] = lambda _: None

    @property
    def access(self) -> Access:
        return Access(
            routes=self,
            pool=cast(Any, self),
            later=self,
            placement=Placement(),
            clock=lambda: self.now,
            rng=random.Random(7),
            limits=self.limits,
        )

    @property
    def client(self) -> FakeClient:
        """The connection that was made last to read from, not only to have a short look."""
        reading = [each for each in self.clients if each.reads]
        return (reading or self.clients)[-1]

    def route(self, stream: str, timeout: float) -> StreamRoute:  # noqa: ARG002
        if self.no_stream is not None:
            raise self.no_stream
        return StreamRoute(stream, A, (B, C))

    def leader(self, stream: str, timeout: float) -> Broker:  # noqa: ARG002
        return A

    def partitions(self, super_stream: str, timeout: float) -> Partitions:  # noqa: ARG002
        raise refusal("Partitions", Code.NO_SUCH_STREAM, super_stream)

    def suspect(self, name: str, reason: str) -> None:  # noqa: ARG002
        self.suspected.append(name)

    def subscriber(
        self,
        candidates: Sequence[Broker],
        stream: str,
        handler: SubscriberHandler,
        deadline: float,  # noqa: ARG002
    ) -> tuple[FakeClient, int]:
        if self.down is not None:
            raise self.down
        client = FakeClient(candidates[0], self.stream, self.version)
        self.clients.append(client)
        number = client.attach_subscriber(handler, stream)
        self.on_connect(client)
        return client, number

    def release(self, client: FakeClient) -> None:
        self.released.append(client)

    def schedule(self, delay: float, job: Callable[[], None]) -> FakeTimer:
        if not self.closed:
            self.jobs.append((self.now + delay, job))
        return FakeTimer(self.closed)

    def run(self, until: float | None = None) -> None:
        """Do what is due, and with `until` what becomes due up to then."""
        until = self.now if until is None else until
        while due := [entry for entry in self.jobs if entry[0] <= until]:
            entry = min(due, key=lambda each: each[0])
            self.jobs.remove(entry)
            self.now = max(self.now, entry[0])
            entry[1]()
        self.now = until
