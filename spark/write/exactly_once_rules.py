"""The rules by which a replayed batch gives each row the publishing id it had before. Pure.

A broker drops a message whose publishing id is not greater than the last one under the same name.
That stores a row once only if a replay gives it the same id, and Spark promises neither the order
of rows after a shuffle nor the number of tasks. So:

1. One task owns a stream: stream number `s` belongs to task `s % tasks`. A task that is given a row
   of another's refuses the batch before it publishes anything.
2. A task puts the rows of a stream into a total order: by the columns that were asked for, then by
   the whole message. Rows that are equal in both can't be told apart, so their order is of no
   matter.
3. An id is `batch | rank | check`: the row's place in that order, from 1, and a checksum of all
   messages up to it, as they are stored. Ids then depend on nothing but the rows of the batch.
4. The last id that the broker knows says which rows it has: those of that batch up to that rank.
   Before a task publishes anything it looks at all of its streams, also at those for which it has
   no rows. A batch older than the last one is refused, and of a batch that was begun, the rows that
   are stored must be the first ones of those it has now. Any change that would give their ids to
   other rows is refused by that: of the query, the order, the encoding, the keys, the partitions,
   the checkpoint, or what the source still has. One that leaves them as they were does no harm.

An id has 63 bits. 19 of them are for the batch, so there is another name after each 524,288
batches; 24 for the rank; 20 for the check: it misses one change in a million.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

from sharding.errors import LocalError
from sharding.stream.producer.partitioning import by_hash
from spark.options.values import BadOption
from spark.write.messages import Key

BATCH_BITS, RANK_BITS, CHECK_BITS = 19, 24, 20
BATCHES = 1 << BATCH_BITS
"""How many batches there are under one name."""
MAX_RANK = (1 << RANK_BITS) - 1
_CHECK = (1 << CHECK_BITS) - 1
_WAY_OUT = (
    "Nothing was published. Let the batch end with the query, the options and the checkpoint it "
    "began with, or begin a new checkpoint and accept that rows come twice"
)


class WouldLoseRows(LocalError):
    """The broker would drop rows as known that it does not have; nothing was published."""


@dataclass(frozen=True)
class StreamOwners:
    """Which task publishes to which stream, and in which order."""

    bound: tuple[str, ...]
    """What keys are routed by, `StreamEnvironment.bound_streams`; or the one stream."""
    tasks: int
    order_by: tuple[str, ...] = ()

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """Each stream once; its place is its number."""
        return tuple(dict.fromkeys(self.bound))

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(self.streams.index(stream) for stream in self.bound)

    def shard_of(self, key: Key | None) -> int:
        """The number of the stream that a key belongs to. A single stream needs no key."""
        if key is None or len(self.streams) == 1:
            return 0
        return self._numbers[by_hash(key, len(self._numbers))]

    def shards_of(self, task: int) -> range:
        """The numbers of a task's streams."""
        return range(task, len(self.streams), self.tasks) if task < self.tasks else range(0)

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
        return json.dumps({"bound": self.bound, "tasks": self.tasks, "orderBy": self.order_by})

    @classmethod
    def loads(cls, option: str, text: str) -> StreamOwners:
        try:
            value = json.loads(text)
            own = cls(tuple(value["bound"]), int(value["tasks"]), tuple(value["orderBy"]))
        except (ValueError, KeyError, TypeError):
            raise BadOption(option, "is set by exactly_once() and by nothing else", text) from None
        return own


def producer_name(query: str, batch: int) -> str:
    """
    >>> producer_name("5f3a", 1_000_000)
    '5f3a/1'
    """
    return f"{query}/{batch >> BATCH_BITS}"


class RowIds:
    """Gives the rows of one stream in one batch their ids, in their order."""

    def __init__(self, batch: int) -> None:
        self._batch = batch % BATCHES << RANK_BITS + CHECK_BITS
        self._rank = 0
        self._check = 0

    def of(self, messages: Iterable[bytes]) -> list[int]:
        """The ids of the next messages.

        >>> [hex(each) for each in RowIds(7).of([b"a", b"b"])]
        ['0x70000017be43', '0x70000023486d']
        """
        batch, rank, check = self._batch, self._rank, self._check
        ids = []
        for message in messages:
            rank += 1
            check = crc32(message, check)
            ids.append(batch | rank << CHECK_BITS | check & _CHECK)
        self._rank, self._check = rank, check
        return ids


def check_known_rows(
    last_id: int, batch: int, rows: int, ordered: Iterable[Sequence[bytes]], stream: str
) -> None:
    """Raises if rows of this batch would be dropped though the stream does not have them.

    `last_id` is the stream's under the batch's name, `ordered` the messages for it, some at a time.
    """
    name_began = batch - batch % BATCHES
    last_batch = name_began + (last_id >> RANK_BITS + CHECK_BITS)
    known = last_id >> CHECK_BITS & MAX_RANK
    if last_batch > batch:
        raise older_checkpoint(stream, batch, f"rows of batch {last_batch}")
    if rows > MAX_RANK:
        raise WouldLoseRows(
            f"a batch may have {MAX_RANK} rows for a stream at most, not {rows}; take fewer at a "
            "time (maxOffsetsPerTrigger of the source), or use more partitions"
        )
    if last_batch < batch or not known:
        return
    if known > rows:
        raise WouldLoseRows(
            f"{stream!r} has {known} rows of batch {batch} already, but now the batch has only "
            f"{rows} for it: it is not the batch that was begun. {_WAY_OUT}"
        )
    if _id_at(known, batch, ordered) != last_id:
        raise WouldLoseRows(
            f"{stream!r} has {known} rows of batch {batch} already, but they are not the first "
            f"{known} of the {rows} that the batch has for it now: the query, its order, its "
            f"encoding, its input or its checkpoint changed meanwhile. {_WAY_OUT}"
        )


def older_checkpoint(stream: str, batch: int, found: str) -> WouldLoseRows:
    return WouldLoseRows(
        f"{stream!r} has {found} of this query already, so those of batch {batch} would be dropped "
        "or come twice: the checkpoint is older than the stream. Nothing was published. Go on from "
        "the newest checkpoint, or begin a new one and accept that rows come twice"
    )


def _id_at(rank: int, batch: int, ordered: Iterable[Sequence[bytes]]) -> int:
    """The id of the row at `rank`; there is one."""
    ids, left = RowIds(batch), rank
    for messages in ordered:
        found = ids.of(messages[:left])
        left -= len(found)
        if not left:
            return found[-1]
    raise AssertionError("fewer rows than were counted")
