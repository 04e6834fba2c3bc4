"""Offsets that the broker keeps under a consumer's name, and when they are due to be stored.

What is stored is the offset of the last message that was dealt with, as the other clients do it;
a consumer begins at the one after.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sharding.errors import InvalidInput
from sharding.stream.errors import NoAnswerInTime
from sharding.stream.protocol.commands import QueryOffset, store_offset_frame
from sharding.stream.protocol.constants import MAX_REFERENCE_BYTES

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient

_TRY_AGAIN = 0.05  # seconds


class Reached(NamedTuple):
    """How far a partition was read in one of its tenures."""

    offset: int
    tenure: int


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


class InHand(NamedTuple):
    """What the application has, and has not come back from."""

    stream: str
    reached: Reached
    messages: int


class Progress:
    """What the application has dealt with, and what of it is not stored yet. Pure.

    What was handed out last is in the application's hands. It counts as dealt with when the
    application comes back for more, and not before: not when it fails, breaks off, or closes the
    consumer, from whatever thread or signal handler. Nothing here needs a lock: one thread hands
    out, and what others read is replaced as a whole.

    Each belongs to a tenure of its partition (`Lane.tenure`): what was dealt with in an earlier one
    is not this consumer's to store any more.

    An offset that was sent is stored only if the broker says so when it is asked: it drops what
    comes while the stream has no leader, and does not tell.
    """

    def __init__(self, every_messages: int | None, every_seconds: float | None, now: float) -> None:
        self._every_messages = every_messages
        self._every_seconds = every_seconds
        self._messages = 0
        self._since = now
        self.in_hand: InHand | None = None
        """Set only after `came_back`, or what was in hand before is forgotten."""
        self._dealt_with: dict[str, Reached] = {}
        self._sent: dict[str, Reached] = {}
        self._stored: dict[str, Reached] = {}

    def came_back(self) -> None:
        """The application wants more: it has dealt with what it had."""
        if self.in_hand is not None:
            stream, reached, messages = self.in_hand
            self.in_hand = None
            self._dealt_with[stream] = reached
            self._messages += messages

    def due(self, now: float) -> bool:
        """Whether it is time to store."""
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

    def unstored(self, *, in_hand: bool = False) -> dict[str, Reached]:
        """By stream, the offset of the last message dealt with that is not known to be stored; or,
        if the application says that it has dealt with that too, of what is in its hands."""
        reached = self._dealt_with.copy()
        held = self.in_hand
        if in_hand and held is not None:
            reached[held[0]] = held[1]
        return {
            stream: each
            for stream, each in reached.items()
            if each.offset >= 0
            and self._stored.get(stream) != each
            and not self.is_behind(stream, each)
        }

    def unsent(self) -> dict[str, Reached]:
        """What of the unstored was not sent either."""
        unstored = self.unstored().items()
        return {stream: each for stream, each in unstored if self._sent.get(stream) != each}

    def unsure(self, stream: str) -> dict[str, Reached]:
        """The last offset that was sent, unless it is known to be stored."""
        sent = self._sent.get(stream)
        return {} if sent is None or sent == self._stored.get(stream) else {stream: sent}

    def is_behind(self, stream: str, reached: Reached) -> bool:
        """Whether more was sent in the same tenure: an offset does not go back."""
        sent = self._sent.get(stream)
        return sent is not None and sent.tenure == reached.tenure and sent > reached

    def sent(self, stream: str, reached: Reached) -> None:
        self._sent[stream] = reached

    def stored(self, stream: str, reached: Reached) -> None:
        self._sent[stream] = self._stored[stream] = reached

    def forget(self, stream: str) -> None:
        """What was dealt with there is another consumer's now."""
        self._dealt_with.pop(stream, None)
        if self.in_hand is not None and self.in_hand[0] == stream:
            self.in_hand = None

    def restart(self, now: float) -> None:
        """Everything due was sent, or tried."""
        self._messages = 0
        self._since = now
