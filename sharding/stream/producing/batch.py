"""Messages that were handed to a partition together, and which of them have an outcome.

A batch has *entries*, each with a publishing id of its own, in rising order. An entry is one
message, or with sub-entry batches a group of messages under the id of its last. Brokers settle
entries mostly from the first to the last, so a batch counts how many leading ones are settled, and
remembers single ids only for those settled out of turn.

It holds no object for each message beyond the message: ids are a range or an array, and so are
numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from sharding.stream.formats.codecs import Compression
from sharding.stream.frames.requests import publish_header
from sharding.stream.producing import entries
from sharding.stream.producing.entries import Entries
from sharding.stream.producing.report import Failure


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

    def confirm(self, ids: Sequence[int], start: int) -> tuple[int, int]:
        """Settle what `ids` say from `start` on, as far as it is in turn, else one entry.

        Returns how many of `ids` that took, and how many messages got an outcome by it.
        """
        first = self.settled
        length = min(len(ids) - start, len(self.ids) - first)
        if length > 0 and ids[start] == self.ids[first] and not self.late:
            # Compared one by one, in C: a broker may join the confirms of new messages and those of
            # duplicates, so equal ends do not mean equal runs.
            if tuple(ids[start : start + length]) != tuple(self.ids[first : first + length]):
                length = 1
            self.settled = first + length
            return length, self._messages_of(first, first + length)
        entry = self.settle(ids[start])
        return 1, 0 if entry is None else self._messages_of(entry, entry + 1)

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

    def numbers_of(self, entry: int) -> Sequence[int]:
        """The numbers of the messages in one entry."""
        if self.groups is None:
            return self.numbers[entry : entry + 1]
        group = self.groups[entry]
        return self.numbers[group.start : group.stop]

    def outstanding(self) -> Iterator[tuple[int, int]]:
        """Number and publishing id of each message without an outcome."""
        for entry in range(self.settled, len(self.ids)):
            publishing_id = self.ids[entry]
            if publishing_id not in self.late:
                for number in self.numbers_of(entry):
                    yield number, publishing_id

    def frames(self, publisher_id: int, frame_max: int) -> Iterator[tuple[bytes, Entries]]:
        """Publish frames, each as header and entries, of all from the first unsettled one on."""
        room = entries.room_for_entries(frame_max)
        for part in self._parts(room):
            content = self._entries(part)
            yield publish_header(publisher_id, len(part), len(content), self.version), content

    def forget_messages(self) -> None:
        """Free the messages of a batch that is never sent again."""
        self.messages = ()

    def _messages_of(self, first: int, stop: int) -> int:
        if self.groups is None:
            return stop - first
        return self.groups[stop - 1].stop - self.groups[first].start

    def _parts(self, room: int) -> list[range]:
        """Which entries go into each frame."""
        first = self.settled
        left = len(self.ids) - first
        overhead = entries.ENTRY_OVERHEAD + entries.DATA_OVERHEAD
        if self.groups is None and self.filters is None and self.size + left * overhead <= room:
            return [range(first, len(self.ids))]
        parts = entries.cut(
            [self._entry_size(entry) for entry in range(first, len(self.ids))], room
        )
        return [range(part.start + first, part.stop + first) for part in parts]

    def _entry_size(self, entry: int) -> int:
        """At most; a sub-entry batch may become smaller."""
        if self.groups is not None:
            group = self.groups[entry]
            records = sum(map(len, self.messages[group.start : group.stop]))
            overhead = entries.RECORD_OVERHEAD + (entries.DATA_OVERHEAD if self.plain else 0)
            return entries.SUB_ENTRY_OVERHEAD + records + len(group) * overhead
        size = len(self.messages[entry]) + entries.ENTRY_OVERHEAD
        if self.plain:
            size += entries.DATA_OVERHEAD
        if self.filters is not None:
            size += entries.FILTER_OVERHEAD + len(self.filters[entry] or b"")
        return size

    def _entries(self, part: range) -> Entries:
        start, stop = part.start, part.stop
        ids = self.ids[start:stop]
        if self.groups is not None:
            return b"".join(map(self._shared_entry, self.groups[start:stop], ids))
        whole = stop - start == len(self.messages)
        messages = self.messages if whole else self.messages[start:stop]
        if self.filters is not None:
            return entries.filtered_entries(messages, ids, self.filters[start:stop])
        if self.plain:
            return entries.data_entries(messages, ids)
        return entries.message_entries(messages, ids)

    def _shared_entry(self, group: range, publishing_id: int) -> Entries:
        messages = self.messages[group.start : group.stop]
        if len(group) == 1 and self.compression is Compression.NONE:
            alone = entries.data_entries if self.plain else entries.message_entries
            return alone(messages, [publishing_id])
        records = entries.data_records if self.plain else entries.message_records
        return entries.sub_entry(records(messages), len(group), publishing_id, self.compression)


def failures(batches: Iterable[Batch], stream: str, reason: Exception) -> Iterator[Failure]:
    """Every message of `batches` without an outcome, as failed for `reason`."""
    for batch in batches:
        for number, publishing_id in batch.outstanding():
            yield Failure(number, stream, publishing_id, reason)
