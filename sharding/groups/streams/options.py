"""What a consumer group over streams can be asked for, besides what every group can."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sharding.errors import InvalidInput
from sharding.groups.options import GroupOptions
from sharding.stream.options import ConsumerOptions, Offset, OnDataLoss

MAX_HANDOVER = 50.0
"""The broker closes a connection that has not answered within 60 s."""


@dataclass(frozen=True, slots=True)
class StreamGroupOptions(GroupOptions):
    """Every period is in seconds."""

    offset: Offset = "first"
    """Where a group begins in a partition for which it has stored no offset yet: as for consumers.
    With "next" and "last" a partition that is empty begins with its first message."""
    store_every_messages: int = 500
    """Store the offset after so many messages …"""
    store_every_seconds: float = 1.0
    """… or so much time, and whenever a partition is handed over. What was handled since is
    repeated after a worker was killed."""
    max_ahead: int = 10_000
    """How many messages may be begun from the first one on that is not settled: poison without dead
    letters, a handler that hangs. It bounds what is held of them here, and what is handled again
    after the worker was killed. Beyond it the partition waits, is warned of and counted. `prefetch`
    may be begun in any case."""
    handover_timeout: float = 20.0
    """When a partition goes to another worker, how long it waits for the handlers that are at work
    on it. Handlers that take longer are not waited for: their messages are handled twice, and
    their keys may be out of order."""
    follow_interval: float = 5.0
    """How often to look for partitions that were added to the super stream, or deleted."""
    credits: int = 4
    """Chunks of one partition that may wait here unopened, besides the messages of `prefetch`."""
    on_data_loss: OnDataLoss = "skip"
    """When retention deleted messages before the group has read them: "skip" goes on with a warning
    and counts it, "raise" stops the worker with `DataLost`."""

    def __post_init__(self) -> None:
        GroupOptions.__post_init__(self)  # super() does not work in a class with slots
        if not isinstance(self.max_ahead, int) or self.max_ahead < 1:
            raise InvalidInput("max_ahead", "must be a whole number from 1", self.max_ahead)
        if not 0 < self.handover_timeout <= MAX_HANDOVER:
            rule = f"must be above 0 and at most {MAX_HANDOVER:g} s: the broker waits for 60"
            raise InvalidInput("handover_timeout", rule, self.handover_timeout)
        if not self.follow_interval > 0:
            raise InvalidInput("follow_interval", "must be more than 0", self.follow_interval)
        self.reading("any")

    @property
    def longest_wait(self) -> float | None:
        """A stream's broker waits for a message as long as it takes."""
        return None

    def reading(self, group: str) -> ConsumerOptions:
        """The same for the stream client, whose rules hold too."""
        return ConsumerOptions(
            offset=self.offset,
            name=group,
            single_active=True,
            credits=self.credits,
            on_data_loss=self.on_data_loss,
            store_every_messages=self.store_every_messages,
            store_every_seconds=self.store_every_seconds,
            subscribe_timeout=self.answer_timeout,
        )


def for_streams(options: GroupOptions | None, **changes: Any) -> StreamGroupOptions:
    """Any group's options, with the defaults of streams where they say nothing."""
    given = options or GroupOptions()
    return StreamGroupOptions(
        **{field.name: getattr(given, field.name) for field in fields(given)} | changes
    )
