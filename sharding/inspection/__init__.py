"""Where the shards of a name are, what is in them, and how far its readers are.

`views` is pure. It may import everything but `doctor` and `cli`.
"""

from __future__ import annotations

from sharding.inspection.asking import Watched, queue_view, stream_view
from sharding.inspection.views import GroupView, ShardState, ShardView, View

__all__ = ["GroupView", "ShardState", "ShardView", "View", "Watched", "queue_view", "stream_view"]
