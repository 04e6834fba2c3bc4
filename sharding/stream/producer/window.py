"""The messages of a partition that are not in a batch yet, and their publishing ids: pure.

Bodies without properties or a key are kept as they are (`plain`): their data sections are written
when the frame is built, many at a time. As soon as another message joins them, all are encoded.

Ids are a range that goes on where the last batch ended. Only where the application gives ids are
they kept one by one. It may give some that the stream has, to repeat messages; one that the
producer gives itself is above all that the stream has, or the broker would drop a new message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import repeat

from sharding.callers import Caller
from sharding.errors import InvalidInput
from sharding.stream.messages.codecs import Compression
from sharding.stream.messages.message import encode_data
from sharding.stream.options import ProducerOptions
from sharding.stream.producer import publish_entries
from sharding.stream.producer.outbox import Batch, Failing, Outbox, Owned, count_of

MAX_PUBLISHING_ID = 2**63 - 1


class Pending:
    """A partition's buffer. `Producer.send` adds to the attributes itself, for speed."""

    def __init__(self, options: ProducerOptions, stream: str) -> None:
        self._options = options
        self._stream = stream
        self._found = 0
        self._last_given = 0
        self.taken = 0
        """How many messages were put into batches."""
        self._clear()

    def _clear(self) -> None:
        options = self._options
        self.messages: list[bytes] = []
        self.numbers = array("Q")
        self.size = 0
        self.plain = not options.filtering
        self.ids: array[int] | None = None
        self._filters: list[bytes | None] | None = [] if options.filtering else None
        self.owned: list[Owned] = []
        self.since = 0.0
        """When the first message came."""

    def go_on_after(self, last_id: int) -> None:
        """The stream has this id already, under the producer's name."""
        self._found = last_id

    @property
    def last_id(self) -> int:
        """The last id given to a message, or found in the stream; 0 if there is none."""
        if self.ids:
            return self.ids[-1]
        if self.messages:
            return self._next_id - 1 + len(self.messages)
        return self._last_given or self._found

    @property
    def is_full(self) -> bool:
        """Whether it is enough for a batch."""
        options = self._options
        return len(self.messages) >= options.batch_messages or self.size >= options.batch_bytes

    def check_ids(self, ids: Sequence[int]) -> None:
        """Ids from the application must rise, and be above all that this producer used.

        They may be ones that the stream has: then the broker drops the messages as duplicates.
        """
        if self._options.name is None:
            raise InvalidInput("publishing_id", "needs a producer with a name", ids[0])
        last = self.last_id if self._last_given or self.messages else 0
        for each in ids:
            if not last < each <= MAX_PUBLISHING_ID:
                raise InvalidInput(
                    "publishing_id", f"must rise on {self._stream!r}; the last is {last}", each
                )
            last = each

    def extend(self, load: Load) -> None:
        """All of the load, or if a signal's exception comes in between, nothing of it."""
        before, caller = len(self.messages), load.caller
        try:
            self._extend(load)
            if caller is not None:
                pending = caller.pending + self._own(before, caller)
                caller.pending = pending  # the last step, which nothing interrupts
        except BaseException:
            self.cut(before)
            raise

    def cut(self, count: int) -> None:
        """Keep the first `count` messages, with all that goes with them."""
        for column in (self.messages, self.numbers, self.ids, self._filters):
            if column is not None:
                del column[count:]
        self.owned = [
            run._replace(stop=min(run.stop, count)) for run in self.owned if run.start < count
        ]
        self.size = sum(map(len, self.messages))

    def _own(self, start: int, caller: Caller) -> int:
        """What was added from `start` on is the caller's; how many messages that are."""
        stop = len(self.messages)
        last = self.owned[-1] if self.owned else None
        if last is not None and last.caller is caller and last.stop == start:
            self.owned[-1] = last._replace(stop=stop)
        elif start < stop:
            self.owned.append(Owned(start, stop, caller))
        return stop - start

    def _extend(self, load: Load) -> None:
        if load.ids is not None or self.ids is not None:
            self._add_ids(load.ids, len(load))
        messages = load.messages
        if load.plain and not self.plain:
            messages = list(map(encode_data, messages))
        elif self.plain and not load.plain:
            encoded = list(map(encode_data, self.messages))
            size = sum(map(len, encoded))
            # Together: Python lets no exception in between plain assignments.
            self.messages, self.size, self.plain = encoded, size, False
        self.messages.extend(messages)
        self.numbers.extend(load.numbers)
        self.size += sum(map(len, messages))
        if self._filters is not None:
            self._filters.extend(load.filters or [None] * len(messages))

    def batch(self, frame_max: int) -> Batch:
        """All of it as a batch; `following` is what comes after."""
        ids: Sequence[int] = self.ids or range(self._next_id, self._next_id + len(self.messages))
        groups = None
        if most := self._options.sub_entry_messages:
            room = min(publish_entries.room_for_entries(frame_max), publish_entries.MAX_ENTRY_BYTES)
            sizes = list(map(len, self.messages))
            groups = publish_entries.groups(sizes, most, room, self.plain)
            ids = array("Q", [ids[group.stop - 1] for group in groups])
        return Batch(
            self.messages,
            ids,
            self.numbers,
            self.taken,
            self.size,
            self.plain,
            self._filters,
            groups,
            self._options.compression,
            self.owned,
        )

    def following(self, batch: Batch) -> Pending:
        """The buffer for what comes after this batch, which is all that there is here."""
        following = copy(self)
        following._last_given = self.last_id
        following.taken += len(batch.numbers)
        following._clear()
        return following

    @property
    def _next_id(self) -> int:
        """Of the first message here, if its id is not from the application."""
        return max(self._last_given, self._found) + 1

    def _add_ids(self, ids: Sequence[int] | None, count: int) -> None:
        if self.ids is None:
            self.ids = array("Q", range(self._next_id, self._next_id + len(self.messages)))
        first = max(self.last_id, self._found) + 1
        self.ids.extend(range(first, first + count) if ids is None else ids)


# All messages of a partition that have no outcome, pending and in batches, and their bounds: pure.
#
# Its owner holds a lock around every call.


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
            publish_entries.SUB_ENTRY_OVERHEAD + publish_entries.RECORD_OVERHEAD
            if self._options.compression is not Compression.NONE
            else publish_entries.ENTRY_OVERHEAD + publish_entries.FILTER_OVERHEAD
        )
        return publish_entries.room_for_entries(self.frame_max) - overhead

    def room(self) -> int:
        """How many more messages may come; 0 if there are enough, or enough bytes."""
        if self._room_in_bytes() <= 0:
            return 0
        return max(0, self._options.max_unconfirmed - self.unsettled)

    def first_of(self, load: Load, start: int) -> Load:
        """The next messages of a load, from `start` on: what there is room for, at most a batch."""
        part = load.part(start, start + min(self.room(), self._options.batch_messages))
        room = self._room_in_bytes()
        if sum(map(len, part.messages)) <= room:
            return part
        return part.part(0, publish_entries.cut(list(map(len, part.messages)), room)[0].stop)

    def refresh(self) -> None:
        """Set the quick bounds again, after anything changed but a quick addition."""
        options, outbox = self._options, self.outbox
        if options.filtering or self.pending.ids is not None:
            self.quick_messages = 0
            return
        # The message that fills a batch takes the long way, which writes the batch.
        room = options.max_unconfirmed - outbox.messages
        self.quick_messages = min(options.batch_messages, room) - 1
        self.quick_bytes = min(
            options.batch_bytes,
            self.largest_message - publish_entries.DATA_OVERHEAD,
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
            batch, outbox = self.pending.batch(self.frame_max), self.outbox
            following = self.pending.following(batch)
            messages, size = outbox.messages + len(batch.numbers), outbox.size + batch.size
            owned = outbox.owned + count_of(batch.owned)
            # A signal's exception comes in after a call, not between plain assignments: so all of
            # this is done, or nothing.
            outbox.messages, outbox.size, outbox.owned = messages, size, owned
            self.pending = following
            outbox.waiting.append(batch)
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

    @property
    def unsettled(self) -> int:
        """How many messages have no outcome."""
        return self.outbox.messages + len(self.pending.messages)

    @property
    def own_unsettled(self) -> int:
        """How many of these are the producer's own, and no caller's."""
        return self.unsettled - self.outbox.owned - count_of(self.pending.owned)

    def accepted_of(self, caller: Caller) -> int:
        """How many messages were taken up to the caller's last one that may have no outcome."""
        owned = [(self.pending.taken, self.pending.owned)]
        owned += [(batch.position, list(batch.owned)) for batch in reversed(self.outbox.batches)]
        for position, runs in owned:
            for run in reversed(runs):
                if run.caller is caller:
                    return position + run.stop
        return 0

    def _room_in_bytes(self) -> int:
        return self._options.max_unconfirmed_bytes - self.outbox.size - self.pending.size


@dataclass(frozen=True, slots=True)
class Load:
    """As many numbers as messages, and as many filters and ids if there are any."""

    messages: Sequence[bytes]
    numbers: Sequence[int]
    plain: bool
    """The messages are bodies, which are still to be encoded."""
    filters: Sequence[bytes | None] | None = None
    ids: Sequence[int] | None = None
    caller: Caller | None = None
    """Whose batch they are sent through; None: the producer itself."""

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def longest(self) -> int:
        """The bytes of the largest message, and of the largest filter value."""
        longest = max(map(len, self.messages), default=0)
        if self.filters is not None:
            longest += max((len(each) for each in self.filters if each), default=0)
        return longest

    def part(self, start: int, stop: int) -> Load:
        """Those from `start` up to `stop`."""
        return replace(
            self,
            messages=self.messages[start:stop],
            numbers=self.numbers[start:stop],
            filters=None if self.filters is None else self.filters[start:stop],
            ids=None if self.ids is None else self.ids[start:stop],
        )

    def chosen(self, positions: Sequence[int]) -> Load:
        """Those at `positions`."""

        return replace(
            self,
            messages=[self.messages[position] for position in positions],
            numbers=[self.numbers[position] for position in positions],
            filters=None if self.filters is None else [self.filters[each] for each in positions],
            ids=None if self.ids is None else [self.ids[position] for position in positions],
        )

    def failing(self) -> Iterator[Failing]:
        """Each of them, if they fail; it has no publishing id of its own before it is sent."""
        ids = repeat(None) if self.ids is None else self.ids
        for number, publishing_id in zip(self.numbers, ids, strict=False):
            yield Failing(number, publishing_id, self.caller)
