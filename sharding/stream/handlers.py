"""What a connection tells the publishers and subscriptions that share it.

Every method is called on the connection's reading thread, one at a time, and must return at once:
while it runs, nothing else is read. It must not call back into the connection and wait for an
answer, nor raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from sharding.stream.protocol import OffsetSpec

ActivityAnswer = OffsetSpec | Future[OffsetSpec]
"""Where a single active consumer goes on: at once, or when the future is settled."""


class PublisherHandler(Protocol):
    def on_confirms(self, publishing_ids: Sequence[int]) -> None:
        """The broker has stored these, in this order."""

    def on_refusals(self, refusals: Sequence[tuple[int, int]]) -> None:
        """The broker has not stored these: pairs of publishing id and code."""

    def on_lost(self, reason: Exception) -> None:
        """The connection ended, or the stream left this node. Called once, and last."""


class SubscriberHandler(Protocol):
    def on_chunk(self, chunk: memoryview) -> None:
        """A whole chunk, header included. The memory is the handler's own from now on."""

    def on_activity(self, active: bool) -> ActivityAnswer:
        """A single active consumer is made active or not; the answer is where it goes on.

        While the answer to "not" is a future that is not settled, the broker makes no other one
        active. After 60 s without an answer it closes the connection.
        """

    def on_lost(self, reason: Exception) -> None:
        """The connection ended, or the stream left this node. Called once, and last."""
