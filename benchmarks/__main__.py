"""Runs the benchmarks, all or those named, and writes what they found: `make bench`.

python -m benchmarks               all
python -m benchmarks streams       this one; the figures of the others stay as they are
python -m benchmarks --render      none; the table and the chart are written again
"""

from __future__ import annotations

import argparse
import importlib
import platform
from datetime import UTC, datetime
from importlib.metadata import version

from benchmarks.report import Figures, draw, goals_missed, load, save, write_table
from tests.cluster import DEFAULT_VERSION

# In the order of the table: what it is about, its module, and the packages whose speed shows.
BENCHMARKS = {
    "Slots": ("slots", ("mmh3",)),
    "Wrapped channel": ("channel", ("pika",)),
    "Publisher": ("publisher", ("pika",)),
    "Streams": ("streams", ("rstream", "pyarrow", "cramjam")),
    "Spark": ("spark", ("pyspark", "pyarrow", "pika")),
}


def main() -> None:
    modules = {module: name for name, (module, _) in BENCHMARKS.items()}
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(modules))
    parser.add_argument("--render", action="store_true", help="run none, write the table again")
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(modules):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(modules)}")
    if not asked.render:
        for module in asked.names or modules:
            run(modules[module])
    figures = load()
    write_table(figures)
    draw(figures)
    for ratio in goals_missed(list(figures.values())):
        print(f"Missed: {ratio}")


def run(name: str) -> None:
    """Run one, and keep its figures at once: the next may be interrupted."""
    module, packages = BENCHMARKS[name]
    print(f"== {name}", flush=True)
    ratios = importlib.import_module(f"benchmarks.{module}").main()
    versions = {
        "RabbitMQ": DEFAULT_VERSION,
        "Python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
    found = load() | {name: Figures(f"{datetime.now(UTC):%Y-%m-%d}", versions, tuple(ratios))}
    save({each: found[each] for each in BENCHMARKS if each in found})


if __name__ == "__main__":
    main()
