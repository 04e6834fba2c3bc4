"""How long to try for a node behind a load balancer, and from when on another one will do.

A balancer can't be told which node to connect to; the node says who it is once a connection stands.
Balancers deal connections out in turn, at random, or to who has least to do, so how many tries are
reasonable depends on how many nodes were seen to be behind it:

* `tries_per_node` times the nodes seen, then the search ends;
* for each `PATIENCE` times the nodes seen, the next best candidate is good enough too. A consumer
  gets its first choice from a balancer that deals in turn, and does not wait long for a node that
  is down;
* the first tries follow at once, as many as there are nodes and one more; from then on there are
  pauses that double.

Pure: no clock, no connection.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from sharding.stream.protocol import Broker

PATIENCE = 2
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 0.5


@dataclass(slots=True)
class Tries:
    """What came of the tries of one search so far."""

    per_node: int
    seen: Counter[Broker] = field(default_factory=Counter)
    failures: int = 0
    """Tries that reached no node at all."""

    @property
    def count(self) -> int:
        return self.seen.total() + self.failures

    @property
    def are_used_up(self) -> bool:
        return self.count >= self.per_node * self._nodes

    @property
    def good_enough(self) -> int:
        """How many of the candidates, the best first, are accepted now."""
        return 1 + self.count // (PATIENCE * self._nodes + 1)

    def pause(self, rng: random.Random) -> float:
        """How long to wait before the next try."""
        over = self.count - self._nodes - 1
        if over < 0 and not self.failures:
            return 0.0
        longest = min(FIRST_PAUSE * 2.0 ** min(max(over, 0), 20), LONGEST_PAUSE)
        # Many clients that lost the same node should not come back in step.
        return longest * rng.uniform(0.5, 1)

    @property
    def _nodes(self) -> int:
        return max(1, len(self.seen))
