"""Seconds on a core: what tests and brokers cost a machine, whoever else shares it.

Time says how long something took among all that ran beside it. Where every core is busy from the
first minute to the last, only less work makes a run shorter.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from tests.cluster import folders, processes

_EVERY = 10.0


def done_here() -> float:
    """By this process and by all that it started: those that have ended, and those that run."""
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in ended) + _by_children(os.getpid())


def _by_children(pid: int) -> float:
    total = 0.0
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread or a process that has just ended
            for child in map(int, listed.read_text().split()):
                total += processes.worked(child, with_ended_children=True) + _by_children(child)
    return total


class Brokers:
    """What the clusters of a run have worked, looked at every few seconds: nodes are killed,
    and what one did since the last look is lost with it."""

    def __init__(self, prefix: str) -> None:
        """Of the clusters whose names begin so."""
        self._prefix = prefix
        self._seconds: dict[tuple[str, int, int], float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def by_cluster(self) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for (cluster, *_), seconds in list(self._seconds.items()):
            total[cluster] += seconds
        return total

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def look(self) -> None:
        top = folders.clusters_folder()
        for pid, part in processes.parts_below(top):
            cluster = part.relative_to(top).parts[0]
            if not cluster.startswith(self._prefix):
                continue
            with suppress(OSError):  # it has just ended
                who = (cluster.removeprefix(self._prefix), pid, processes.started_at(pid))
                self._seconds[who] = processes.worked(pid)

    def _run(self) -> None:
        while not self._end.wait(_EVERY):
            self.look()
