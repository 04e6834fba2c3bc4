"""How much of the machine, or of the share that a container gave us, is in use.

Read from Linux' `/proc` and, where there is one, from the control group (version 2; of version 1
the memory). Elsewhere nothing is known, and nothing is in the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MIN_WINDOW = 0.5
"""CPU is measured over this many seconds at least; asked again sooner, the answer is the same."""
MAX_WINDOW = 30.0
"""A measurement that began longer ago says nothing about now, so a new one is begun."""


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU time used, of the CPU time there was, both since some moment; in any one unit."""

    used: float
    available: float


class Pressure:
    """Call it for the fullest of memory and CPU, 0 to 1. Reads a few small files, at most twice a
    second. `root` is where `/proc` and `/sys` are."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._read_at = clock()
        self._before = self._cpu_times()
        self._last = self._memory()

    def __call__(self) -> float:
        now = self._clock()
        window = now - self._read_at
        if window < MIN_WINDOW:
            return self._last
        before, self._before, self._read_at = self._before, self._cpu_times(), now
        used = [self._memory()]
        if window <= MAX_WINDOW:
            used += [
                _share(after.used - earlier.used, after.available - earlier.available)
                for earlier, after in zip(before, self._before, strict=False)
            ]
        self._last = max(used)
        return self._last

    def _memory(self) -> float:
        return max(self._machine_memory(), self._group_memory())

    def _machine_memory(self) -> float:
        sizes = self._table("proc/meminfo")
        total = sizes.get("MemTotal:", 0)
        return _share(total - sizes.get("MemAvailable:", total), total)

    def _group_memory(self) -> float:
        for folder, used, limit, cache in (
            (self._group(), "memory.current", "memory.max", "inactive_file"),
            (
                self._root / "sys/fs/cgroup/memory",
                "memory.usage_in_bytes",
                "memory.limit_in_bytes",
                "total_inactive_file",
            ),
        ):
            taken, most = _number(folder / used), _number(folder / limit)
            if taken is not None and most is not None:
                # Cached files count as used, and are given up as soon as memory is wanted.
                freed = self._table(str((folder / "memory.stat").relative_to(self._root)))
                return _share(taken - freed.get(cache, 0), most)
        return 0.0

    def _cpu_times(self) -> list[CpuTime]:
        """Of the machine, and of the group if it has a limit."""
        times = []
        for line in _text(self._root / "proc/stat").splitlines()[:1]:
            parts = [int(part) for part in line.split()[1:9]]
            if len(parts) >= 5:
                idle = parts[3] + parts[4]  # idle, and waiting for a disk
                times.append(CpuTime(sum(parts) - idle, sum(parts)))
        quota = _text(self._group() / "cpu.max").split()
        stat = self._table(str((self._group() / "cpu.stat").relative_to(self._root)))
        if len(quota) == 2 and quota[0].isdigit() and "usage_usec" in stat:
            cpus = int(quota[0]) / int(quota[1])
            times.append(CpuTime(stat["usage_usec"], self._clock() * 1e6 * cpus))
        return times

    def _group(self) -> Path:
        mounted = self._root / "sys/fs/cgroup"
        for line in _text(self._root / "proc/self/cgroup").splitlines():
            if line.startswith("0::/"):
                own = mounted / line[len("0::/") :]
                return own if own.is_dir() else mounted
        return mounted

    def _table(self, path: str) -> dict[str, int]:
        rows = (line.split() for line in _text(self._root / path).splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
