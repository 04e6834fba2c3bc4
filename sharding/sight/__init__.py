"""Sight: where the shards of a name are, what is in them, and how far its readers are."""

from sharding.sight.queues import queue_view
from sharding.sight.samples import Watched
from sharding.sight.streams import stream_view
from sharding.sight.views import GroupView, ShardState, ShardView, View

__all__ = ["GroupView", "ShardState", "ShardView", "View", "Watched", "queue_view", "stream_view"]
