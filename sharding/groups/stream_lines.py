"""The lines in which a worker stands: one for each partition, all in the same order.

A worker whose connection was lost is at the end of some lines when it is back, and in its old
place in the others; one that found a new partition stands there by chance. Everything works so, but
loads may be uneven. So a while after the last such disturbance it leaves all its lines and joins
them again, one by one and alone (`stream_door`): then it is the last in each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from sharding.errors import WarrenError
from sharding.groups.stream_door import door
from sharding.groups.stream_partition import PartitionReader, Shared, passes
from sharding.stream.errors import StreamNotFound

logger = logging.getLogger("warren.groups")

SETTLE = 3.0
"""Seconds of quiet before lines are joined again, and up to twice as many: workers that were
disturbed together should not all come together."""
_DOOR_TIMEOUT = 20.0
_JOIN_TIMEOUT = 15.0


class Lines:
    """One reader for each partition. One thread at a time may call."""

    def __init__(self, shared: Shared, group: str) -> None:
        self._shared = shared
        self._group = group
        self._clock = shared.access.clock
        self._readers: dict[str, PartitionReader] = {}
        self._recoveries = 0
        self.again_at: float | None = None
        """When to join all lines again; None while they are in order."""

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(stream for stream, each in list(self._readers.items()) if each.active)

    def __len__(self) -> int:
        return len(self._readers)

    def follow(self, streams: Sequence[str]) -> None:
        """Stand in line for these partitions and no others. Raises what trying again won't mend."""
        for stream in [each for each in self._readers if each not in streams]:
            logger.info("%s: is no partition any more", stream)
            self._leave(stream)
        self._bury_dead()
        missing = [stream for stream in streams if stream not in self._readers]
        if missing and not self._readers:
            self._join_all(streams, patiently=True)
            return
        for stream in missing:
            self._join(stream)
        recoveries = sum(reader.recoveries for reader in self._readers.values())
        if missing or recoveries != self._recoveries:
            self._recoveries = recoveries
            self._disturbed(streams)
        if self.again_at is not None and self._clock() >= self.again_at:
            self._join_all(streams, patiently=False)

    def leave_all(self, deadline: float) -> None:
        """Hand over every partition, all at the same time."""
        readers = list(self._readers.values())
        for reader in readers:
            reader.stop(deadline)
        for reader in readers:
            reader.join(deadline + 1)
        self._readers.clear()

    def _join_all(self, streams: Sequence[str], *, patiently: bool) -> None:
        """Join every line anew, alone; if that can't be, `patiently` does it all the same."""
        self.again_at = None
        with ExitStack() as inside:
            alone = len(streams) == 1 or self._go_in(inside, streams[0])
            if not alone:
                self._disturbed(streams)
                if not patiently:
                    return
            logger.info("joining %d lines%s", len(streams), "" if alone else ", not alone")
            errors = []
            for stream in streams:
                handled = self._leave(stream)
                error = self._join(stream, handled)
                errors += [error] if error is not None else []
            if errors and len(errors) == len(streams):
                raise errors[0]
        self._recoveries = 0

    def _go_in(self, inside: ExitStack, stream: str) -> bool:
        access = self._shared.access
        try:
            return inside.enter_context(door(access, stream, self._group, _DOOR_TIMEOUT))
        except WarrenError as error:
            if not passes(error):
                raise
            logger.info("the door at %s can't be used now: %s", stream, error)
            return False

    def _join(self, stream: str, handled: int | None = None) -> WarrenError | None:
        reader = PartitionReader(stream, self._shared, handled)
        try:
            reader.open(self._clock() + _JOIN_TIMEOUT)
        except WarrenError as error:
            if not passes(error) and not isinstance(error, StreamNotFound):
                raise
            logger.warning("%s: no line to stand in: %s", stream, error)
            return error
        self._readers[stream] = reader
        return None

    def _leave(self, stream: str) -> int | None:
        reader = self._readers.pop(stream, None)
        if reader is None:
            return None
        deadline = self._clock() + self._shared.options.handover_timeout
        reader.stop(deadline)
        reader.join(deadline + _JOIN_TIMEOUT)
        return reader.handled

    def _bury_dead(self) -> None:
        """Forget readers that ended by themselves; they are made anew if there is reason to."""
        for stream, reader in list(self._readers.items()):
            if reader.alive:
                continue
            failure = reader.failure
            del self._readers[stream]
            if failure is None:
                continue
            if not passes(failure) and not isinstance(failure, StreamNotFound):
                raise failure
            logger.warning("%s: %s", stream, failure)

    def _disturbed(self, streams: Sequence[str]) -> None:
        if len(streams) > 1:
            self.again_at = self._clock() + SETTLE * (1 + self._shared.access.rng.random())
