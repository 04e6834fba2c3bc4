"""Spreading consumers over shards: who goes where, and who moves when a herd came."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping


def least_consumers(counts: Mapping[str, int | None], on_their_way: Counter[str]) -> str | None:
    """The shard with the fewest consumers, the first one of equals; None if none answers."""
    answering = {name: count for name, count in counts.items() if count is not None}
    return min(answering, key=lambda name: answering[name] + on_their_way[name], default=None)


def better_shard(mine: str, counts: Mapping[str, int | None], chance: random.Random) -> str | None:
    """Where a consumer should move to because a herd came to its shard; None to stay.

    Clients that looked at the same moment all chose the same shard. Each moves with just the
    probability that sends the surplus away, so that they do not all move on together.
    """
    answering = {name: count for name, count in counts.items() if count is not None}
    if mine not in answering or answering[mine] - min(answering.values()) < 2:
        return None
    surplus = answering[mine] - sum(answering.values()) / len(answering)
    if chance.random() >= surplus / answering[mine]:
        return None
    least = min(answering.values())
    return chance.choice([name for name, count in answering.items() if count == least])


def is_even(counts: Mapping[str, int | None]) -> bool:
    """Whether no shard that answers has two consumers more than another."""
    answering = [count for count in counts.values() if count is not None]
    return not answering or max(answering) - min(answering) < 2


class Claims:
    """Consumers of this process that are on their way and in no count yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()

    def choose(self, counts: Mapping[str, int | None]) -> str | None:
        with self._lock:
            shard = least_consumers(counts, self._counter)
            if shard is not None:
                self._counter[shard] += 1
            return shard

    def settle(self, shard: str) -> None:
        """The consumer has arrived, or never will."""
        with self._lock:
            self._counter[shard] -= 1
