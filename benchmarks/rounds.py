"""Measuring several ways of doing a thing side by side, and the ratios of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one way was as another, round by round."""

    ours: str
    theirs: str
    rounds: tuple[float, ...]
    goal: float | None = None

    @property
    def median(self) -> float:
        return median(self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.rounds), max(self.rounds)

    def __str__(self) -> str:
        low, high = self.spread
        goal = "" if self.goal is None else f"; goal: at least {self.goal:g}"
        return (
            f"{self.ours} / {self.theirs}: {self.median:.2f} (median), "
            f"spread {low:.2f} to {high:.2f}, {len(self.rounds)} rounds{goal}"
        )


def alternate(
    ways: Mapping[str, Callable[[], float]], rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Speeds of each way, measured in turn, so that a machine that slows down slows all."""
    speeds: dict[str, list[float]] = defaultdict(list)
    order = list(ways)
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            before()
            speeds[name].append(ways[name]())
    for name, found in speeds.items():
        print(f"{name}: {median(found):,.0f} a second (median of {rounds})")
    return speeds


def print_ratio(
    speeds: Mapping[str, list[float]], ours: str, theirs: str, goal: float | None = None
) -> Ratio:
    """The ratio of two ways, printed as well."""
    rounds = tuple(a / b for a, b in zip(speeds[ours], speeds[theirs], strict=True))
    ratio = Ratio(ours, theirs, rounds, goal)
    print(ratio)
    return ratio
