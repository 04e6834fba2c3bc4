"""The names and numbers of the stream protocol, and the values every part speaks in.

Described in rabbitmq-server, `deps/rabbitmq_stream/docs/PROTOCOL.adoc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

MIB = 1024 * 1024
MAX_PUBLISHERS = MAX_SUBSCRIPTIONS = 255  # ids are one byte; 255 is what the servers allow
MAX_REFERENCE_BYTES = 255  # 3.10.8 accepts longer ones, and the stream's leader then crashes


class Key(IntEnum):
    """What a frame is; a response has `RESPONSE` set on top."""

    DECLARE_PUBLISHER = 1
    PUBLISH = 2
    PUBLISH_CONFIRM = 3
    PUBLISH_ERROR = 4
    QUERY_PUBLISHER_SEQUENCE = 5
    DELETE_PUBLISHER = 6
    SUBSCRIBE = 7
    DELIVER = 8
    CREDIT = 9
    STORE_OFFSET = 10
    QUERY_OFFSET = 11
    UNSUBSCRIBE = 12
    CREATE = 13
    DELETE = 14
    METADATA = 15
    METADATA_UPDATE = 16
    PEER_PROPERTIES = 17
    SASL_HANDSHAKE = 18
    SASL_AUTHENTICATE = 19
    TUNE = 20
    OPEN = 21
    CLOSE = 22
    HEARTBEAT = 23
    ROUTE = 24
    PARTITIONS = 25
    CONSUMER_UPDATE = 26
    EXCHANGE_COMMAND_VERSIONS = 27
    STREAM_STATS = 28
    CREATE_SUPER_STREAM = 29
    DELETE_SUPER_STREAM = 30
    RESOLVE_OFFSET_SPEC = 31


RESPONSE = 0x8000


class Code(IntEnum):
    """What a broker answers."""

    OK = 1
    NO_SUCH_STREAM = 2
    SUBSCRIPTION_ID_EXISTS = 3
    NO_SUCH_SUBSCRIPTION = 4
    STREAM_EXISTS = 5
    STREAM_NOT_AVAILABLE = 6
    SASL_MECHANISM_UNSUPPORTED = 7
    AUTHENTICATION_FAILURE = 8
    SASL_ERROR = 9
    SASL_CHALLENGE = 10
    LOOPBACK_ONLY = 11
    VHOST_ACCESS_REFUSED = 12
    UNKNOWN_FRAME = 13
    FRAME_TOO_LARGE = 14
    INTERNAL_ERROR = 15
    ACCESS_REFUSED = 16
    PRECONDITION_FAILED = 17
    NO_SUCH_PUBLISHER = 18
    NO_OFFSET = 19
    SASL_MECHANISM_CHANGED = 20
    SASL_USER_CHANGED = 21


class Broker(NamedTuple):
    """A node as the cluster advertises it to stream clients."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class OffsetType(IntEnum):
    FIRST = 1
    LAST = 2
    NEXT = 3
    OFFSET = 4
    TIMESTAMP = 5


@dataclass(frozen=True)
class OffsetSpec:
    """Where a subscription begins."""

    kind: OffsetType
    value: int = 0
    """The offset, or the timestamp in milliseconds since 1970; for the others nothing."""

    @classmethod
    def at(cls, offset: int) -> OffsetSpec:
        return cls(OffsetType.OFFSET, offset)

    @classmethod
    def since(cls, timestamp_ms: int) -> OffsetSpec:
        return cls(OffsetType.TIMESTAMP, timestamp_ms)


FIRST = OffsetSpec(OffsetType.FIRST)
LAST = OffsetSpec(OffsetType.LAST)
NEXT = OffsetSpec(OffsetType.NEXT)


@dataclass(frozen=True)
class Limits:
    """How much a peer may make us hold. A size is checked before memory is taken for it."""

    frame_max: int = MIB
    """The largest frame, both ways; the broker may agree on less."""
    chunk_max: int = 256 * MIB
    """The largest frame that delivers a chunk: brokers do not keep those to the agreed size
    (131 MB seen on 4.0.5)."""
    handshake_frame_max: int = 8 * 1024
    """The largest frame before the peer is authenticated."""
    uncompressed_max: int = 64 * MIB
    """The largest content of one compressed sub-entry batch, which is unpacked as a whole."""
    batch_max: int = 16 * MIB
    """The most message data, unpacked, that becomes one record batch; where there is more, it comes
    in several. Only a message that is larger by itself makes a larger one."""
