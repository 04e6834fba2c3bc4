"""What makes, deletes and describes streams and super streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sharding.stream.frames import primitives as wire
from sharding.stream.frames.answers import ResolvedOffsetAnswer, StatsAnswer
from sharding.stream.frames.primitives import Reader
from sharding.stream.frames.requests import PlainRequest, Request
from sharding.stream.protocol import Key, OffsetSpec


@dataclass(frozen=True)
class Create(PlainRequest):
    key = Key.CREATE
    stream: str
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        return self.stream

    def body(self) -> bytes:
        return wire.string("stream", self.stream) + wire.string_map("arguments", self.arguments)


@dataclass(frozen=True)
class Delete(PlainRequest):
    key = Key.DELETE
    stream: str

    @property
    def subject(self) -> str:
        return self.stream

    def body(self) -> bytes:
        return wire.string("stream", self.stream)


@dataclass(frozen=True)
class StreamStats(Request[StatsAnswer]):
    """RabbitMQ 3.11 and later."""

    key = Key.STREAM_STATS
    stream: str

    @property
    def subject(self) -> str:
        return self.stream

    def body(self) -> bytes:
        return wire.string("stream", self.stream)

    def answer(self, body: Reader) -> StatsAnswer:
        return StatsAnswer.read(body)


@dataclass(frozen=True)
class CreateSuperStream(PlainRequest):
    """RabbitMQ 3.13 and later. Partition n is bound under binding key n."""

    key = Key.CREATE_SUPER_STREAM
    super_stream: str
    partitions: tuple[str, ...]
    binding_keys: tuple[str, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        return self.super_stream

    def body(self) -> bytes:
        return (
            wire.string("super stream", self.super_stream)
            + wire.string_list("partition", self.partitions)
            + wire.string_list("binding key", self.binding_keys)
            + wire.string_map("arguments", self.arguments)
        )


@dataclass(frozen=True)
class DeleteSuperStream(PlainRequest):
    """RabbitMQ 3.13 and later."""

    key = Key.DELETE_SUPER_STREAM
    super_stream: str

    @property
    def subject(self) -> str:
        return self.super_stream

    def body(self) -> bytes:
        return wire.string("super stream", self.super_stream)


@dataclass(frozen=True)
class ResolveOffsetSpec(Request[ResolvedOffsetAnswer]):
    """RabbitMQ 4.3 and later."""

    key = Key.RESOLVE_OFFSET_SPEC
    stream: str
    offset: OffsetSpec
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        return self.stream

    def body(self) -> bytes:
        return (
            wire.string("stream", self.stream)
            + wire.offset_spec(self.offset)
            + wire.string_map("properties", self.properties)
        )

    def answer(self, body: Reader) -> ResolvedOffsetAnswer:
        return ResolvedOffsetAnswer.read(body)
