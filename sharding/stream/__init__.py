"""RabbitMQ streams: producers at leaders, consumers at replicas, behind any load balancer."""

from sharding.outcomes import NotStored, Outcome, PerhapsNotStored, Report, Result
from sharding.stream.consumer.consumer import Consumer
from sharding.stream.consumer.probe import Ends
from sharding.stream.consumer.ranges import RangeReading
from sharding.stream.environment import EnvironmentOptions, StreamEnvironment
from sharding.stream.errors import (
    AccessRefused,
    AuthenticationFailed,
    ConnectionLost,
    ConsumerInterrupted,
    DataLost,
    EndsTooEarly,
    NoAnswerInTime,
    NodeNotReached,
    NoLeader,
    NotActive,
    NotSupported,
    Overloaded,
    PeerNotTrusted,
    ProtocolError,
    PublishersBlocked,
    StreamExists,
    StreamNotFound,
    StreamRefused,
    StreamReplaced,
    StreamUnavailable,
)
from sharding.stream.messages.codecs import Compression
from sharding.stream.messages.message import Message, Properties
from sharding.stream.options import (
    Columns,
    ConsumerOptions,
    ProducerOptions,
    RouteOptions,
    StreamArguments,
)
from sharding.stream.producer.partitioning import Unroutable
from sharding.stream.producer.producer import Batch, Producer
from sharding.stream.protocol.constants import Broker, Limits
from sharding.stream.routes.values import StreamRoute

__all__ = [
    "AccessRefused",
    "AuthenticationFailed",
    "Batch",
    "Broker",
    "Columns",
    "Compression",
    "ConnectionLost",
    "Consumer",
    "ConsumerInterrupted",
    "ConsumerOptions",
    "DataLost",
    "Ends",
    "EndsTooEarly",
    "EnvironmentOptions",
    "Limits",
    "Message",
    "NoAnswerInTime",
    "NoLeader",
    "NodeNotReached",
    "NotActive",
    "NotStored",
    "NotSupported",
    "Outcome",
    "Overloaded",
    "PeerNotTrusted",
    "PerhapsNotStored",
    "Producer",
    "ProducerOptions",
    "Properties",
    "ProtocolError",
    "PublishersBlocked",
    "RangeReading",
    "Report",
    "Result",
    "RouteOptions",
    "StreamArguments",
    "StreamEnvironment",
    "StreamExists",
    "StreamNotFound",
    "StreamRefused",
    "StreamReplaced",
    "StreamRoute",
    "StreamUnavailable",
    "Unroutable",
]
