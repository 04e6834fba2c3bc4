"""Opens a partition's publisher again after a loss, on the environment's threads."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sharding.backoff import Backoff
from sharding.errors import InvalidInput, LocalError, TryLater
from sharding.stream.connections.background import Recovery
from sharding.stream.errors import StreamNotFound
from sharding.stream.producer.publishing import Listener, Publishers, Publishing

logger = logging.getLogger("warren.stream.producer")

_TRY_TIMEOUT = 15.0  # for one try to open a publisher
_END_TIMEOUT = 5.0


@dataclass
class Reconnecting:
    """One partition's outages. `opened` and `failed` tell its writer how one went on."""

    stream: str
    publishers: Publishers
    recovery: Recovery
    listener: Listener
    opened: Callable[[Publishing], bool]
    """Returns whether the publisher is wanted."""
    failed: Callable[[Exception], None]
    is_wanted: Callable[[], bool]
    clock: Callable[[], float]
    rng: random.Random
    recovery_timeout: float
    outage: Outage | None = None
    recoveries: int = 0
    longest: float = 0.0
    """Seconds from a loss to the next confirm."""

    def begin(self) -> None:
        """A publisher was lost. One that is lost before its first confirm prolongs nothing."""
        if self.outage is None:
            now = self.clock()
            self.outage = Outage(now, now + self.recovery_timeout)

    def end(self) -> None:
        """Publishing works again."""
        if self.outage is not None:
            seconds = self.clock() - self.outage.since
            self.outage = None
            self.recoveries += 1
            self.longest = max(self.longest, seconds)
            logger.info("%r can be published to again, after %.1f s", self.stream, seconds)

    def start(self, reason: Exception, left_over: Publishing | None) -> None:
        """Try in the background; a publisher that is still declared is ended first.

        At once, unless this outage has seen a publisher already, which was lost without a confirm.
        """
        if self.outage is None:
            return
        self.outage.losses += 1
        pause: float | None = 0
        if self.outage.losses > 1:
            pause = self.outage.pause_after(reason, self.clock(), self.rng)
        if pause is None:
            self.failed(reason)
        # Even then, to end what is left over.
        self._schedule(pause or 0, partial(self._try, reason, left_over))

    def _schedule(self, delay: float, job: Callable[[], None]) -> None:
        if self.recovery.schedule(delay, job).cancelled:
            self.failed(LocalError("the environment is closed"))

    def _try(self, reason: Exception, left_over: Publishing | None = None) -> None:
        if left_over is not None:
            left_over.end(_END_TIMEOUT)
        outage = self.outage
        if outage is None or not self.is_wanted():
            return
        self.publishers.suspect(self.stream, reason)
        deadline = min(outage.deadline, self.clock() + _TRY_TIMEOUT)
        try:
            publishing = self.publishers.open(self.stream, self.listener, deadline)
        except Exception as error:
            pause = outage.pause_after(error, self.clock(), self.rng)
            if pause is None:
                self.failed(error)
            else:
                logger.debug("%r can't be published to yet: %s", self.stream, error)
                self._schedule(pause, partial(self._try, error))
            return
        if not self.opened(publishing):
            publishing.end(_END_TIMEOUT)


_BACKOFF = Backoff(first=0.1, longest=2.0)
NOT_FOUND_TRIES = 3
"""So often in a row must a stream be missing: a node that has just started may not know it yet."""


@dataclass
class Outage:
    """From the loss of a publisher to the first confirm after it."""

    since: float
    deadline: float
    losses: int = 0
    tries: int = 0
    not_found: int = 0

    def pause_after(self, error: Exception, now: float, rng: random.Random) -> float | None:
        """How long to wait before the next try; None: give up.

        Everything is tried again but what will not change by waiting. A refused login is: nodes
        that are starting or stopping were seen to answer so.
        """
        self.not_found = self.not_found + 1 if isinstance(error, StreamNotFound) else 0
        hopeless = isinstance(error, LocalError | InvalidInput) and not isinstance(error, TryLater)
        if hopeless or self.not_found >= NOT_FOUND_TRIES or now >= self.deadline:
            return None
        self.tries += 1
        return min(_BACKOFF.pause(self.tries, rng.random()), max(0.0, self.deadline - now))
