"""All rows of a task, checked to be its own and put into their total order, within a bound."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from sharding.errors import LocalError
from spark.messages import Key
from spark.own_shards import OwnShards

_MESSAGE = "message"
SLICE = 10_000


class BatchTooLarge(LocalError):
    """The rows of one task need more memory than they may have."""


class OwnRows:
    """Collects the encoded messages of a task; the owner adds Arrow batches and then publishes."""

    def __init__(self, own: OwnShards, task: int, max_bytes: int) -> None:
        self._own = own
        self._task = task
        self._max_bytes = max_bytes
        self._bytes = 0
        self._parts: dict[int, list[pa.RecordBatch]] = defaultdict(list)

    def add(
        self, messages: Sequence[bytes], keys: Sequence[Key | None] | None, rows: pa.RecordBatch
    ) -> None:
        """`messages` and `keys` of the rows; of `rows` the columns of the order are kept."""
        shards = [0] * len(messages) if keys is None else list(map(self._own.shard_of, keys))
        self._own.check_own(shards, self._task)
        part = pa.record_batch(
            [
                *(rows.column(name) for name in self._own.order_by),
                pa.array(messages, pa.large_binary()),
            ],
            names=self._names,
        )
        self._bytes += part.nbytes
        if self._bytes > self._max_bytes:
            raise BatchTooLarge(
                f"a task has more than {self._max_bytes} bytes of rows in one batch; take fewer at "
                "a time (maxOffsetsPerTrigger of the source), use more partitions, or raise "
                "maxTaskBytes"
            )
        numbers = pa.array(shards, pa.int32())
        for shard in set(shards):
            self._parts[shard].append(part.filter(pc.equal(numbers, shard)))

    @property
    def counts(self) -> dict[int, int]:
        """How many rows there are for each stream that has some."""
        return {
            shard: sum(part.num_rows for part in parts)
            for shard, parts in sorted(self._parts.items())
        }

    def ordered(self, shard: int) -> Iterator[list[bytes]]:
        """The messages of a stream in their order, some at a time; they are kept no longer."""
        table = pa.Table.from_batches(self._parts.pop(shard))
        order = pc.sort_indices(table, sort_keys=[(name, "ascending") for name in self._names])
        messages = table.column(_MESSAGE)
        for start in range(0, len(order), SLICE):
            yield messages.take(order.slice(start, SLICE)).to_pylist()

    @property
    def _names(self) -> list[str]:
        # Numbered: a column of the user's may be called as ours is.
        return [*(f"order {number}" for number in range(len(self._own.order_by))), _MESSAGE]
