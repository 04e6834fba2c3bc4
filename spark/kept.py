"""Things that are dear to make, one of each kind per process, lent to one task after another."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass
class _Entry(Generic[V]):
    value: V
    users: int = 0
    last_used: float = 0.0
    dropped: bool = False


class Kept(Generic[K, V]):
    """Makes a value at the first use of its key, and keeps it.

    * A value that failed its user with an error for which `is_dead` holds is not lent again. It is
      closed when its last user is done.
    * Beyond `most` values, or after `idle` seconds without a user, the longest unused are closed.
    * A forked child makes its own: it must neither use nor close its parent's connections.
    """

    def __init__(
        self,
        make: Callable[[K], V],
        close: Callable[[V], None],
        is_dead: Callable[[BaseException], bool],
        *,
        most: int = 8,
        idle: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        pid: Callable[[], int] = os.getpid,
    ) -> None:
        self._make = make
        self._close = close
        self._is_dead = is_dead
        self._most = most
        self._idle = idle
        self._clock = clock
        self._pid = pid
        self._begin()
        atexit.register(self.close_all)

    def __len__(self) -> int:
        return len(self._entries) if self._owner == self._pid() else 0

    @contextmanager
    def lend(self, key: K) -> Iterator[V]:
        entry = self._take(key)
        try:
            yield entry.value
        except BaseException as error:
            self._give_back(key, entry, dead=self._is_dead(error))
            raise
        else:
            self._give_back(key, entry, dead=False)

    def close_all(self) -> None:
        """Close what is kept, in use or not."""
        if self._owner != self._pid():
            return
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            entry.dropped = True
            self._close(entry.value)

    def _begin(self) -> None:
        self._owner = self._pid()
        self._lock = threading.Lock()
        self._entries: dict[K, _Entry[V]] = {}

    def _take(self, key: K) -> _Entry[V]:
        if self._owner != self._pid():
            self._begin()
        # Under the lock also while it is made: two users of a key must not make two.
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(self._make(key))
            entry.users += 1
            surplus = self._surplus()
        for unused in surplus:
            self._close(unused.value)
        return entry

    def _give_back(self, key: K, entry: _Entry[V], *, dead: bool) -> None:
        with self._lock:
            entry.users -= 1
            entry.last_used = self._clock()
            if dead and self._entries.get(key) is entry:
                del self._entries[key]
                entry.dropped = True
            to_close = entry.dropped and entry.users == 0
        if to_close:
            self._close(entry.value)

    def _surplus(self) -> list[_Entry[V]]:
        """Take out what is unused for too long, or too much."""
        unused = [(key, entry) for key, entry in self._entries.items() if entry.users == 0]
        unused.sort(key=lambda pair: pair[1].last_used)
        too_many = max(0, len(self._entries) - self._most)
        too_old = self._clock() - self._idle
        out = [
            (key, entry)
            for number, (key, entry) in enumerate(unused)
            if number < too_many or entry.last_used < too_old
        ]
        for key, _ in out:
            del self._entries[key]
        return [entry for _, entry in out]
