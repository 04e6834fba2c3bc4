"""The single active consumer of a partition: when it may hand out messages, and from where.

The broker asks, and waits for the answer: up to 60 s, in which nobody else is made active. So what
has to be done first is done first, on a thread that may wait:

* *Yours*: where to go on is asked of the broker now (`starting`), since only now nobody else can
  move it; then the gate is opened there, and the answer says the same place.
* *Not yours*: nothing more is handed out from here on. What the application has dealt with is
  stored if the consumer stores by itself, and only then is the answer given. What is in the
  application's hands comes to the next one again.
* A connection that is lost ends the turn unasked; nothing is stored after that.

A question may be followed by the next before it is answered. The broker starts a consumer at
whatever it is answered while it takes that one for the active one, also if the answer belongs to an
older question. So an answer that is too late never names a place that is too far (`_not_too_far`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Protocol

from sharding.errors import OutcomeUnknown, WarrenError, is_retryable
from sharding.stream.connections.access import Access
from sharding.stream.connections.attachments import ActivityAnswer
from sharding.stream.connections.connection import StreamClient
from sharding.stream.consumer.inbox import Inbox, Lane
from sharding.stream.consumer.starting import (
    is_moving,
    note_stored,
    turn_offset,
    was_stored,
    witness_before,
)
from sharding.stream.options import ConsumerOptions, offset_spec
from sharding.stream.protocol.constants import FIRST, NEXT, OffsetSpec

logger = logging.getLogger("warren.stream.consumer")

_TRY_AGAIN = 0.2
_TIMEOUT = 5.0

StepDown = Callable[[Lane, int, StreamClient, float], None]
"""Stores what was dealt with in a lane's tenure, over this connection, within so many seconds."""


class Turns(Protocol):
    """Who decides, for one partition, what a change of activity means."""

    def changed(
        self, active: bool, client: StreamClient, give_credit: Callable[[int], None]
    ) -> ActivityAnswer:
        """The broker made this consumer the active one, or not; called on the reading thread."""

    def ended(self) -> None:
        """The subscription was lost, and with it the turn to be active."""


class Activity:
    """Answers when it knows. Its lane is shut while another consumer is the active one."""

    def __init__(
        self,
        lane: Lane,
        inbox: Inbox,
        access: Access,
        options: ConsumerOptions,
        on_step_down: StepDown | None = None,
    ) -> None:
        self._lane = lane
        self._inbox = inbox
        self._access = access
        self._options = options
        self._on_step_down = on_step_down
        self._asked: Future[OffsetSpec] = Future()
        """The answer to the last question."""

    def changed(
        self, active: bool, client: StreamClient, give_credit: Callable[[int], None]
    ) -> ActivityAnswer:
        """The broker made this consumer the active one, or not; called on the reading thread."""
        tenure, was_open = self._lane.tenure, not self._lane.shut
        self._inbox.shut(self._lane)  # also when active: what waits is of an older turn
        _settle(self._asked, _not_too_far(self._lane))
        answer = self._asked = Future()
        if active:
            now = self._lane.tenure
            self._later(0, lambda: self._go_on(client, now, give_credit, answer), answer)
        elif was_open and self._on_step_down is not None:
            self._later(0, lambda: self._step_down(client, tenure, answer), answer)
        else:
            return NEXT  # the broker does not look at it
        return answer

    def ended(self) -> None:
        """The subscription was lost, and with it the turn to be active."""
        self._inbox.shut(self._lane)

    def _later(self, delay: float, job: Callable[[], None], answer: Future[OffsetSpec]) -> None:
        if self._access.later.schedule(delay, job).cancelled:
            _settle(answer, NEXT)  # the environment is being closed

    def _go_on(
        self,
        client: StreamClient,
        tenure: int,
        give_credit: Callable[[int], None],
        answer: Future[OffsetSpec],
    ) -> None:
        lane, stream = self._lane, self._lane.stream
        if client.closed or self._inbox.closed or lane.tenure != tenure:
            _settle(answer, _not_too_far(lane))
            return
        try:
            options, own = self._options, lane.handed_out
            name, clock = str(options.name), self._access.clock
            place = turn_offset(
                *(client, stream, options, own, self._access, _TIMEOUT),
                lambda: was_stored(client, name, stream, _TIMEOUT),
            )
            if is_moving(options):  # the place is stored
                note_stored(client, name, stream, clock() + _TIMEOUT, clock)
            lane.witness = witness_before(
                client, stream, place, lane.witness, self._access, _TIMEOUT
            )
        except WarrenError as error:
            if is_retryable(error) or isinstance(error, OutcomeUnknown):
                # The leader may be away for a moment.
                again = lambda: self._go_on(client, tenure, give_credit, answer)  # noqa: E731
                self._later(_TRY_AGAIN, again, answer)
                return
            self._inbox.fail(error)
            _settle(answer, NEXT)
            return
        owed = self._inbox.open(lane, tenure, place)
        _settle(answer, offset_spec(options.offset) if place is None else OffsetSpec.at(place))
        give_credit(owed)

    def _step_down(self, client: StreamClient, tenure: int, answer: Future[OffsetSpec]) -> None:
        assert self._on_step_down is not None
        try:
            self._on_step_down(self._lane, tenure, client, _TIMEOUT)
        except WarrenError as error:
            # Who takes over repeats what was dealt with since the last offset was stored.
            logger.info("%s: stepped down, no offset stored: %s", self._lane.stream, error)
        finally:
            _settle(answer, NEXT)  # the broker does not look at it


def _settle(answer: Future[OffsetSpec], place: OffsetSpec) -> None:
    """Give an answer, unless there was one."""
    with suppress(InvalidStateError):
        answer.set_result(place)


def _not_too_far(lane: Lane) -> OffsetSpec:
    """A place that is not after the one where the lane goes on if its turn comes."""
    own = lane.handed_out
    return FIRST if own is None else OffsetSpec.at(own)
