"""How long to wait before something is tried again: the one back-off. Pure.

Pauses grow from `first` to `longest`. Each is made shorter by chance, by at most its fraction
`spread`, so that many clients that lost the same node do not come back at the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        try:
            grown = min(self.first * self.factor ** (failures - 1), self.longest)
        except OverflowError:  # so far beyond `longest` that no float holds it
            grown = self.longest if self.first else 0.0
        return grown * (1 - self.spread * (1 - chance))
