"""Consumer groups: any number of workers share all shards of a logical queue or a super stream.

`handling` runs handlers, `sharing` decides who holds what, `queues` and `streams` read. It may
import `publishing`, `stream`, `cluster`, `amqp`, `maps`, `metrics.names`, `backoff` and
`errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sharding.groups.handling.delivery import BatchFailed, Delivery, GroupFailed
from sharding.groups.options import GroupOptions, Retry
from sharding.groups.queues.group import AioConsumerGroup, ConsumerGroup

if TYPE_CHECKING:
    from sharding.groups.streams.group import StreamConsumerGroup
    from sharding.groups.streams.options import StreamGroupOptions
else:  # the stream client is loaded by who reads streams; type checkers see the names above
    _LOADED_LATE = {
        "StreamConsumerGroup": "sharding.groups.streams.group",
        "StreamGroupOptions": "sharding.groups.streams.options",
    }

    def __getattr__(name: str) -> object:
        if name in _LOADED_LATE:
            return getattr(import_module(_LOADED_LATE[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AioConsumerGroup",
    "BatchFailed",
    "ConsumerGroup",
    "Delivery",
    "GroupFailed",
    "GroupOptions",
    "Retry",
    "StreamConsumerGroup",
    "StreamGroupOptions",
]
