"""Drop-in wrappers for pika and aio-pika channels that behave as the sharding plugin does."""

from typing import TYPE_CHECKING, Any

from interceptors.pika_blocking import ShardedChannel
from interceptors.pika_callback import AsyncShardedChannel
from interceptors.rules import Placement
from sharding.outcomes import Outcome, Report, Result
from sharding.publishing.publisher import (
    NotAllStored,
    PublisherClosed,
    ShardedPublisher,
    WindowFull,
)

if TYPE_CHECKING:
    from interceptors.aio import AioShardedChannel

__all__ = [
    "AioShardedChannel",
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


def __getattr__(name: str) -> Any:
    # aio-pika is an extra, so its wrapper is loaded when it is asked for.
    if name == "AioShardedChannel":
        from interceptors.aio import AioShardedChannel

        return AioShardedChannel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
