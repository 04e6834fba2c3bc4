"""RabbitMQ streams: producers at leaders, consumers at replicas, behind any load balancer."""

from sharding.route_options import RouteOptions
from sharding.routes import StreamRoute
from sharding.stream.codecs import Compression
from sharding.stream.columns import Columns
from sharding.stream.consumer import Consumer
from sharding.stream.consumer_options import ConsumerOptions
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
    Overloaded,
    ProtocolError,
    StreamExists,
    StreamNotFound,
    StreamRefused,
    StreamUnavailable,
)
from sharding.stream.message import Message
from sharding.stream.probe import Ends
from sharding.stream.producer import Producer
from sharding.stream.producer_options import ProducerOptions
from sharding.stream.properties import Properties
from sharding.stream.protocol import Broker, Limits
from sharding.stream.report import Failure, NotStored, PerhapsNotStored, Report
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
    "Overloaded",
    "PerhapsNotStored",
    "Producer",
    "ProducerOptions",
    "Properties",
    "ProtocolError",
    "Report",
    "RouteOptions",
    "StreamArguments",
    "StreamEnvironment",
    "StreamExists",
    "StreamNotFound",
    "StreamRefused",
    "StreamRoute",
    "StreamUnavailable",
]
