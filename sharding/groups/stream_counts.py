"""Numbers that many threads add to."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping


class Counts:
    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def all(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)
