"""How long to go on trying to publish to a partition that was lost: pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sharding.errors import InvalidInput, LocalError, TryLater
from sharding.stream.errors import StreamNotFound

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
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
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * (1 << min(self.tries, 10)))
        self.tries += 1
        # Partitions that were lost together should not come back together.
        return min(pause * rng.uniform(0.5, 1), max(0.0, self.deadline - now))
