"""Drop-in wrappers for pika and aio-pika channels that behave as the sharding plugin does."""

from interceptors.pika_blocking import ShardedChannel
from interceptors.plan import Placement

__all__ = ["Placement", "ShardedChannel"]
