"""What a partition has taken and the broker has not settled yet: pure, and in order.

The rules:

1. A batch is *waiting* until it is taken to be written, then *flying* until it is settled. What
   flies was taken before all that waits.
2. A confirm or a refusal settles entries of flying batches, in turn or not. One for an id that is
   not there (of an earlier connection, or a duplicate's) changes nothing.
3. When the connection is lost, a named producer's flying batches wait again, before all others:
   the broker knows which of them it has, by their ids, and drops those. An unnamed producer's are
   given up, since sending them again may store them twice.
4. An unnamed producer's messages are freed as soon as they are written.

Its owner holds a lock around every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sharding.stream.producing.batch import Batch


class Outbox:
    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._flying: deque[Batch] = deque()
        self._waiting: deque[Batch] = deque()
        self.messages = 0
        """How many have no outcome."""
        self.size = 0
        """The bytes of all batches that are not complete."""

    def add(self, batch: Batch) -> None:
        self._waiting.append(batch)
        self.messages += len(batch.numbers)
        self.size += batch.size

    def take(self, now: float) -> Batch | None:
        """The next batch to write. It counts as sent from here on: it may be, in part."""
        if not self._waiting:
            return None
        batch = self._waiting.popleft()
        batch.sent_at = now
        self._flying.append(batch)
        return batch

    def written(self, batch: Batch) -> None:
        if not self._keep:
            batch.forget_messages()

    def confirm(self, ids: Sequence[int]) -> int:
        """How many messages these ids settle."""
        stored = 0
        at = 0
        while at < len(ids):
            batch = self._holder(ids[at])
            if batch is None:
                at += 1
                continue
            taken, messages = batch.confirm(ids, at)
            at += taken
            stored += messages
            if batch.complete:
                self._drop_complete()
        self.messages -= stored
        return stored

    def refuse(self, publishing_id: int) -> Sequence[int]:
        """The numbers of the messages that were refused with this id."""
        batch = self._holder(publishing_id)
        entry = None if batch is None else batch.settle(publishing_id)
        if batch is None or entry is None:
            return ()
        numbers = batch.numbers_of(entry)
        self.messages -= len(numbers)
        self._drop_complete()
        return numbers

    def lost(self) -> list[Batch]:
        """The connection is gone: what is given up, if anything is, in order."""
        flying = list(self._flying)
        self._flying.clear()
        given_up = []
        for batch in reversed(flying):
            if self._keep and not batch.complete:
                self._waiting.appendleft(batch)
            else:
                self._forget(batch)
                given_up.append(batch)
        return given_up[::-1]

    def drain(self) -> list[Batch]:
        """Every batch, in order, and nothing is left."""
        batches = self.batches
        self._flying.clear()
        self._waiting.clear()
        self.messages = self.size = 0
        return batches

    @property
    def batches(self) -> list[Batch]:
        """Every batch that is not complete, in order."""
        return [*self._flying, *self._waiting]

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def oldest_sent_at(self) -> float | None:
        """When the batch was sent that has flown longest."""
        return self._flying[0].sent_at if self._flying else None

    @property
    def oldest_position(self) -> int | None:
        """How many messages were handed over before the first batch that is not complete."""
        for batches in (self._flying, self._waiting):
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
        self.messages -= sum(1 for _ in batch.outstanding())
        self.size -= batch.size
