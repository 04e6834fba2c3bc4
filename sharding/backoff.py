"""How long to wait before something is tried again: the one back-off. Pure.

Pauses grow from `first` to `longest`. Each is shortened by chance, by up to the part `spread` of
it, so that many clients that lost the same node do not come back in step.
"""

from __future__ import annotations

from dataclasses import dataclass

# Long before, any pause has reached its bound; a greater power would be no float.
_LARGEST_POWER = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """
    >>> calm = Backoff(first=0.1, longest=2.0)
    >>> [calm.pause(failures, chance=1) for failures in (1, 2, 3, 10)]
    [0.1, 0.2, 0.4, 2.0]
    >>> calm.pause(3, chance=0)
    0.2
    """

    first: float
    longest: float
    factor: float = 2.0
    spread: float = 0.5

    def pause(self, failures: int, chance: float) -> float:
        """Seconds after so many failures in a row, from 1; `chance` is drawn from 0 to 1."""
        grown = self.first * self.factor ** min(failures - 1, _LARGEST_POWER)
        return min(grown, self.longest) * (1 - self.spread * (1 - chance))
