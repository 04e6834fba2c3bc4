"""The single active consumer of a partition: when it may hand out messages, and from where.

The broker asks on the connection's reading thread, and wants an offset at once; but where to go on
is known to the broker alone, which keeps the offset that the last active consumer stored. So:

* while inactive, the stored offset is looked up now and then, to have a good answer;
* that answer is given at once, and the chunks that come wait behind the lane's shut gate;
* the offset is looked up once more, now that nobody else can move it, and the gate is opened at
  it. What is before it was dealt with by others and is dropped.

What this consumer has handed out itself it does not hand out again, whatever is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from sharding.errors import WarrenError
from sharding.stream.connections.access import Access
from sharding.stream.connections.attachments import ActivityAnswer
from sharding.stream.connections.connection import StreamClient
from sharding.stream.consumer.inbox import Inbox, Lane
from sharding.stream.consumer.offset_store import stored_offset
from sharding.stream.options import ConsumerOptions, offset_spec
from sharding.stream.protocol.constants import NEXT, OffsetSpec, OffsetType

LOOK_UP_EVERY = 5.0
_TRY_AGAIN = 0.2
_TIMEOUT = 5.0


class Turns(Protocol):
    """Who decides, for one partition, what a change of activity means."""

    def begin(self, client: StreamClient, timeout: float) -> None:
        """A subscription is about to be made: from now on the broker may ask."""

    def changed(
        self, active: bool, client: StreamClient, give_credit: Callable[[int], None]
    ) -> ActivityAnswer:
        """The broker made this consumer the active one, or not; called on the reading thread."""

    def ended(self) -> None:
        """The subscription was lost, and with it the turn to be active."""


class Activity:
    """Answers at once. Its lane is shut while another consumer is the active one."""

    def __init__(self, lane: Lane, inbox: Inbox, access: Access, options: ConsumerOptions) -> None:
        self._lane = lane
        self._inbox = inbox
        self._access = access
        self._name = str(options.name)
        self._begin = offset_spec(options.offset)
        self._stored: int | None = None

    def begin(self, client: StreamClient, timeout: float) -> None:
        """A subscription is about to be made: from now on the broker may ask."""
        self._look_up(client, timeout)
        self._look_up_later(client, self._lane.tenure)

    def changed(
        self, active: bool, client: StreamClient, give_credit: Callable[[int], None]
    ) -> OffsetSpec:
        """The broker made this consumer the active one, or not; called on the reading thread."""
        self._inbox.shut(self._lane)  # also when active: what waits is of an older turn
        tenure = self._lane.tenure
        if not active:
            self._look_up_later(client, tenure)
            return NEXT  # the broker does not look at it
        self._access.later.schedule(0, lambda: self._go_on(client, tenure, give_credit))
        position = self._position()
        return self._begin if position is None else OffsetSpec.at(position)

    def ended(self) -> None:
        """The subscription was lost, and with it the turn to be active."""
        self._inbox.shut(self._lane)

    def _look_up(self, client: StreamClient, timeout: float) -> None:
        self._stored = stored_offset(client, self._name, self._lane.stream, timeout)

    def _position(self) -> int | None:
        known = [] if self._lane.handed_out is None else [self._lane.handed_out]
        if self._stored is not None:
            known.append(self._stored + 1)
        if not known and self._begin.kind is OffsetType.OFFSET:
            return self._begin.value
        return max(known, default=None)

    def _go_on(self, client: StreamClient, tenure: int, give_credit: Callable[[int], None]) -> None:
        if self._is_over(client, tenure):
            return
        try:
            self._look_up(client, _TIMEOUT)
        except WarrenError:  # the leader may be away for a moment
            self._access.later.schedule(
                _TRY_AGAIN, lambda: self._go_on(client, tenure, give_credit)
            )
            return
        give_credit(self._inbox.open(self._lane, tenure, self._position()))

    def _look_up_later(self, client: StreamClient, tenure: int) -> None:
        self._access.later.schedule(LOOK_UP_EVERY, lambda: self._look_up_again(client, tenure))

    def _look_up_again(self, client: StreamClient, tenure: int) -> None:
        if self._is_over(client, tenure) or not self._lane.shut:
            return
        with suppress(WarrenError):  # it is asked again before it counts
            self._look_up(client, _TIMEOUT)
        self._look_up_later(client, tenure)

    def _is_over(self, client: StreamClient, tenure: int) -> bool:
        return client.closed or self._inbox.closed or self._lane.tenure != tenure
