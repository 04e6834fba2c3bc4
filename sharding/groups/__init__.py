"""Consumer groups: any number of workers share all shards of a logical queue or a super stream."""

from sharding.groups.delivery import BatchFailed, Delivery, GroupFailed
from sharding.groups.options import GroupOptions, Retry
from sharding.groups.queue_group import ConsumerGroup

__all__ = ["BatchFailed", "ConsumerGroup", "Delivery", "GroupFailed", "GroupOptions", "Retry"]
