"""A new consumer of the blocking channel is looked after until consumers are spread evenly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sharding.maps.consumer_spread import better_shard, is_even

if TYPE_CHECKING:
    from interceptors.pika_blocking import ShardedChannel

logger = logging.getLogger("warren.channel")

_MOST_LOOKS = 20
_CALM_LOOKS = 3


class Settling:
    """Looks after a new consumer for a while: a herd that chose the same shard spreads out."""

    def __init__(
        self,
        owner: ShardedChannel,
        tag: str,
        shard: str,
        shards: list[str],
        consume: Callable[[str, str | None], str],
        deliver: Callable[..., Any],
    ) -> None:
        self._owner = owner
        self._tag = tag
        self._shard = shard
        self._shards = shards
        self._consume = consume
        self._deliver = deliver
        self._left = _MOST_LOOKS
        self._calm = 0

    def look_later(self) -> None:
        connection = self._owner._channel.connection
        if self._left and connection.is_open:
            self._left -= 1
            connection.call_later(self._owner._random.uniform(0.1, 0.5), self._count)

    def _count(self) -> None:
        connection = self._owner._channel.connection

        def counted(counts: dict[str, int | None]) -> None:
            if connection.is_open:
                connection.add_callback_threadsafe(lambda: self._decide(counts))

        self._owner._topology.when_counted(self._shards, counted)

    def _decide(self, counts: dict[str, int | None]) -> None:
        channel = self._owner._channel
        if not channel.is_open or self._tag not in channel.consumer_tags:
            return
        target = better_shard(self._shard, counts, self._owner._random.random)
        if target is not None:
            logger.info("moving a consumer from %r to %r, which has fewer", self._shard, target)
            undelivered = channel.basic_cancel(self._tag)
            try:
                self._consume(target, self._tag)
                self._shard = target
            finally:
                # The broker takes these for acknowledged, whatever becomes of the consumer.
                for method, properties, body in undelivered:
                    self._deliver(channel, method, properties, body)
        # One even count may be of a moment in which others are on the move.
        self._calm = self._calm + 1 if is_even(counts) else 0
        if self._calm < _CALM_LOOKS:
            self.look_later()
