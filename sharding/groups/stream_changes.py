"""Whose turn it is at a partition: word left by connections for the partition's thread.

A connection's reading thread must not wait, so it only notes what the broker said and goes on; the
thread answers when it has done what follows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from sharding.stream.consuming.inbox import Inbox, Lane
from sharding.stream.network.client import StreamClient
from sharding.stream.protocol import NEXT, OffsetSpec


class Begins(NamedTuple):
    """This worker's turn begins, when it has answered where."""

    client: StreamClient
    tenure: int
    give_credit: Callable[[int], None]
    answer: Future[OffsetSpec]


class Ends(NamedTuple):
    """The turn is to end; nobody else is let in before the answer."""

    answer: Future[OffsetSpec]


class Lost(NamedTuple):
    """The connection was lost, and the turn with it."""


Change = Begins | Ends | Lost


class Changes:
    """What the subscription calls (`Turns`) and the partition's thread takes."""

    def __init__(self, lane: Lane, inbox: Inbox, wake: Callable[[], None]) -> None:
        self._lane = lane
        self._inbox = inbox
        self._wake = wake
        self._lock = threading.Lock()
        self._noted: deque[Change] = deque()
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._noted)

    def next(self) -> Change | None:
        with self._lock:
            return self._noted.popleft() if self._noted else None

    def close(self) -> None:
        """Nobody will take what comes: it is answered at once.

        A question without an answer would make the broker close the connection after a minute.
        """
        with self._lock:
            self._closed = True
            left, self._noted = self._noted, deque()
        for change in left:
            if not isinstance(change, Lost):
                change.answer.set_result(NEXT)

    # On the connection's reading thread.

    def begin(self, client: StreamClient, timeout: float) -> None:
        """Nothing to prepare: an answer is looked up when the broker asks."""

    def changed(
        self, active: bool, client: StreamClient, give_credit: Callable[[int], None]
    ) -> OffsetSpec | Future[OffsetSpec]:
        self._inbox.shut(self._lane)
        answer: Future[OffsetSpec] = Future()
        change = Begins(client, self._lane.tenure, give_credit, answer) if active else Ends(answer)
        return answer if self._note(change) else NEXT

    def ended(self) -> None:
        self._inbox.shut(self._lane)
        self._note(Lost())

    def _note(self, change: Change) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._noted.append(change)
        self._wake()
        return True
