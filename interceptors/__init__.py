"""Drop-in wrappers for pika and aio-pika channels that behave as the sharding plugin does."""

from typing import TYPE_CHECKING

from interceptors.connections import AsyncShardedConnection, ShardedConnection
from interceptors.method_rules import Placement
from interceptors.pika_blocking import ShardedChannel
from interceptors.pika_callback import AsyncShardedChannel
from sharding.outcomes import NotStored, Outcome, PerhapsNotStored, Report, Result
from sharding.publishing.publisher import Batch, PublisherClosed, ShardedPublisher, WindowFull

if TYPE_CHECKING:
    from interceptors.aio import AioShardedChannel, AioShardedConnection
else:  # aio-pika is an extra, so its wrappers are loaded when they are asked for

    def __getattr__(name: str) -> object:
        if name not in ("AioShardedChannel", "AioShardedConnection"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from interceptors import aio

        return getattr(aio, name)


__all__ = [
    "AioShardedChannel",
    "AioShardedConnection",
    "AsyncShardedChannel",
    "AsyncShardedConnection",
    "Batch",
    "NotStored",
    "Outcome",
    "PerhapsNotStored",
    "Placement",
    "PublisherClosed",
    "Report",
    "Result",
    "ShardedChannel",
    "ShardedConnection",
    "ShardedPublisher",
    "WindowFull",
]
