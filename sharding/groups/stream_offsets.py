"""The offset that a group has stored in one partition: where to go on, and how far it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from sharding.errors import WarrenError
from sharding.groups.stream_counts import Counts
from sharding.stream.consuming.consumer_options import ConsumerOptions
from sharding.stream.consuming.offset_store import (
    store_offset,
    store_offset_surely,
    stored_offset,
)
from sharding.stream.consuming.starting import start_offset
from sharding.stream.consuming.subscription import Subscription
from sharding.stream.network.client import StreamClient

logger = logging.getLogger("warren.groups")

_TIMEOUT = 5.0


class GroupOffsets:
    def __init__(
        self,
        subscription: Subscription,
        reading: ConsumerOptions,
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        self._subscription = subscription
        self._stream = subscription.stream
        self._reading = reading
        self._group = str(reading.name)
        self._counts = counts
        self._clock = clock

    def position(self, client: StreamClient, handled: int | None) -> int | None:
        """Where to read on, when this worker has `handled` so much; None: the broker can tell."""
        stored = stored_offset(client, self._group, self._stream, _TIMEOUT)
        known = [offset + 1 for offset in (stored, handled) if offset is not None]
        if known:
            return max(known)
        position = start_offset(client, self._stream, self._reading, _TIMEOUT)
        if position:
            # "next" is another place for whoever asks later, so it is settled here for all.
            self._store_surely(client, position - 1, self._clock() + _TIMEOUT)
        return position

    def store(self, offset: int) -> None:
        """Send it to be stored; one that gets lost is followed by the next."""
        with suppress(WarrenError):
            client = self._subscription.connection(self._clock())
            store_offset(client, self._group, self._stream, offset)
            self._counts.add("stores")

    def store_surely(self, offset: int, deadline: float) -> None:
        """Return when the broker has it, or with a warning at the deadline.

        Handlers may have used up the time until then; an offset has a while of its own. A new
        connection is not waited for longer than that: the partition may be another's by then.
        """
        soon = self._clock() + _TIMEOUT
        try:
            client = self._subscription.connection(soon)
            self._store_surely(client, offset, max(deadline, soon))
        except WarrenError as error:
            logger.warning("%s: offset %d was not stored: %s", self._stream, offset, error)

    def _store_surely(self, client: StreamClient, offset: int, deadline: float) -> None:
        store_offset_surely(client, self._group, self._stream, offset, deadline, self._clock)
        self._counts.add("stores")
