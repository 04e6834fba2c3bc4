"""The figures of all benchmarks, kept as JSON, and written as a table and a chart of ratios.

A benchmark that is run alone replaces its own figures only. What stands in results.md below the
mark is written by people, and stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rounds import Ratio

FOLDER = Path(__file__).parent
FIGURES = FOLDER / "results.json"
TABLE = FOLDER / "results.md"
CHART = FOLDER / "ratios.png"
NOTES = "<!-- What follows is written by hand. -->"

_INTRODUCTION = """# Figures

Written by `make bench`. Brokers (three nodes) and client share the same 2 cores, which others use
too, so only ratios mean anything, and their spread says how much. All ways of a benchmark took
turns in one run; a ratio is of two ways in one round, and the table has the median of all rounds.

![The ratios, and the goals of those that have one](ratios.png)
"""


@dataclass(frozen=True)
class Figures:
    """What one benchmark found, when, and with which versions."""

    date: str
    versions: Mapping[str, str]
    ratios: tuple[Ratio, ...]


def load(path: Path = FIGURES) -> dict[str, Figures]:
    if not path.exists():
        return {}
    return {name: _figures(**found) for name, found in json.loads(path.read_text()).items()}


def _figures(date: str, versions: dict[str, str], ratios: list[dict[str, Any]]) -> Figures:
    return Figures(date, versions, tuple(map(_ratio, ratios)))


def _ratio(found: dict[str, Any]) -> Ratio:
    return Ratio(**found | {"rounds": tuple(found["rounds"])})


def save(figures: Mapping[str, Figures], path: Path = FIGURES) -> None:
    rows = {name: asdict(each) for name, each in figures.items()}
    path.write_text(json.dumps(rows, indent=1) + "\n")


def table(figures: Mapping[str, Figures]) -> str:
    """All of it in Markdown, without the notes."""
    parts = [_INTRODUCTION]
    for name, found in figures.items():
        versions = ", ".join(f"{package} {version}" for package, version in found.versions.items())
        parts.append(
            f"## {name}\n\n{found.date}, with {versions}.\n\n"
            "| this | is so many times as fast as that | median (spread) | rounds | goal |\n"
            "|---|---|---|---|---|"
        )
        parts[-1] += "".join(map(_row, found.ratios)) + "\n"
    return "\n".join(parts)


def _row(ratio: Ratio) -> str:
    low, high = ratio.spread
    goal = "" if ratio.goal is None else f"≥ {ratio.goal:g}"
    missed = " **missed**" if ratio.goal is not None and ratio.median < ratio.goal else ""
    return (
        f"\n| {ratio.ours} | {ratio.theirs} | {ratio.median:.2f} ({low:.2f}–{high:.2f}) | "
        f"{len(ratio.rounds)} | {goal}{missed} |"
    )


def write_table(figures: Mapping[str, Figures], path: Path = TABLE) -> None:
    text = path.read_text() if path.exists() else ""
    _, _, notes = text.partition(NOTES)
    path.write_text(f"{table(figures)}\n{NOTES}{notes or chr(10)}")


def draw(figures: Mapping[str, Figures], path: Path = CHART) -> None:
    """A bar for each ratio with its spread, on a scale on which twice and half are as far apart."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    ratios = [ratio for found in figures.values() for ratio in found.ratios][::-1]
    figure, axes = pyplot.subplots(figsize=(11, 1 + 0.55 * len(ratios)), layout="constrained")
    for place, ratio in enumerate(ratios):
        _draw_bar(axes, place, ratio)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(ratios)), [f"{_plain(r.ours)}\n/ {_plain(r.theirs)}" for r in ratios])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("so many times as fast; median, spread (line) and goal (red mark)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", which="both", linewidth=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_bar(axes: Any, place: int, ratio: Ratio) -> None:
    low, high = ratio.spread
    width = ratio.median - 1
    axes.barh(place, width, left=1, height=0.55, color="#4878a8")
    axes.plot([low, high], [place, place], color="#222222", linewidth=1.2)
    label = f" {ratio.median:.2f}"
    axes.text(max(high, 1), place, label, va="center", fontsize=8)
    if ratio.goal is not None:
        axes.plot([ratio.goal], [place], "|", color="#c03030", markersize=14, markeredgewidth=2)


def _plain(text: str) -> str:
    return text.replace("`", "")


def goals_missed(figures: Sequence[Figures]) -> list[Ratio]:
    return [
        ratio
        for found in figures
        for ratio in found.ratios
        if ratio.goal is not None and ratio.median < ratio.goal
    ]
