"""Messages that were handed to a partition together, and which of them have an outcome.

A batch has *entries*, each with a publishing id of its own, in rising order. An entry is one
message, or with sub-entry batches a group of messages under the id of its last. Brokers settle
entries mostly from the first to the last, so a batch counts how many leading ones are settled, and
remembers single ids only for those settled out of turn.

It holds no object for each message beyond the message: ids are a range or an array, and so are
numbers. Whose messages they are is kept by runs, of those alone that were sent through a `batch()`
(`sharding.callers`): all others are the producer's own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from sharding.callers import Caller
from sharding.stream.messages.codecs import Compression
from sharding.stream.producer import publish_entries
from sharding.stream.producer.publish_entries import Entries
from sharding.stream.protocol.commands import publish_header


class Owned(NamedTuple):
    """Messages of one caller that follow each other, by their positions."""

    start: int
    stop: int
    caller: Caller


_stop = attrgetter("stop")


def count_of(owned: Iterable[Owned]) -> int:
    """How many messages these are."""
    return sum(run.stop - run.start for run in owned)


class Failing(NamedTuple):
    """A message that is not stored, or not known to be."""

    number: int
    publishing_id: int | None
    caller: Caller | None = None
    """None: the producer's own."""


@dataclass(slots=True, eq=False)
class Batch:
    """A batch on its way; the outbox changes it, under its owner's lock."""

    messages: Sequence[bytes]
    ids: Sequence[int]
    """One for each entry, rising."""
    numbers: Sequence[int]
    """One for each message: how the application knows it."""
    position: int
    """How many messages were handed to the partition before."""
    size: int
    plain: bool = False
    """The messages are bodies, which get their data section while the frame is built."""
    filters: Sequence[bytes | None] | None = None
    groups: Sequence[range] | None = None
    """For sub-entry batches: the positions of each entry's messages."""
    compression: Compression = Compression.NONE
    owned: Sequence[Owned] = ()
    """In order; what is in none of them is the producer's own."""
    sent_at: float | None = None
    settled: int = 0
    """How many leading entries have an outcome."""
    late: set[int] = field(default_factory=set)
    """The ids behind those that have one as well."""

    @property
    def complete(self) -> bool:
        return self.settled == len(self.ids)

    @property
    def version(self) -> int:
        """Of the Publish frame."""
        return 1 if self.filters is None else 2

    def confirm(self, ids: Sequence[int], start: int) -> tuple[int, int, int]:
        """Settle what `ids` say from `start` on, as far as it is in turn, else one entry.

        Returns how many of `ids` that took, how many messages are stored by it, and how many of
        these are callers', who are told.
        """
        first = self.settled
        length = min(len(ids) - start, len(self.ids) - first)
        if length > 0 and ids[start] == self.ids[first] and not self.late:
            # Compared one by one, in C: a broker may join the confirms of new messages and those of
            # duplicates, so equal ends do not mean equal runs.
            if tuple(ids[start : start + length]) != tuple(self.ids[first : first + length]):
                length = 1
            self.settled = first + length
            return length, *self._stored(first, first + length)
        entry = self.settle(ids[start])
        return 1, *((0, 0) if entry is None else self._stored(entry, entry + 1))

    def settle(self, publishing_id: int) -> int | None:
        """The position of the entry with this id, which is settled now; None if it was before."""
        entry = bisect_left(self.ids, publishing_id)
        if (
            entry < self.settled
            or entry == len(self.ids)
            or self.ids[entry] != publishing_id
            or publishing_id in self.late
        ):
            return None
        self.late.add(publishing_id)
        while self.late and not self.complete and self.ids[self.settled] in self.late:
            self.late.remove(self.ids[self.settled])
            self.settled += 1
        return entry

    def messages_in(self, entry: int) -> Iterator[Failing]:
        """The messages of one entry, if they fail."""
        for position in self._positions(entry, entry + 1):
            owned = self._owned_from(position)
            caller = owned[0].caller if owned and owned[0].start <= position else None
            yield Failing(self.numbers[position], self.ids[entry], caller)

    def outstanding(self) -> Iterator[Failing]:
        """Each message without an outcome."""
        for entry in range(self.settled, len(self.ids)):
            if self.ids[entry] not in self.late:
                yield from self.messages_in(entry)

    def frames(self, publisher_id: int, frame_max: int) -> Iterator[tuple[bytes, Entries]]:
        """Publish frames, each as header and entries, of all from the first unsettled one on."""
        room = publish_entries.room_for_entries(frame_max)
        for part in self._parts(room):
            content = self._entries(part)
            yield publish_header(publisher_id, len(part), len(content), self.version), content

    def forget_messages(self) -> None:
        """Free the messages of a batch that is never sent again."""
        self.messages = ()

    def _positions(self, first: int, stop: int) -> range:
        """Of the messages in these entries."""
        if self.groups is None:
            return range(first, stop)
        return range(self.groups[first].start, self.groups[stop - 1].stop)

    def _stored(self, first: int, stop: int) -> tuple[int, int]:
        """How many messages these entries have, and how many of them are callers', who are told."""
        stored = self._positions(first, stop)
        told = 0
        for owned in self._owned_from(stored.start) if self.owned else ():
            count = min(owned.stop, stored.stop) - max(owned.start, stored.start)
            if count <= 0:
                break
            owned.caller.stored(count)
            told += count
        return len(stored), told

    def _owned_from(self, position: int) -> Sequence[Owned]:
        """The runs that end after a position."""
        return self.owned[bisect_right(self.owned, position, key=_stop) :]

    def _parts(self, room: int) -> list[range]:
        """Which entries go into each frame."""
        first = self.settled
        left = len(self.ids) - first
        overhead = publish_entries.ENTRY_OVERHEAD + publish_entries.DATA_OVERHEAD
        if self.groups is None and self.filters is None and self.size + left * overhead <= room:
            return [range(first, len(self.ids))]
        parts = publish_entries.cut(
            [self._entry_size(entry) for entry in range(first, len(self.ids))], room
        )
        return [range(part.start + first, part.stop + first) for part in parts]

    def _entry_size(self, entry: int) -> int:
        """At most; a sub-entry batch may become smaller."""
        if self.groups is not None:
            group = self.groups[entry]
            records = sum(map(len, self.messages[group.start : group.stop]))
            overhead = publish_entries.RECORD_OVERHEAD + (
                publish_entries.DATA_OVERHEAD if self.plain else 0
            )
            return publish_entries.SUB_ENTRY_OVERHEAD + records + len(group) * overhead
        size = len(self.messages[entry]) + publish_entries.ENTRY_OVERHEAD
        if self.plain:
            size += publish_entries.DATA_OVERHEAD
        if self.filters is not None:
            size += publish_entries.FILTER_OVERHEAD + len(self.filters[entry] or b"")
        return size

    def _entries(self, part: range) -> Entries:
        start, stop = part.start, part.stop
        ids = self.ids[start:stop]
        if self.groups is not None:
            return b"".join(map(self._shared_entry, self.groups[start:stop], ids))
        whole = stop - start == len(self.messages)
        messages = self.messages if whole else self.messages[start:stop]
        if self.filters is not None:
            return publish_entries.filtered_entries(messages, ids, self.filters[start:stop])
        if self.plain:
            return publish_entries.data_entries(messages, ids)
        return publish_entries.message_entries(messages, ids)

    def _shared_entry(self, group: range, publishing_id: int) -> Entries:
        messages = self.messages[group.start : group.stop]
        if len(group) == 1 and self.compression is Compression.NONE:
            alone = publish_entries.data_entries if self.plain else publish_entries.message_entries
            return alone(messages, [publishing_id])
        records = publish_entries.data_records if self.plain else publish_entries.message_records
        return publish_entries.sub_entry(
            records(messages), len(group), publishing_id, self.compression
        )


def outstanding(batches: Iterable[Batch]) -> Iterator[Failing]:
    """Each message of `batches` without an outcome."""
    return chain.from_iterable(batch.outstanding() for batch in batches)


# What a partition has taken and the broker has not settled yet: pure, and in order.
#
# The rules:
#
# 1. A batch is *waiting* until it is taken to be written, then *flying* until it is settled. What
#    flies was taken before all that waits.
# 2. A confirm or a refusal settles entries of flying batches, in turn or not. One for an id that is
#    not there (of an earlier connection, or a duplicate's) changes nothing.
# 3. When the connection is lost, a named producer's flying batches wait again, before all others:
#    the broker knows which of them it has, by their ids, and drops those. An unnamed producer's are
#    given up, since sending them again may store them twice.
# 4. An unnamed producer's messages are freed as soon as they are written.
#
# Its owner holds a lock around every call.


class Outbox:
    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._flying: deque[Batch] = deque()
        self.waiting: deque[Batch] = deque()
        """What is to be written, in order; who adds to it counts it."""
        self.messages = 0
        """How many have no outcome."""
        self.size = 0
        """The bytes of all batches that are not complete."""
        self.owned = 0
        """How many of `messages` are callers'; who adds to `waiting` counts them too."""

    def add(self, batch: Batch) -> None:
        self.waiting.append(batch)
        self.messages += len(batch.numbers)
        self.size += batch.size
        self.owned += count_of(batch.owned)

    def take(self, now: float) -> Batch | None:
        """The next batch to write. It counts as sent from here on: it may be, in part."""
        if not self.waiting:
            return None
        batch = self.waiting[0]
        batch.sent_at = now
        try:
            self._flying.append(batch)
            self.waiting.popleft()
        except BaseException:  # a signal's: the step is finished, and then it may go on
            if self.waiting and self.waiting[0] is batch:
                self.waiting.popleft()
            raise
        return batch

    def written(self, batch: Batch) -> None:
        if not self._keep:
            batch.forget_messages()

    def confirm(self, ids: Sequence[int]) -> int:
        """How many messages these ids settle; callers are told of theirs, which `owned` shows."""
        stored = 0
        at = 0
        while at < len(ids):
            batch = self._holder(ids[at])
            if batch is None:
                at += 1
                continue
            taken, messages, told = batch.confirm(ids, at)
            at += taken
            stored += messages
            self.owned -= told
            if batch.complete:
                self._drop_complete()
        self.messages -= stored
        return stored

    def refuse(self, publishing_id: int) -> Sequence[Failing]:
        """The messages that were refused with this id."""
        batch = self._holder(publishing_id)
        entry = None if batch is None else batch.settle(publishing_id)
        if batch is None or entry is None:
            return ()
        refused = list(batch.messages_in(entry))
        self._count_out(refused)
        self._drop_complete()
        return refused

    def lost(self) -> list[Batch]:
        """The connection is gone: what is given up, if anything is, in order."""
        flying = list(self._flying)
        self._flying.clear()
        given_up = []
        for batch in reversed(flying):
            if self._keep and not batch.complete:
                self.waiting.appendleft(batch)
            else:
                self._forget(batch)
                given_up.append(batch)
        return given_up[::-1]

    def drain(self) -> list[Batch]:
        """Every batch, in order, and nothing is left."""
        batches = self.batches
        self._flying.clear()
        self.waiting.clear()
        self.messages = self.size = self.owned = 0
        return batches

    @property
    def batches(self) -> list[Batch]:
        """Every batch that is not complete, in order."""
        return [*self._flying, *self.waiting]

    @property
    def has_waiting(self) -> bool:
        return bool(self.waiting)

    @property
    def oldest_sent_at(self) -> float | None:
        """When the batch was sent that has flown longest."""
        return self._flying[0].sent_at if self._flying else None

    @property
    def oldest_position(self) -> int | None:
        """How many messages were handed over before the first batch that is not complete."""
        for batches in (self._flying, self.waiting):
            if batches:
                return batches[0].position
        return None

    def _holder(self, publishing_id: int) -> Batch | None:
        """The flying batch that may hold this id."""
        for batch in self._flying:
            if publishing_id <= batch.ids[-1]:
                return batch if publishing_id >= batch.ids[0] else None
        return None

    def _drop_complete(self) -> None:
        # One that is complete out of turn is dropped when it comes first.
        while self._flying and self._flying[0].complete:
            self.size -= self._flying.popleft().size

    def _forget(self, batch: Batch) -> None:
        self._count_out(batch.outstanding())
        self.size -= batch.size

    def _count_out(self, messages: Iterable[Failing]) -> None:
        for message in messages:
            self.messages -= 1
            self.owned -= message.caller is not None
