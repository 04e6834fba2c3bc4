"""What producers, consumers and the route cache ask of a broker: each a value that encodes itself.

`client.call(request)` returns the answer of the request's own kind. Streams are made and deleted
further below, connections opened with `handshake`. Frames that get no answer are functions
that return the whole frame.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar, cast

from sharding.stream.protocol import wire
from sharding.stream.protocol.answers import (
    Answer,
    MetadataAnswer,
    OffsetAnswer,
    PartitionsAnswer,
    ResolvedOffsetAnswer,
    RouteAnswer,
    SequenceAnswer,
    StatsAnswer,
)
from sharding.stream.protocol.constants import RESPONSE, Code, Key, OffsetSpec
from sharding.stream.protocol.wire import FRAME_HEADER, U8, U16, U32, U64, Reader

A = TypeVar("A", bound=Answer, covariant=True)

_REQUEST_HEADER = struct.Struct(">IHHI")  # size, key, version, correlation id
_PUBLISH_HEADER = struct.Struct(">IHHBI")  # size, key, version, publisher id, count
PUBLISH_HEADER_SIZE = _PUBLISH_HEADER.size


@dataclass(frozen=True)
class Request(ABC, Generic[A]):
    """A command that the broker answers: `class Open(Request[X], answer=X, about="vhost")`.

    `answer` is what reads the answer; without it the answer is a code only. `about` is the field
    that the message of a refusal names.
    """

    key: ClassVar[Key]
    version: ClassVar[int] = 1
    accepted_codes: ClassVar[frozenset[int]] = frozenset({Code.OK})
    """Every other code is raised as a refusal."""
    _answer: ClassVar[type[Answer]]
    _about: ClassVar[str | None]

    def __init_subclass__(cls, answer: type[Answer] = Answer, about: str | None = None) -> None:
        cls._answer = answer
        cls._about = about

    @property
    def name(self) -> str:
        """
        >>> Partitions("invoices").name
        'Partitions'
        """
        return type(self).__name__

    @property
    def subject(self) -> str:
        """What the request is about, for the message of a refusal.

        >>> Partitions("invoices").subject
        'invoices'
        """
        return "" if self._about is None else str(getattr(self, self._about))

    @abstractmethod
    def body(self) -> bytes:
        """What follows the correlation id."""

    def answer(self, body: Reader) -> A:
        """The answer, from what follows its correlation id."""
        return cast(A, self._answer.read(body))

    def encode(self, correlation_id: int) -> bytes:
        """The whole frame."""
        body = self.body()
        size = len(body) + _REQUEST_HEADER.size - U32.size
        return _REQUEST_HEADER.pack(size, self.key, self.version, correlation_id) + body


@dataclass(frozen=True)
class DeclarePublisher(Request[Answer], about="stream"):
    key = Key.DECLARE_PUBLISHER
    publisher_id: int
    reference: str | None
    stream: str

    def body(self) -> bytes:
        # No reference is written as an empty one: brokers close the connection on null here.
        return (
            wire.unsigned("publisher_id", self.publisher_id, U8)
            + wire.reference(self.reference or "")
            + wire.string("stream", self.stream)
        )


@dataclass(frozen=True)
class QueryPublisherSequence(Request[SequenceAnswer], answer=SequenceAnswer, about="stream"):
    key = Key.QUERY_PUBLISHER_SEQUENCE
    reference: str
    stream: str

    def body(self) -> bytes:
        return wire.reference(self.reference) + wire.string("stream", self.stream)


@dataclass(frozen=True)
class DeletePublisher(Request[Answer]):
    key = Key.DELETE_PUBLISHER
    publisher_id: int

    def body(self) -> bytes:
        return wire.unsigned("publisher_id", self.publisher_id, U8)


@dataclass(frozen=True)
class Subscribe(Request[Answer], about="stream"):
    key = Key.SUBSCRIBE
    subscription_id: int
    stream: str
    offset: OffsetSpec
    credit: int
    properties: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        return (
            wire.unsigned("subscription_id", self.subscription_id, U8)
            + wire.string("stream", self.stream)
            + wire.offset_spec(self.offset)
            + wire.unsigned("credit", self.credit, U16)
            + wire.string_map("properties", self.properties)
        )


@dataclass(frozen=True)
class Unsubscribe(Request[Answer]):
    key = Key.UNSUBSCRIBE
    subscription_id: int

    def body(self) -> bytes:
        return wire.unsigned("subscription_id", self.subscription_id, U8)


@dataclass(frozen=True)
class QueryOffset(Request[OffsetAnswer], answer=OffsetAnswer, about="stream"):
    """Also tells the broker to send this connection the stream's MetadataUpdate, once."""

    key = Key.QUERY_OFFSET
    accepted_codes = frozenset({Code.OK, Code.NO_OFFSET})
    reference: str
    stream: str

    def body(self) -> bytes:
        return wire.reference(self.reference) + wire.string("stream", self.stream)


@dataclass(frozen=True)
class Metadata(Request[MetadataAnswer], answer=MetadataAnswer):
    """Each stream in the answer has a code of its own; none is raised."""

    key = Key.METADATA
    streams: tuple[str, ...]

    @property
    def subject(self) -> str:
        return ", ".join(self.streams[:3]) + (", …" if len(self.streams) > 3 else "")

    def body(self) -> bytes:
        return wire.string_list("stream", self.streams)


@dataclass(frozen=True)
class Route(Request[RouteAnswer], answer=RouteAnswer, about="super_stream"):
    """Where the broker would send a key: the streams bound to the super stream under it."""

    key = Key.ROUTE
    routing_key: str
    super_stream: str

    def body(self) -> bytes:
        return wire.string("routing key", self.routing_key) + wire.string(
            "super stream", self.super_stream
        )


@dataclass(frozen=True)
class Partitions(Request[PartitionsAnswer], answer=PartitionsAnswer, about="super_stream"):
    key = Key.PARTITIONS
    super_stream: str

    def body(self) -> bytes:
        return wire.string("super stream", self.super_stream)


def publish_header(publisher_id: int, count: int, size_of_entries: int, version: int = 1) -> bytes:
    """What stands before the entries of a Publish frame; the entries follow as they are."""
    size = PUBLISH_HEADER_SIZE - U32.size + size_of_entries
    return _PUBLISH_HEADER.pack(size, Key.PUBLISH, version, publisher_id, count)


def credit_frame(subscription_id: int, credit: int) -> bytes:
    return _frame(Key.CREDIT, U8.pack(subscription_id) + wire.unsigned("credit", credit, U16))


def store_offset_frame(reference: str, stream: str, offset: int) -> bytes:
    return _frame(
        Key.STORE_OFFSET,
        wire.reference(reference)
        + wire.string("stream", stream)
        + wire.unsigned("offset", offset, U64),
    )


def heartbeat_frame() -> bytes:
    return _frame(Key.HEARTBEAT, b"")


def tune_frame(frame_max: int, heartbeat: int) -> bytes:
    return _frame(Key.TUNE, U32.pack(frame_max) + U32.pack(heartbeat))


def close_answer_frame(correlation_id: int) -> bytes:
    return _frame(RESPONSE | Key.CLOSE, U32.pack(correlation_id) + U16.pack(Code.OK))


def activity_answer_frame(correlation_id: int, offset: OffsetSpec) -> bytes:
    """The answer to ConsumerUpdate: where the subscription goes on."""
    return _frame(
        RESPONSE | Key.CONSUMER_UPDATE,
        U32.pack(correlation_id) + U16.pack(Code.OK) + wire.offset_spec(offset),
    )


def _frame(key: int, body: bytes, version: int = 1) -> bytes:
    return FRAME_HEADER.pack(len(body) + FRAME_HEADER.size - U32.size, key, version) + body


@dataclass(frozen=True)
class Create(Request[Answer], about="stream"):
    key = Key.CREATE
    stream: str
    arguments: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        return wire.string("stream", self.stream) + wire.string_map("arguments", self.arguments)


@dataclass(frozen=True)
class Delete(Request[Answer], about="stream"):
    key = Key.DELETE
    stream: str

    def body(self) -> bytes:
        return wire.string("stream", self.stream)


@dataclass(frozen=True)
class StreamStats(Request[StatsAnswer], answer=StatsAnswer, about="stream"):
    """RabbitMQ 3.11 and later."""

    key = Key.STREAM_STATS
    stream: str

    def body(self) -> bytes:
        return wire.string("stream", self.stream)


@dataclass(frozen=True)
class CreateSuperStream(Request[Answer], about="super_stream"):
    """RabbitMQ 3.13 and later. Partition n is bound under binding key n."""

    key = Key.CREATE_SUPER_STREAM
    super_stream: str
    partitions: tuple[str, ...]
    binding_keys: tuple[str, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        return (
            wire.string("super stream", self.super_stream)
            + wire.string_list("partition", self.partitions)
            + wire.string_list("binding key", self.binding_keys)
            + wire.string_map("arguments", self.arguments)
        )


@dataclass(frozen=True)
class DeleteSuperStream(Request[Answer], about="super_stream"):
    """RabbitMQ 3.13 and later."""

    key = Key.DELETE_SUPER_STREAM
    super_stream: str

    def body(self) -> bytes:
        return wire.string("super stream", self.super_stream)


@dataclass(frozen=True)
class ResolveOffsetSpec(Request[ResolvedOffsetAnswer], answer=ResolvedOffsetAnswer, about="stream"):
    """RabbitMQ 4.3 and later."""

    key = Key.RESOLVE_OFFSET_SPEC
    stream: str
    offset: OffsetSpec
    properties: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        return (
            wire.string("stream", self.stream)
            + wire.offset_spec(self.offset)
            + wire.string_map("properties", self.properties)
        )
