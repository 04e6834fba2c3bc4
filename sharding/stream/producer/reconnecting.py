"""Opens a partition's publisher again after a loss, on the environment's threads.

The first time at once. A publisher that is lost in its turn before it has shown that it works, by a
confirm or by standing for some seconds, is not: the pauses go on growing, whether there is anything
to publish or not. But only who has messages to be confirmed gives up after `recovery_timeout`.
Time in which the node takes no publishers, as under a disk alarm, does not count: alarms last until
somebody has made room, and what waits for that is bounded by the producer's buffers.

`begin`, `end` and `rest` are called with the writer's lock, the others without it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sharding.backoff import Backoff
from sharding.errors import LocalError, TryLater
from sharding.stream.connections.background import Recovery
from sharding.stream.errors import PublishersBlocked, StreamNotFound
from sharding.stream.producer.publishing import Listener, Publishers, Publishing

logger = logging.getLogger("warren.stream.producer")

_TRY_TIMEOUT = 15.0  # for one try to open a publisher
_ELECTION = 1.0
"""A stream that has no leader for longer is tried again: while it is waited for, nobody else on
these few threads is."""
STEADY = 10.0
"""A publisher that stood for so many seconds with nothing to be confirmed works."""


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
    losses: int = 0
    """Publishers that were lost in a row before they had shown that they work, and the one that
    was lost last."""
    recoveries: int = 0
    longest: float = 0.0
    """Seconds from a loss to the next confirm, or to a publisher that has nothing to confirm."""
    _resting_since: float | None = None

    def begin(self) -> None:
        """A publisher was lost. One that is lost before its first confirm prolongs nothing."""
        if self.outage is None:
            now = self.clock()
            if self._resting_since is not None and now - self._resting_since >= STEADY:
                self.losses = 0
            self.outage = Outage(now, now + self.recovery_timeout, tries=self.losses)

    def end(self) -> None:
        """There was a confirm: publishing works again."""
        self.losses = 0
        self._over()

    def rest(self) -> None:
        """There is a publisher again, and nothing to be confirmed."""
        if self.outage is not None:
            self._resting_since = self.clock()
            self._over()

    def _over(self) -> None:
        if self.outage is not None:
            seconds = self.clock() - self.outage.since
            self.outage = None
            self.recoveries += 1
            self.longest = max(self.longest, seconds)
            logger.info("%r can be published to again, after %.1f s", self.stream, seconds)

    def start(self, reason: Exception, left_over: Publishing | None) -> None:
        """Try in the background; a publisher that is still declared is ended first."""
        if self.outage is None:
            return
        self.losses += 1
        pause: float | None = 0
        if self.losses > 1:
            pause = self.outage.pause_after(reason, self.clock(), self.rng)
        if pause is None:
            self.failed(reason)
            if left_over is None:
                return
        self._schedule(pause or 0, partial(self._try, reason, left_over))

    def _schedule(self, delay: float, job: Callable[[], None]) -> None:
        if self.recovery.schedule(delay, job).cancelled:
            self.failed(LocalError("the environment is closed"))

    def _try(self, reason: Exception, left_over: Publishing | None = None) -> None:
        if left_over is not None:
            left_over.end()
        outage = self.outage
        if outage is None or not self.is_wanted():
            return
        deadline = min(outage.deadline, self.clock() + _TRY_TIMEOUT)
        try:
            self.publishers.suspect(self.stream, reason)
            publishing = self.publishers.open(
                self.stream, self.listener, deadline, election=_ELECTION
            )
        except Exception as error:
            if isinstance(error, PublishersBlocked):
                outage.deadline = self.clock() + self.recovery_timeout
                if not outage.was_blocked:
                    outage.was_blocked = True
                    logger.warning("%r waits until it can be published to: %s", self.stream, error)
            pause = outage.pause_after(error, self.clock(), self.rng)
            if pause is None:
                self.failed(error)
            else:
                logger.debug("%r can't be published to yet: %s", self.stream, error)
                self._schedule(pause, partial(self._try, error))
            return
        if not self.opened(publishing):
            publishing.end()


_BACKOFF = Backoff(first=0.1, longest=2.0)
NOT_FOUND_TRIES = 3
"""So often in a row a stream must be missing: a node that has just started may not know it yet."""


@dataclass
class Outage:
    """From the loss of a publisher to the next one that works, or has nothing to do."""

    since: float
    deadline: float
    tries: int = 0
    not_found: int = 0
    was_blocked: bool = False

    def pause_after(self, error: Exception, now: float, rng: random.Random) -> float | None:
        """How long to wait before the next try; None: give up.

        Everything is tried again but what will not change by waiting. A refused login is tried
        again too: nodes that are starting or stopping were seen to answer so.
        """
        self.not_found = self.not_found + 1 if isinstance(error, StreamNotFound) else 0
        hopeless = isinstance(error, LocalError) and not isinstance(error, TryLater)
        if hopeless or self.not_found >= NOT_FOUND_TRIES or now >= self.deadline:
            return None
        self.tries += 1
        return min(_BACKOFF.pause(self.tries, rng.random()), max(0.0, self.deadline - now))
