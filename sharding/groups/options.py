"""Every bound of a consumer group, each with a default that is meant to be kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from sharding.backoff import Backoff
from sharding.errors import InvalidInput
from sharding.maps.naming import check_name

DEAD_LETTERS_OF_GROUP = "{name}.dead"
WAIT_SHARE = 0.4
"""Of the broker's `consumer_timeout`: how long a message may wait here to be begun."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a message is tried, and how long its key waits in between (seconds).

    >>> [Retry(jitter=0).delay(tries, 0.5) for tries in (1, 2, 3, 20)]
    [0.1, 0.2, 0.4, 30.0]
    """

    attempts: int = 5
    first_delay: float = 0.1
    factor: float = 2.0
    max_delay: float = 30.0
    jitter: float = 0.2
    """Each delay is made longer or shorter by up to this part of it."""

    def __post_init__(self) -> None:
        _whole("retry.attempts", self.attempts, 1)
        _seconds("retry.first_delay", self.first_delay, 0)
        _seconds("retry.factor", self.factor, 1)
        _seconds("retry.max_delay", self.max_delay, 0)
        _seconds("retry.jitter", self.jitter, 0)
        if self.jitter > 1:
            raise InvalidInput("retry.jitter", "must be 0 to 1", self.jitter)

    def delay(self, tries: int, chance: float) -> float:
        """The pause after `tries` failures; `chance` is a random number from 0 to 1."""
        backoff = Backoff(self.first_delay, self.max_delay, self.factor, spread=0)
        return backoff.pause(tries, chance=1) * (1 + self.jitter * (2 * chance - 1))


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Every period is in seconds."""

    prefetch: int = 100
    """Messages of one shard in this worker's hands at most: the bound of its memory, and of what
    is handled again after it was killed."""
    parallelism: int = 1
    """Handlers at work at one time. Messages of one key never are at work at one time."""
    batch_size: int = 1
    """Above 1 the handler gets a list of up to so many."""
    batch_wait: float = 0.1
    """How long messages wait for a batch to fill."""
    retry: Retry = field(default_factory=Retry)
    dead_letter: str | None = DEAD_LETTERS_OF_GROUP
    """The queue or stream for what failed for the last time; `{name}` stands for the logical name.
    It is made when first needed; one that exists is used as it is. None: nothing is ever given up,
    the last delay is used without end and the key waits, because dropping it would be a loss and
    handing it to another worker would only start the attempts again."""
    handler_timeout: float | None = None
    """A handler that takes longer is counted as hanging, its message is a dead letter, and its
    thread is replaced; Python can't end it. None: handlers may take as long as they like, and a
    shard is not given to another worker before they end."""
    consumer_timeout: float | None = 1800.0
    """The broker's `consumer_timeout`, which no API tells; this is its default. A broker (classic
    queues up to RabbitMQ 4.2) closes the channel of a consumer that has had a message for longer,
    begun or not, and the shard is lost in the middle of whatever runs. So before messages have
    waited here for half of it, the shard is taken again: what runs is finished, the rest goes back
    to its place, and the time begins again. None: the broker has none. Streams know no such
    time."""
    max_lost_threads: int = 8
    """How many hanging threads are tolerated; one more, and the worker stops with an error."""
    stop_timeout: float = 30.0
    """How long stop() lets handlers finish."""
    heartbeat: int = 5
    """A worker whose machine is gone or frozen has lost its shards after two to three of these
    (the broker's rule); one that was killed, at once. A worker that heard nothing from the broker
    for one of these begins no message."""
    announce_interval: float = 1.0
    """How often a worker tells the others what it holds, besides at each change."""
    member_timeout: float = 3.0
    """A worker not heard of for so long counts as gone; the others try to take its shards."""
    settle_time: float = 0.5
    """How long a new worker listens before it takes its first shard."""
    take_interval: float = 1.0
    """How often a shard that could not be taken is tried again."""
    connect_timeout: float = 5.0
    answer_timeout: float = 5.0
    """How long the broker may take to answer one question."""

    def __post_init__(self) -> None:
        for name, least in {
            "prefetch": 1,
            "parallelism": 1,
            "batch_size": 1,
            "max_lost_threads": 0,
            "heartbeat": 1,
        }.items():
            _whole(name, getattr(self, name), least)
        for name in ("batch_wait", "stop_timeout", "settle_time"):
            _seconds(name, getattr(self, name), 0)
        for name in (
            "announce_interval",
            "member_timeout",
            "take_interval",
            "connect_timeout",
            "answer_timeout",
        ):
            _seconds(name, getattr(self, name), 0.01)
        if self.handler_timeout is not None:
            _seconds("handler_timeout", self.handler_timeout, 0.001)
        if self.consumer_timeout is not None:
            _seconds("consumer_timeout", self.consumer_timeout, 0.1)
        if not isinstance(self.retry, Retry):
            raise InvalidInput("retry", "must be a Retry", self.retry)
        if self.prefetch > 65535:
            raise InvalidInput("prefetch", "must be at most 65535, AMQP's limit", self.prefetch)
        if self.batch_size > self.prefetch:
            raise InvalidInput(
                "batch_size", f"must be at most prefetch ({self.prefetch})", self.batch_size
            )
        if self.member_timeout <= self.announce_interval:
            raise InvalidInput(
                "member_timeout",
                f"must be more than announce_interval ({self.announce_interval:g} s)",
                self.member_timeout,
            )
        if self.dead_letter is not None:
            check_name("dead_letter", self.dead_letter)

    @property
    def longest_wait(self) -> float | None:
        """A message that is in hand for so long is not begun any more: its shard is taken again."""
        return None if self.consumer_timeout is None else self.consumer_timeout * WAIT_SHARE

    @property
    def silence_bound(self) -> float:
        """A broker that answers nothing for so long is left; it gives up a client as late."""
        return 3.0 * self.heartbeat

    def dead_letters_of(self, name: str) -> str | None:
        """Where the dead letters of this logical queue or stream go."""
        if self.dead_letter is None:
            return None
        return check_name("dead_letter", self.dead_letter.replace("{name}", name))


def _whole(field_name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInput(field_name, f"must be a whole number from {least}", value)


def _seconds(field_name: str, value: Any, least: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least:
        raise InvalidInput(field_name, f"must be a number from {least:g}", value)
