"""When to send a heartbeat, and when a silent peer counts as dead. Pure: the time is passed in.

A peer that sends nothing for two intervals is dead. We send something at least every half interval,
so that one late heartbeat does not make us dead to the peer.
"""

from __future__ import annotations

import math


class Heartbeats:
    def __init__(self, interval: float, now: float) -> None:
        """`interval` is what both sides agreed on; with 0 there are no heartbeats."""
        self.interval = interval
        self._sent = self._received = now

    def sent(self, now: float) -> None:
        self._sent = now

    def received(self, now: float) -> None:
        self._received = now

    def is_due(self, now: float) -> bool:
        return self.interval > 0 and now - self._sent >= self.interval / 2

    def is_dead(self, now: float) -> bool:
        return self.interval > 0 and now - self._received >= self.interval * 2

    def next_check(self) -> float:
        """The time when one of them may become true; infinity if there are no heartbeats."""
        if not self.interval:
            return math.inf
        return min(self._sent + self.interval / 2, self._received + self.interval * 2)
