"""Spreading consumers: which shard one gets, and rebalancing after many start at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

_MOST_LOOKS = 20
_CALM_LOOKS = 3
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 0.5


def least_consumers(counts: Mapping[str, int | None], on_their_way: Counter[str]) -> str | None:
    """The shard with the fewest consumers, the first one of equals; None if none answers."""
    answering = {name: count for name, count in counts.items() if count is not None}
    return min(answering, key=lambda name: answering[name] + on_their_way[name], default=None)


def better_shard(
    mine: str, counts: Mapping[str, int | None], draw: Callable[[], float]
) -> str | None:
    """Where a consumer should move to because a herd came to its shard; None to stay.

    Clients that looked at the same moment all chose the same shard. Each moves with just the
    probability that sends the surplus away, so that they do not all move on together. `draw` gives
    random numbers from 0 to 1, such as `random.random`.
    """
    answering = {name: count for name, count in counts.items() if count is not None}
    if mine not in answering or answering[mine] - min(answering.values()) < 2:
        return None
    surplus = answering[mine] - sum(answering.values()) / len(answering)
    if draw() >= surplus / answering[mine]:
        return None
    least = min(answering.values())
    places = [name for name, count in answering.items() if count == least]
    return places[int(draw() * len(places))]


def is_even(counts: Mapping[str, int | None]) -> bool:
    """Whether no shard that answers has two consumers more than another; not if none answers."""
    answering = [count for count in counts.values() if count is not None]
    return bool(answering) and max(answering) - min(answering) < 2


class Looks:
    """How long a new consumer is looked after, to move it if a herd came with it.

    Until counts were even three times in a row, as one even count may be of a moment in which
    others are on the move; and twenty times at most.
    """

    def __init__(self) -> None:
        self._left = _MOST_LOOKS
        self._calm = 0

    def pause(self, chance: float) -> float | None:
        """Seconds until the next look, which is then taken; None when enough was seen."""
        if not self._left or self._calm == _CALM_LOOKS:
            return None
        self._left -= 1
        return _SHORTEST_PAUSE + (_LONGEST_PAUSE - _SHORTEST_PAUSE) * chance

    def seen(self, counts: Mapping[str, int | None], moved: bool) -> None:
        """What the look found, and whether the consumer moved because of it."""
        self._calm = self._calm + 1 if is_even(counts) and not moved else 0
