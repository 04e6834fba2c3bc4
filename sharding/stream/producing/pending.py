"""The messages of a partition that are not in a batch yet, and their publishing ids: pure.

Bodies without properties or a key are kept as they are (`plain`): their data sections are written
when the frame is built, many at a time. As soon as another message joins them, all are encoded.

Ids are a range that goes on where the last batch ended. Only where the application gives ids are
they kept one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sharding.errors import InvalidInput
from sharding.stream.formats.message import encode_data
from sharding.stream.producing import entries
from sharding.stream.producing.batch import Batch
from sharding.stream.producing.load import Load
from sharding.stream.producing.producer_options import ProducerOptions

MAX_PUBLISHING_ID = 2**63 - 1


class Pending:
    """A partition's buffer. `Producer.send` adds to the attributes itself, for speed."""

    def __init__(self, options: ProducerOptions, stream: str) -> None:
        self._options = options
        self._stream = stream
        self._next_id = 1
        self._any_used = False
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
        self.since = 0.0
        """When the first message came."""

    def go_on_after(self, last_id: int) -> None:
        """The stream has this id already, under the producer's name."""
        self._next_id = last_id + 1

    @property
    def last_id(self) -> int:
        """The last id given to a message, or found in the stream; 0 if there is none."""
        if self.ids:
            return self.ids[-1]
        return self._next_id - 1 + len(self.messages)

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
        last = self.last_id if self._any_used or self.messages else 0
        for each in ids:
            if not last < each <= MAX_PUBLISHING_ID:
                raise InvalidInput(
                    "publishing_id", f"must rise on {self._stream!r}; the last is {last}", each
                )
            last = each

    def extend(self, load: Load) -> None:
        if load.ids is not None or self.ids is not None:
            self._add_ids(load.ids, len(load))
        messages = load.messages
        if load.plain and not self.plain:
            messages = list(map(encode_data, messages))
        elif self.plain and not load.plain:
            self.messages = list(map(encode_data, self.messages))
            self.size = sum(map(len, self.messages))
            self.plain = False
        self.messages.extend(messages)
        self.numbers.extend(load.numbers)
        self.size += sum(map(len, messages))
        if self._filters is not None:
            self._filters.extend(load.filters or [None] * len(messages))

    def take(self, frame_max: int) -> Batch:
        """All of it as a batch."""
        ids: Sequence[int] = self.ids or range(self._next_id, self._next_id + len(self.messages))
        self._next_id = ids[-1] + 1
        self._any_used = True
        groups = None
        if most := self._options.entry_messages:
            room = min(entries.room_for_entries(frame_max), self._options.entry_bytes)
            sizes = list(map(len, self.messages))
            groups = entries.groups(sizes, most, room, self.plain)
            ids = array("Q", [ids[group.stop - 1] for group in groups])
        batch = Batch(
            self.messages,
            ids,
            self.numbers,
            self.taken,
            self.size,
            self.plain,
            self._filters,
            groups,
            self._options.compression,
        )
        self.taken += len(batch.numbers)
        self._clear()
        return batch

    def _add_ids(self, ids: Sequence[int] | None, count: int) -> None:
        following = range(self.last_id + 1, self.last_id + 1 + count)
        if self.ids is None:
            self.ids = array("Q", range(self._next_id, self._next_id + len(self.messages)))
        self.ids.extend(following if ids is None else ids)
