"""Consumers of the blocking channel: spread evenly after they came, or one on every shard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sharding.errors import WarrenError
from sharding.maps.consumer_spread import Looks, better_shard
from sharding.maps.map_log import State

if TYPE_CHECKING:
    from interceptors.pika_blocking import ShardedChannel

logger = logging.getLogger("warren.channel")


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
        self._looks = Looks()

    def look_later(self) -> None:
        connection = self._owner._channel.connection
        pause = self._looks.pause(self._owner._random.random())
        if pause is not None and connection.is_open:
            connection.call_later(pause, self._count)

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
        self._looks.seen(counts, moved=target is not None)
        self.look_later()


_LOOK_AGAIN = 1.0


class ConsumeAll:
    """Keeps a consumer on each shard that answers, until the application cancels one of them.

    A shard that does not answer is left out and tried again: to consume it would close the channel,
    and all the other consumers with it.
    """

    def __init__(
        self, owner: ShardedChannel, queue: str, deliver: Callable[..., Any], auto_ack: bool
    ) -> None:
        self._owner = owner
        self._queue = queue
        self._deliver = deliver
        self._auto_ack = auto_ack
        self._consumed: dict[str, str] = {}
        self._looking = False

    def start(self) -> list[str]:
        inner = self._owner._inner
        unsubscribe = self._owner._topology.subscribe(self._on_change)
        inner._impl.add_on_close_callback(lambda *_: unsubscribe())
        inner.add_on_cancel_callback(self._on_cancel)
        self._consume(self._owner._topology.look_at(self._shards()))
        return list(self._consumed.values())

    def _shards(self) -> list[str]:
        shard_map = self._owner._topology.shard_map(self._queue)
        return [shard.name for shard in shard_map.shards] if shard_map else []

    def _consume(self, answering: Any) -> None:
        """Consume what answers and is not consumed yet; look again later for the rest."""
        channel = self._owner._channel
        if self._stopped():
            return
        missing = [shard for shard in self._shards() if shard not in self._consumed]
        for shard in missing:
            if answering.get(shard) is not None:
                self._consumed[shard] = channel.basic_consume(shard, self._deliver, self._auto_ack)
        if any(shard not in self._consumed for shard in missing):
            self._look_later()

    def _stopped(self) -> bool:
        """Whether the channel is closed, or the application has cancelled a consumer of ours."""
        channel = self._owner._channel
        if not channel.is_open:
            return True
        return any(tag not in channel.consumer_tags for tag in self._consumed.values())

    def _on_cancel(self, frame: Any) -> None:
        """The broker has cancelled a consumer: its shard was deleted, or its node is going down."""
        tag = frame.method.consumer_tag
        for shard in [name for name, known in self._consumed.items() if known == tag]:
            del self._consumed[shard]
            self._look_later()

    def _look_later(self) -> None:
        connection = self._owner._channel.connection
        if not self._looking and connection.is_open:
            self._looking = True
            connection.call_later(_LOOK_AGAIN, self._look)

    def _look(self) -> None:
        self._looking = False
        connection = self._owner._channel.connection

        def counted(counts: dict[str, int | None]) -> None:
            if connection.is_open:
                connection.add_callback_threadsafe(lambda: self._consume(counts))

        try:
            self._owner._topology.when_counted(self._shards(), counted)
        except WarrenError as error:
            logger.warning("can't look for shards of %r: %s", self._queue, error)
            self._look_later()

    def _on_change(self, _: State, new: State) -> None:
        connection = self._owner._channel.connection
        if self._queue in new.maps and connection.is_open:
            connection.add_callback_threadsafe(self._look)
