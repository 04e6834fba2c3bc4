"""Offsets that the broker keeps under a consumer's name, and when they are due to be stored.

What is stored is the offset of the last message that was dealt with, as the other clients do it;
a consumer begins at the one after. A message counts as dealt with when the application comes back
for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sharding.errors import InvalidInput
from sharding.stream.errors import NoAnswerInTime
from sharding.stream.protocol.commands import QueryOffset, store_offset_frame
from sharding.stream.protocol.constants import MAX_REFERENCE_BYTES

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient

_TRY_AGAIN = 0.05  # seconds


def stored_offset(client: StreamClient, name: str, stream: str, timeout: float) -> int | None:
    """The offset stored under `name`, or None."""
    return client.call(QueryOffset(name, stream), timeout=timeout).offset


def store_offset(client: StreamClient, name: str, stream: str, offset: int) -> None:
    """Send an offset to be stored. The broker does not answer."""
    client.send(store_offset_frame(name, stream, offset))


def store_offset_surely(
    client: StreamClient,
    name: str,
    stream: str,
    offset: int,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    *,
    exactly: bool = False,
) -> None:
    """Store an offset and return when the broker has it, or unless `exactly` a later one.

    A query on the same connection is answered after the offset was passed to the leader. One that
    is still missing then was lost on the way to a leader that moved: it is sent again.
    """
    while (left := deadline - clock()) > 0:
        store_offset(client, name, stream, offset)
        found = stored_offset(client, name, stream, left)
        if found == offset or (found is not None and found > offset and not exactly):
            return
        pause(min(_TRY_AGAIN, left))
    raise NoAnswerInTime(f"offset {offset} of {stream!r} was not seen stored as {name!r} in time")


def check_offset(name: str, offset: int) -> None:
    """Raises for what no broker may be sent: 3.10 loses the stream's leader over a long name."""
    if not 0 < len(name.encode()) <= MAX_REFERENCE_BYTES:
        raise InvalidInput("name", f"must have 1 to {MAX_REFERENCE_BYTES} bytes", name)
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < 2**63:
        raise InvalidInput("offset", "must be a whole number from 0", offset)


class Progress:
    """What the application has dealt with, and what of it is not stored yet. Pure."""

    def __init__(self, every_messages: int | None, every_seconds: float | None, now: float) -> None:
        self._every_messages = every_messages
        self._every_seconds = every_seconds
        self._messages = 0
        self._since = now
        self._next: dict[str, int] = {}
        self._stored: dict[str, int] = {}
        self._before_last: tuple[str, int | None] | None = None

    def handed_out(self, stream: str, next_offset: int, messages: int) -> None:
        self._before_last = stream, self._next.get(stream)
        self._next[stream] = next_offset
        self._messages += messages

    def take_back_last(self) -> None:
        """What was handed out last was not dealt with: the application failed at it."""
        if self._before_last is not None:
            stream, before = self._before_last
            if before is None:
                del self._next[stream]
            else:
                self._next[stream] = before
            self._before_last = None

    def due(self, now: float) -> bool:
        """Whether it is time to store; what was handed out has been dealt with."""
        if self._every_messages is not None and self._messages >= self._every_messages:
            return True
        at = self.due_at
        return at is not None and now >= at

    @property
    def due_at(self) -> float | None:
        """When to store at the latest; None if there is nothing to store by time."""
        if self._every_seconds is None or not self._messages:
            return None
        return self._since + self._every_seconds

    def unstored(self) -> dict[str, int]:
        """By stream, the offset of the last message dealt with that is not stored."""
        return {
            stream: next_offset - 1
            for stream, next_offset in self._next.items()
            if next_offset > 0 and self._stored.get(stream) != next_offset - 1
        }

    def stored(self, stream: str, offset: int) -> None:
        self._stored[stream] = offset

    def restart(self, now: float) -> None:
        """Everything due was stored, or tried."""
        self._messages = 0
        self._since = now
