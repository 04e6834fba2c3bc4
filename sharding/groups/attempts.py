"""Which shards a worker may try to take now, and what came of the last attempts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

REFUSALS_WORTH_A_WARNING = 30


class Attempts:
    """Attempts at one shard keep an interval between them. One that did not answer counts as away
    until the next attempt is due; one that nobody took for long may be taken by anybody.
    """

    def __init__(self, interval: float, patience: float) -> None:
        self._interval = interval
        self._patience = patience
        self._not_before: dict[str, float] = {}
        self._away: set[str] = set()
        self._refusals: Counter[str] = Counter()
        self._free_since: dict[str, float] = {}

    def begin(self, shard: str, now: float) -> None:
        self._not_before[shard] = now + self._interval
        self._away.discard(shard)

    def is_due(self, shard: str, now: float) -> bool:
        return now >= self._not_before.get(shard, now)

    def is_away(self, shard: str, now: float) -> bool:
        return shard in self._away and not self.is_due(shard, now)

    def taken(self, shard: str) -> None:
        self._not_before.pop(shard, None)
        self._refusals.pop(shard, None)

    def not_answered(self, shard: str) -> None:
        self._away.add(shard)

    def refused(self, shard: str) -> bool:
        """Somebody else has it; whether that has gone on for so long that it should be said."""
        self._refusals[shard] += 1
        return self._refusals[shard] == REFUSALS_WORTH_A_WARNING

    def overdue(self, free: Iterable[str], now: float) -> list[str]:
        """Of the shards that nobody holds, those that whoever should take them does not take."""
        self._free_since = {shard: self._free_since.get(shard, now) for shard in free}
        return [shard for shard, since in self._free_since.items() if now - since > self._patience]
