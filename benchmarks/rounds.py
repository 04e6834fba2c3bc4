"""Measuring several ways of doing a thing side by side, and printing ratios of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median


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
        print(f"{name}: {median(found):,.0f} messages/s (median of {rounds})")
    return speeds


def print_ratio(speeds: Mapping[str, list[float]], ours: str, theirs: str, goal: float) -> None:
    ratios = sorted(a / b for a, b in zip(speeds[ours], speeds[theirs], strict=True))
    print(
        f"Ratio, {ours} to {theirs}: {median(ratios):.2f} (median), spread {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}, {len(ratios)} rounds; goal: at least {goal:g}"
    )
