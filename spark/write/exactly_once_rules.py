"""The rules by which a replayed batch gives each row the publishing id it had before. Pure.

A broker drops a message whose publishing id is not greater than the last one under the same name.
That stores a row once only if a replay gives it the same id, and Spark promises neither the order
of rows after a shuffle nor the number of tasks. So:

1. One task owns a stream: stream number `s` belongs to task `s % tasks`. A task that is given a row
   of another's refuses the batch before it publishes anything.
2. A task puts the rows of a stream into a total order: by the columns that were asked for, then by
   the whole message. Rows that are equal in both can't be told apart, so their order is of no
   matter.
3. The name is the query's id, and the id is `batch << 32 | rank`, ranks counted from 1.

Ids then depend on nothing but the rows of the batch. What the broker remembers of a name also shows
two mistakes that would lose rows without a word: a batch older than one that is stored already
(`check_last_id`), and a replay with fewer rows than were stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from sharding.errors import LocalError
from sharding.stream.producer.partitioning import by_hash
from spark.options.values import BadOption
from spark.write.messages import Key

RANK_BITS = 32
MAX_RANK = (1 << RANK_BITS) - 1


class WouldLoseRows(LocalError):
    """The broker would drop rows as known that it does not have; nothing was published."""


@dataclass(frozen=True)
class StreamOwners:
    """Which task publishes to which stream, and in which order."""

    streams: tuple[str, ...]
    tasks: int
    order_by: tuple[str, ...] = ()

    def shard_of(self, key: Key | None) -> int:
        """The number of the stream that a key belongs to. A single stream needs no key."""
        return 0 if key is None or len(self.streams) == 1 else by_hash(key, len(self.streams))

    def check_own(self, shards: Iterable[int], task: int) -> None:
        """Raises for a row of another task's stream."""
        for shard in set(shards):
            if shard % self.tasks != task:
                raise WouldLoseRows(
                    f"task {task} of {self.tasks} was given rows of {self.streams[shard]!r}, which "
                    f"belongs to task {shard % self.tasks}; let exactly_once() make the query, and "
                    "change nothing about it afterwards"
                )

    def dumps(self) -> str:
        return json.dumps({"streams": self.streams, "tasks": self.tasks, "orderBy": self.order_by})

    @classmethod
    def loads(cls, option: str, text: str) -> StreamOwners:
        try:
            value = json.loads(text)
            own = cls(tuple(value["streams"]), int(value["tasks"]), tuple(value["orderBy"]))
        except (ValueError, KeyError, TypeError):
            raise BadOption(option, "is set by exactly_once() and by nothing else", text) from None
        return own


def first_id(batch: int) -> int:
    """
    >>> hex(first_id(7))
    '0x700000001'
    """
    return (batch << RANK_BITS) + 1


def check_last_id(last_id: int, batch: int, rows: int, stream: str) -> None:
    """Raises if rows of this batch would be dropped though the stream does not have them."""
    last_batch, last_rank = last_id >> RANK_BITS, last_id & MAX_RANK
    if last_batch > batch:
        raise WouldLoseRows(
            f"{stream!r} has rows of batch {last_batch} of this query already, so those of batch "
            f"{batch} would be dropped: the checkpoint is older than the stream. Go on from the "
            "newest checkpoint, or begin a new one and accept that rows come twice"
        )
    if last_batch == batch and last_rank > rows:
        raise WouldLoseRows(
            f"{stream!r} has {last_rank} rows of batch {batch} already, but now the batch has only "
            f"{rows} for it: the query does not give the same rows again. Its rows must depend on "
            "nothing but its input"
        )
    if rows > MAX_RANK:
        raise WouldLoseRows(f"a batch may have {MAX_RANK} rows for a stream at most, not {rows}")
