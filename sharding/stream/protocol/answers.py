"""What the broker answers to requests, as values.

Only the answer to Metadata has no code of its own. When the code is not OK, what follows has no
meaning and differs between versions: it is not read, and the fields keep their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sharding.stream.errors import ProtocolError
from sharding.stream.protocol.constants import Broker, Code, OffsetSpec, OffsetType
from sharding.stream.protocol.wire import I16, U16, U32, Reader

NO_LEADER = 0xFFFF


class VersionRange(NamedTuple):
    """The versions of one command that a side speaks."""

    key: int
    lowest: int
    highest: int


@dataclass(frozen=True)
class Answer:
    """An answer that is a code only."""

    code: int

    @classmethod
    def read(cls, body: Reader) -> Answer:
        answer = cls(body.u16())
        if answer.code == Code.OK:
            body.finish()
        return answer


@dataclass(frozen=True)
class PropertiesAnswer(Answer):
    """To PeerProperties and to Open: what the broker says about itself or the connection."""

    properties: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, body: Reader) -> PropertiesAnswer:
        code = body.u16()
        if code != Code.OK:
            return cls(code)
        # The first brokers with streams answered Open with the code alone.
        answer = cls(code, body.string_map() if body.left else {})
        body.finish()
        return answer


@dataclass(frozen=True)
class MechanismsAnswer(Answer):
    """The SASL mechanisms the broker offers."""

    mechanisms: tuple[str, ...] = ()

    @classmethod
    def read(cls, body: Reader) -> MechanismsAnswer:
        code, names = _code_and_names(body)
        return cls(code, names)


@dataclass(frozen=True)
class SaslAnswer(Answer):
    """To SaslAuthenticate; a challenge is for mechanisms of several steps."""

    challenge: bytes = field(default=b"", repr=False)

    @classmethod
    def read(cls, body: Reader) -> SaslAnswer:
        code = body.u16()
        if code != Code.OK:
            return cls(code)
        answer = cls(code, body.byte_array() if body.left else b"")
        body.finish()
        return answer


@dataclass(frozen=True)
class CommandVersionsAnswer(Answer):
    versions: tuple[VersionRange, ...] = ()

    @classmethod
    def read(cls, body: Reader) -> CommandVersionsAnswer:
        code = body.u16()
        if code != Code.OK:
            return cls(code)
        versions = body.list_of(
            lambda: VersionRange(body.u16(), body.u16(), body.u16()), 3 * U16.size
        )
        body.finish()
        return cls(code, tuple(versions))


@dataclass(frozen=True)
class StreamMetadata:
    """Where a stream lives. With code OK and no leader an election is under way."""

    stream: str
    code: int
    leader: Broker | None
    replicas: tuple[Broker, ...]
    """Without the leader."""


@dataclass(frozen=True)
class MetadataAnswer(Answer):
    streams: tuple[StreamMetadata, ...] = ()

    @classmethod
    def read(cls, body: Reader) -> MetadataAnswer:
        brokers = dict(
            body.list_of(
                lambda: (body.u16(), Broker(body.text(), body.u32())),
                U16.size + I16.size + U32.size,
            )
        )

        def stream() -> StreamMetadata:
            name, code, leader = body.text(), body.u16(), body.u16()
            replicas = body.list_of(body.u16, U16.size)
            # A node that left between two steps of the broker's answer is not in its list.
            return StreamMetadata(
                name,
                code,
                brokers.get(leader) if leader != NO_LEADER else None,
                tuple(brokers[number] for number in replicas if number in brokers),
            )

        streams = body.list_of(stream, I16.size + 2 * U16.size + U32.size)
        body.finish()
        return cls(Code.OK, tuple(streams))


@dataclass(frozen=True)
class SequenceAnswer(Answer):
    """The last publishing id stored under a reference; 0 for one that is not known."""

    publishing_id: int = 0

    @classmethod
    def read(cls, body: Reader) -> SequenceAnswer:
        code, number = _code_and_number(body)
        return cls(code, number)


@dataclass(frozen=True)
class OffsetAnswer(Answer):
    """The offset stored under a reference, or none."""

    offset: int | None = None

    @classmethod
    def read(cls, body: Reader) -> OffsetAnswer:
        code, number = _code_and_number(body)
        return cls(code, number if code == Code.OK else None)


@dataclass(frozen=True)
class StreamsAnswer(Answer):
    """Names of streams, in the order of the partitions."""

    streams: tuple[str, ...] = ()


@dataclass(frozen=True)
class RouteAnswer(StreamsAnswer):
    @classmethod
    def read(cls, body: Reader) -> RouteAnswer:
        code, names = _code_and_names(body)
        return cls(code, names)


@dataclass(frozen=True)
class PartitionsAnswer(StreamsAnswer):
    @classmethod
    def read(cls, body: Reader) -> PartitionsAnswer:
        code, names = _code_and_names(body)
        return cls(code, names)


@dataclass(frozen=True)
class StatsAnswer(Answer):
    """Numbers about a stream; −1 where it is empty."""

    stats: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, body: Reader) -> StatsAnswer:
        code = body.u16()
        if code != Code.OK:
            return cls(code)
        stats = body.list_of(lambda: (body.text(), body.i64()), I16.size + 8)
        body.finish()
        return cls(code, dict(stats))


@dataclass(frozen=True)
class ResolvedOffsetAnswer(Answer):
    offset: OffsetSpec | None = None

    @classmethod
    def read(cls, body: Reader) -> ResolvedOffsetAnswer:
        code = body.u16()
        if code != Code.OK:
            return cls(code)
        kind, value = body.u16(), body.u64()
        body.finish()
        if kind != OffsetType.OFFSET:
            raise ProtocolError(f"an offset was resolved to one of kind {kind}")
        return cls(code, OffsetSpec.at(value))


def _code_and_number(body: Reader) -> tuple[int, int]:
    code = body.u16()
    if code != Code.OK:
        return code, 0
    number = body.u64()
    body.finish()
    return code, number


def _code_and_names(body: Reader) -> tuple[int, tuple[str, ...]]:
    code = body.u16()
    if code != Code.OK:
        return code, ()
    names = body.list_of(body.text, I16.size)
    body.finish()
    return code, tuple(names)
