"""Which partitions a worker of a stream group reads, gets in line for and gives up.

The broker's single active consumer is the lock: of all that are in line for a partition, the first
one reads it. Only who should have a partition gets in line, as `fair_share` decides from what the
workers announce; so the lock is free, or will be when its holder has given up or died.

Why not leave the dealing to the broker, which deals the partitions of a super stream out to all
consumers in line: each partition has a line of its own, and workers that start together or come
back after a lost connection stand in a different place in each, so loads were 1, 1, 2, 4, 4 of 12;
and after a node's death 4 of 12 partitions were given to nobody any more, because the broker waits
for a consumer to step down that died with the node (both seen on 4.0.5).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sharding.groups.fair_share import decide, in_hashed_order
from sharding.groups.stream_partition import PartitionReader, Shared, passes
from sharding.stream.errors import StreamNotFound

logger = logging.getLogger("warren.groups")


class StreamSteward:
    """One reader for each partition that is held or waited for. One thread at a time may look."""

    def __init__(self, me: str, shared: Shared) -> None:
        self._me = me
        self._shared = shared
        self._options = shared.options
        self._clock = shared.access.clock
        self._readers: dict[str, PartitionReader] = {}
        self._leaving: set[str] = set()
        self._handled: dict[str, int | None] = {}
        self._not_before: dict[str, float] = {}
        self._free_since: dict[str, float] = {}

    def held(self) -> frozenset[str]:
        """The partitions this worker reads now, those it is about to leave included."""
        return frozenset(stream for stream, each in list(self._readers.items()) if each.active)

    def look(self, streams: Iterable[str], others: dict[str, frozenset[str]]) -> None:
        """Take and give up what follows from what there is and what the others hold.

        Raises the failure of a reader that trying again won't mend.
        """
        known = frozenset(streams)
        self._clear_ended()
        for stream in self._readers.keys() - known:
            self._leave(stream, "is no partition any more")
        now, held = self._clock(), self.held()
        decision = decide(self._me, {**others, self._me: held}, known)
        surplus = [each for each in in_hashed_order(decision.give_up) if each not in self._leaving]
        for stream in surplus[: max(0, len(decision.give_up) - len(self._leaving & held))]:
            self._leave(stream, "another worker has room for it")
        free = known.difference(held, *others.values())
        wanted = {*decision.take, *self._overdue(free, now)}
        for stream in self._readers.keys() - held - wanted:
            self._leave(stream, "it is another's")
        for stream in wanted - self._readers.keys():
            if now >= self._not_before.get(stream, 0):
                self._join(stream)

    def leave_all(self, deadline: float) -> bool:
        """Hand over every partition, all at the same time; whether it was done in time."""
        readers = list(self._readers.values())
        for reader in readers:
            reader.stop(deadline)
        ended = [reader.join(deadline + 1) for reader in readers]
        self._readers.clear()
        return all(ended)

    def _join(self, stream: str) -> None:
        self._not_before[stream] = self._clock() + self._options.take_interval
        reader = PartitionReader(stream, self._shared, self._handled.get(stream))
        self._readers[stream] = reader
        logger.info("%s: getting in line", stream)
        reader.start()

    def _leave(self, stream: str, why: str) -> None:
        if stream not in self._leaving:
            logger.info("%s: leaving, %s", stream, why)
            self._leaving.add(stream)
            self._readers[stream].stop(self._clock() + self._options.handover_timeout)

    def _clear_ended(self) -> None:
        for stream, reader in list(self._readers.items()):
            if reader.alive:
                continue
            del self._readers[stream]
            self._leaving.discard(stream)
            self._handled[stream] = reader.handled
            failure = reader.failure
            if isinstance(failure, StreamNotFound):
                del self._handled[stream]  # one that comes back under the name is another one
            if failure is not None:
                if not passes(failure) and not isinstance(failure, StreamNotFound):
                    raise failure
                logger.warning("%s: %s", stream, failure)

    def _overdue(self, free: Iterable[str], now: float) -> list[str]:
        """Partitions that whoever should take them does not take: any worker may."""
        self._free_since = {stream: self._free_since.get(stream, now) for stream in free}
        patience = 3 * self._options.member_timeout
        return [stream for stream, since in self._free_since.items() if now - since > patience]
