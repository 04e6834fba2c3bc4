"""RabbitMQ streams: producers at leaders, consumers at replicas, behind any load balancer."""

from sharding.stream.consuming.consumer import Consumer
from sharding.stream.consuming.consumer_options import ConsumerOptions
from sharding.stream.consuming.probe import Ends
from sharding.stream.consuming.reading import RangeReading
from sharding.stream.environment import StreamEnvironment
from sharding.stream.environment_options import EnvironmentOptions
from sharding.stream.errors import (
    AccessRefused,
    AuthenticationFailed,
    ConnectionLost,
    DataLost,
    NoAnswerInTime,
    NodeNotReached,
    NoLeader,
    NotSupported,
    Overloaded,
    PeerNotTrusted,
    ProtocolError,
    StreamExists,
    StreamNotFound,
    StreamRefused,
    StreamUnavailable,
)
from sharding.stream.formats.codecs import Compression
from sharding.stream.formats.columns import Columns
from sharding.stream.formats.message import Message
from sharding.stream.formats.properties import Properties
from sharding.stream.producing.producer import Producer
from sharding.stream.producing.producer_options import ProducerOptions
from sharding.stream.producing.report import Failure, NotStored, PerhapsNotStored, Report
from sharding.stream.producing.targets import Unroutable
from sharding.stream.protocol import Broker, Limits
from sharding.stream.routes.rules import RouteOptions
from sharding.stream.routes.values import StreamRoute
from sharding.stream.stream_arguments import StreamArguments

__all__ = [
    "AccessRefused",
    "AuthenticationFailed",
    "Broker",
    "Columns",
    "Compression",
    "ConnectionLost",
    "Consumer",
    "ConsumerOptions",
    "DataLost",
    "Ends",
    "EnvironmentOptions",
    "Failure",
    "Limits",
    "Message",
    "NoAnswerInTime",
    "NoLeader",
    "NodeNotReached",
    "NotStored",
    "NotSupported",
    "Overloaded",
    "PeerNotTrusted",
    "PerhapsNotStored",
    "Producer",
    "ProducerOptions",
    "Properties",
    "ProtocolError",
    "RangeReading",
    "Report",
    "RouteOptions",
    "StreamArguments",
    "StreamEnvironment",
    "StreamExists",
    "StreamNotFound",
    "StreamRefused",
    "StreamRoute",
    "StreamUnavailable",
    "Unroutable",
]
