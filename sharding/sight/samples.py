"""What is seen, as metrics: depth, offsets and lag of every shard, asked for at a scrape."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from sharding.counting import Sample
from sharding.sight.views import ShardState, ShardView, View, ViewKind


class Watched:
    """A source for `sharding.metrics` that looks again when what it saw is older than `max_age`.

    `look` is `queue_view` or `stream_view` of a name:

        Watched(lambda: stream_view(environment, "invoices", ["audit"]))
    """

    def __init__(
        self,
        look: Callable[[], View | None],
        max_age: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._max_age = max_age
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: tuple[float, View | None] | None = None

    def samples(self) -> Iterator[Sample]:
        with self._lock:  # two scrapes at once ask once
            now = self._clock()
            if self._seen is None or now - self._seen[0] > self._max_age:
                self._seen = now, self._look()
            view = self._seen[1]
        return iter(()) if view is None else samples_of_view(view)


def samples_of_view(view: View) -> Iterator[Sample]:
    for shard in view.shards:
        yield from _of_shard(view, shard)


def _of_shard(view: View, shard: ShardView) -> Iterator[Sample]:
    labels = (("logical", view.name), ("node", shard.leader or ""), ("shard", shard.name))
    yield Sample("warren_shard_up", labels, float(shard.state is ShardState.UP))
    figures = {
        "messages": shard.messages,
        "consumers": shard.consumers,
        "first_offset": shard.first,
        "last_offset": shard.last,
    }
    for name, value in figures.items():
        if value is not None:
            yield Sample(f"warren_shard_{name}", labels, value)
    lags = {each.group: each.lag for each in shard.groups}
    if view.kind is ViewKind.QUEUE:
        lags = {"": shard.messages}  # a queue has one group by nature, and no name for it
    for group, lag in lags.items():
        if lag is not None:
            whose = (("group", group), ("logical", view.name), ("shard", shard.name))
            yield Sample("warren_shard_lag", whose, lag)
