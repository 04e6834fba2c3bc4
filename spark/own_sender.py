"""Publishes a task's own streams under the ids of `own_shards`; a replay stores nothing twice.

All of a stream's rows are sent again in a replay, also those whose ids the broker knows: it counts
an id as known before the message is safe, and confirms a duplicate only when the original is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from spark.own_rows import OwnRows
from spark.own_shards import OwnShards, check_last_id, first_id

if TYPE_CHECKING:
    from sharding.stream.producer.producer import Producer

_CLOSE_TIMEOUT = 2.0


def publish_own(
    own: OwnShards,
    rows: OwnRows,
    *,
    query: str,
    batch: int,
    open_producer: Callable[[str, str], Producer],
    timeout: float,
) -> int:
    """Publish all rows; how many there are, if every one is stored. `WouldLoseRows` comes before
    anything is published to any stream."""
    counts = rows.counts
    with ExitStack() as opened:
        producers = {}
        for shard, count in counts.items():
            stream = own.streams[shard]
            producer = open_producer(stream, query)
            opened.callback(producer.close, _CLOSE_TIMEOUT)
            check_last_id(producer.last_publishing_ids[stream], batch, count, stream)
            producers[shard] = producer
        for shard, producer in producers.items():
            next_id = first_id(batch)
            for messages in rows.ordered(shard):
                ids = range(next_id, next_id + len(messages))
                producer.send_encoded(messages, publishing_ids=ids, timeout=timeout)
                next_id = ids.stop
        stored = 0
        for producer in producers.values():
            report = producer.flush(timeout)
            report.raise_for_failures()
            stored += report.stored
    return stored
