"""Drop-in wrappers for pika and aio-pika channels that behave as the sharding plugin does."""

from interceptors.outcomes import Outcome, Report, Result
from interceptors.pika_async import AsyncShardedChannel
from interceptors.pika_blocking import ShardedChannel
from interceptors.plan import Placement
from interceptors.publisher import NotAllStored, PublisherClosed, ShardedPublisher, WindowFull

__all__ = [
    "AsyncShardedChannel",
    "NotAllStored",
    "Outcome",
    "Placement",
    "PublisherClosed",
    "Report",
    "Result",
    "ShardedChannel",
    "ShardedPublisher",
    "WindowFull",
]
