"""How fast the route cache may ask and arm, and how much at once.

Pure: every time is passed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from sharding.route_options import RouteOptions
from sharding.routes import Kind, Target

BATCH_BYTES = 48 * 1024
"""The most bytes of names in one query: far below any frame size that brokers agree on."""


class Rounds:
    """When the next round of questions about news goes out.

    The first waits for more news. The gap between rounds doubles while news go on, up to
    `gap_max`, and starts anew after a calm.
    """

    def __init__(self, wait: float, gap: float, gap_max: float) -> None:
        self.calm = 2 * gap_max
        self._wait = wait
        self._first_gap = self._gap = gap
        self._gap_max = gap_max
        self._next_at = inf
        self._last = -inf

    def next_at(self, now: float) -> float:
        """When news that come now are asked about."""
        if self._next_at == inf:
            calm = now - self._last >= self.calm
            self._gap = self._first_gap if calm else min(2 * self._gap, self._gap_max)
            self._next_at = max(now + self._wait, self._last + self._gap)
        return self._next_at

    def begin(self, now: float) -> bool:
        """Whether the round goes out now; news from here on belong to the next one."""
        if now < self._next_at:
            return False
        self._next_at = inf
        self._last = now
        return True


class Pause:
    """Nothing is asked for a while after a failure; the while doubles with each further one."""

    def __init__(self, options: RouteOptions) -> None:
        self._options = options
        self._failures = 0
        self.until = -inf

    def failed(self, now: float) -> None:
        # The exponent has a bound of its own: after a long outage the power would be no float.
        delay = self._options.retry_delay * 2 ** min(self._failures, 20)
        self.until = now + min(delay, self._options.retry_delay_max)
        self._failures += 1

    def succeeded(self) -> None:
        self._failures = 0


class ArmQueue:
    """The streams that wait to be armed, each not before its time, all together at a rate."""

    def __init__(self, options: RouteOptions) -> None:
        self._options = options
        self._waiting: list[tuple[float, str]] = []
        self._free_at = -inf

    def add(self, stream: str, not_before: float) -> None:
        heapq.heappush(self._waiting, (not_before, stream))

    def take(self, now: float) -> str | None:
        """The next stream whose time has come; the caller says with `used` if it arms it."""
        if now < self.next_at():
            return None
        return heapq.heappop(self._waiting)[1]

    def used(self, now: float) -> None:
        self._free_at = now + 1 / self._options.arms_per_second

    def pause(self, now: float) -> None:
        self._free_at = now + self._options.rearm_interval

    def next_at(self) -> float:
        return max(self._waiting[0][0], self._free_at) if self._waiting else inf


def batch(due: Sequence[Target], options: RouteOptions) -> tuple[Target, ...]:
    """What of all that is due goes into one query: streams together, super streams one by one."""
    streams = [target for target in due if target.kind is Kind.STREAM][: options.batch_names]
    if not streams:
        return tuple(due[:1])
    size = 0
    for count, target in enumerate(streams):
        size += len(target.name.encode()) + 2
        if size > BATCH_BYTES and count:
            return tuple(streams[:count])
    return tuple(streams)
