"""Consumer groups: any number of workers share all shards of a logical queue or a super stream."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sharding.groups.handling.delivery import BatchFailed, Delivery, GroupFailed
from sharding.groups.options import GroupOptions, Retry
from sharding.groups.queues.group import ConsumerGroup

if TYPE_CHECKING:
    from sharding.groups.queues.aio_group import AioConsumerGroup
    from sharding.groups.streams.group import StreamConsumerGroup
    from sharding.groups.streams.options import StreamGroupOptions

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

# What needs an extra (aio-pika, say) or much else is loaded when it is asked for.
_LOADED_LATE = {
    "AioConsumerGroup": "sharding.groups.queues.aio_group",
    "StreamConsumerGroup": "sharding.groups.streams.group",
    "StreamGroupOptions": "sharding.groups.streams.options",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_LATE:
        return getattr(import_module(_LOADED_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
