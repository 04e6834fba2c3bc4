"""All messages of a partition that have no outcome, pending and in batches, and their bounds: pure.

Its owner holds a lock around every call.
"""

from __future__ import annotations

from collections.abc import Iterator

from sharding.stream.formats.codecs import Compression
from sharding.stream.producing import entries
from sharding.stream.producing.batch import Batch, failures
from sharding.stream.producing.load import Load
from sharding.stream.producing.outbox import Outbox
from sharding.stream.producing.pending import Pending
from sharding.stream.producing.producer_options import ProducerOptions
from sharding.stream.producing.report import Failure


class Window:
    def __init__(self, stream: str, options: ProducerOptions) -> None:
        self._stream = stream
        self._options = options
        self.pending = Pending(options, stream)
        self.outbox = Outbox(keep=options.name is not None)
        self.frame_max = 0
        self.quick_messages = self.quick_bytes = 0
        """Below both, a message may be added to `pending` without a look at anything else."""

    def open(self, frame_max: int) -> None:
        """Messages are cut to frames of this size from now on."""
        self.frame_max = frame_max
        self.refresh()

    @property
    def largest_message(self) -> int:
        """How many bytes an encoded message may have, its filter value included."""
        overhead = (
            entries.SUB_ENTRY_OVERHEAD + entries.RECORD_OVERHEAD
            if self._options.compression is not Compression.NONE
            else entries.ENTRY_OVERHEAD + entries.FILTER_OVERHEAD
        )
        return entries.room_for_entries(self.frame_max) - overhead

    def room(self) -> int:
        """How many more messages may come; 0 if there are enough, or enough bytes."""
        if self._room_in_bytes() <= 0:
            return 0
        room = self._options.max_unconfirmed - self.outbox.messages - len(self.pending.messages)
        return max(0, room)

    def first_of(self, load: Load, start: int) -> Load:
        """The next messages of a load, from `start` on: what there is room for, at most a batch."""
        part = load.part(start, start + min(self.room(), self._options.batch_messages))
        room = self._room_in_bytes()
        if sum(map(len, part.messages)) <= room:
            return part
        return part.part(0, entries.cut(list(map(len, part.messages)), room)[0].stop)

    def refresh(self) -> None:
        """Set the quick bounds anew, after anything changed but a quick addition."""
        options, outbox = self._options, self.outbox
        if options.filtering or self.pending.ids is not None:
            self.quick_messages = 0
            return
        # The message that fills a batch takes the long way, which writes the batch.
        room = options.max_unconfirmed - outbox.messages
        self.quick_messages = min(options.batch_messages, room) - 1
        self.quick_bytes = min(
            options.batch_bytes,
            self.largest_message - entries.DATA_OVERHEAD,
            options.max_unconfirmed_bytes - outbox.size,
        )

    def close(self) -> list[Batch]:
        """Every message without an outcome, the last time; nothing is quick any more."""
        self.pack()
        batches = self.outbox.drain()
        self.quick_messages = 0
        return batches

    def pack(self) -> None:
        """Put what is pending into a batch."""
        if self.pending.messages:
            self.outbox.add(self.pending.take(self.frame_max))
            self.refresh()

    # For reports

    @property
    def accepted(self) -> int:
        """How many messages were taken so far."""
        return self.pending.taken + len(self.pending.messages)

    def has_settled(self, count: int) -> bool:
        """Whether the first `count` messages have an outcome."""
        oldest = self.outbox.oldest_position
        return count <= (self.pending.taken if oldest is None else oldest)

    def unsettled(self, count: int, reason: Exception) -> Iterator[Failure]:
        """Those of the first `count` messages that have no outcome."""
        begun = [batch for batch in self.outbox.batches if batch.position < count]
        yield from failures(begun, self._stream, reason)
        for position, number in enumerate(self.pending.numbers, self.pending.taken):
            if position < count:
                yield Failure(number, self._stream, None, reason)

    def _room_in_bytes(self) -> int:
        return self._options.max_unconfirmed_bytes - self.outbox.size - self.pending.size
