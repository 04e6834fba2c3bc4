"""Consumer groups: any number of workers share all shards of a logical queue or a super stream."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sharding.groups.delivery import BatchFailed, Delivery, GroupFailed
from sharding.groups.options import GroupOptions, Retry
from sharding.groups.queue_group import ConsumerGroup

if TYPE_CHECKING:
    from sharding.groups.aio_group import AioConsumerGroup
    from sharding.groups.stream_group import StreamConsumerGroup
    from sharding.groups.stream_options import StreamGroupOptions

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
    "AioConsumerGroup": "sharding.groups.aio_group",
    "StreamConsumerGroup": "sharding.groups.stream_group",
    "StreamGroupOptions": "sharding.groups.stream_options",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_LATE:
        return getattr(import_module(_LOADED_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
