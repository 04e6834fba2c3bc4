"""The rules by which a replayed batch gives each row the publishing id it had before. Pure.

A broker drops a message whose publishing id is not greater than the last one under the same name.
That stores a row once only if a replay gives it the same id, and Spark promises neither the order
of rows after a shuffle nor the number of tasks. So:

1. One task owns a stream: stream number `s` belongs to task `s % tasks`. A task that is given a row
   of another's refuses the batch before it publishes anything.
2. A task puts the rows of a stream into a total order: by the columns that were asked for, then by
   the whole message. Rows that are equal in both can't be told apart, so their order is of no
   matter.
3. An id is `batch | version | check | rank`: what tells what the driver arranged (the partitions,
   the order, the columns, how a row is encoded) from any other; a checksum of all messages that the
   batch has for the stream, in their order and as they are stored; and the row's place among them,
   from 1. Ids then depend on nothing but the query's arrangement and the rows of the batch.
4. The last id that the broker knows says what it has: of that batch, with that version and
   checksum, the rows up to that rank. Before a task publishes anything it looks at all streams of
   the query. In its own, also in those for which it has no rows, a batch older than the last one is
   refused, and one that was begun with other rows than it has now: of any change that would give
   their ids to other rows.
   Of the others' rows it knows nothing but the version: a batch that was begun with another one,
   wherever, is refused by every task. Else a task whose own streams are untouched would store the
   rows where they belong now, which stand elsewhere already or will, and neither version could
   end the batch. So is a batch older than another's last one.
   A change that the driver does not see (an expression, the source's rows) is refused only by the
   tasks of the streams that have rows: others may have published theirs by then. The same is so
   where all rows that a batch had are in a stream that is no longer bound.
5. What looks can be overtaken: by a task that Spark has given up, of an old driver or a lost
   executor, which publishes other rows of the same batch after that look. The ids of one are all
   above those of the other, since version and checksum stand before the rank. So whichever rows a
   broker drops, the last id is then not the dropped task's: each looks again when all is confirmed.
   If the last id is the one it meant, nothing that was dropped was other than it meant.

An id has 63 bits. 17 of them are for the batch, so there is another name after each 131,072
batches; 4 for the version: of 16 changes the tasks of other streams miss one; 20 for the check: it
misses one change in a million, and what it misses is lost in silence, so no bit of it is for sale;
22 for the rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from sharding.errors import LocalError, OutcomeUnknown
from sharding.stream.producer.partitioning import by_hash
from spark.options.values import BadOption
from spark.write.messages import Key

BATCH_BITS, VERSION_BITS, CHECK_BITS, RANK_BITS = 17, 4, 20, 22
BATCHES = 1 << BATCH_BITS
"""How many batches there are under one name."""
MAX_RANK = (1 << RANK_BITS) - 1
_ENCODING = 1
"""To be raised when the same row is encoded to other bytes than before."""
_WAY_OUT = (
    "This task published nothing; others of the batch may have, if they could not see it. Let the "
    "batch end with the query, the options and the checkpoint it began with, or begin a new "
    "checkpoint and accept that rows come twice"
)


class WouldLoseRows(LocalError):
    """The broker would drop rows as known that it does not have, or have some twice; the task
    published nothing."""


class RowsDropped(OutcomeUnknown):
    """Somebody published other rows under the query's name meanwhile: some of the task's may have
    been dropped for them."""


@dataclass(frozen=True)
class StreamOwners:
    """Which task publishes to which stream, and in which order."""

    bound: tuple[str, ...]
    """What keys are routed by, `StreamEnvironment.bound_streams`; or the one stream."""
    tasks: int
    order_by: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    """Which columns messages are made of."""

    @cached_property
    def version(self) -> int:
        """What tells this arrangement from any other. How many tasks there are is no part of it."""
        text = json.dumps([_ENCODING, self.bound, self.order_by, self.columns])
        return _first_bits(blake2b(text.encode(), digest_size=8).digest(), VERSION_BITS)

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
        return json.dumps(
            {
                "bound": self.bound,
                "tasks": self.tasks,
                "orderBy": self.order_by,
                "columns": self.columns,
            }
        )

    @classmethod
    def loads(cls, option: str, text: str) -> StreamOwners:
        try:
            value = json.loads(text)
            bound, order, columns = (tuple(value[it]) for it in ("bound", "orderBy", "columns"))
            own = cls(bound, int(value["tasks"]), order, columns)
        except (ValueError, KeyError, TypeError):
            raise BadOption(option, "is set by exactly_once() and by nothing else", text) from None
        return own


def producer_name(query: str, batch: int) -> str:
    """
    >>> producer_name("5f3a", 1_000_000)
    '5f3a/7'
    """
    return f"{query}/{batch >> BATCH_BITS}"


def content_check(ordered: Iterable[Sequence[bytes]]) -> int:
    """What tells the rows of a stream in a batch from any others.

    >>> hex(content_check([[b"a"], [b"b"]]))
    '0xe52b'
    """
    found = blake2b(digest_size=8)
    for messages in ordered:
        found.update(b"".join(messages))  # a message says itself where it ends
    return _first_bits(found.digest(), CHECK_BITS)


def row_ids(batch: int, version: int, check: int, rows: int) -> range:
    """The ids of a stream's rows in a batch, in their order.

    >>> [bin(each) for each in row_ids(1, 0b11, 0b101, 2)][0]
    '0b10011000000000000000001010000000000000000000001'
    """
    before = batch % BATCHES << VERSION_BITS | version
    before = (before << CHECK_BITS | check) << RANK_BITS
    return range(before + 1, before + rows + 1)


def check_known_rows(last_id: int, batch: int, ids: range, stream: str) -> None:
    """Raises if rows of this batch would be dropped though the stream does not have them.

    `last_id` is the stream's under the batch's name, `ids` are those of the batch's rows for it.
    """
    last_batch = _batch_of(last_id, batch)
    if last_batch > batch:
        raise older_checkpoint(stream, batch, f"rows of batch {last_batch}")
    if len(ids) > MAX_RANK:
        raise WouldLoseRows(
            f"a batch may have {MAX_RANK} rows for a stream at most, not {len(ids)}; take fewer at "
            "a time (maxOffsetsPerTrigger of the source), or use more partitions"
        )
    if last_batch == batch and last_id and last_id not in ids:
        raise WouldLoseRows(
            f"{stream!r} has {last_id & MAX_RANK} rows of batch {batch} already, but they are none "
            f"of the {len(ids)} that the batch has for it now: the query, its order, its encoding, "
            f"its input or its checkpoint changed meanwhile. {_WAY_OUT}"
        )


def check_known_version(last_id: int, batch: int, version: int, stream: str) -> None:
    """Raises if another task's stream has rows of this batch that were arranged otherwise, or of a
    later one.

    `last_id` is the stream's under the batch's name.
    """
    last_batch = _batch_of(last_id, batch)
    if last_batch > batch:
        raise older_checkpoint(stream, batch, f"rows of batch {last_batch}")
    known = last_id >> CHECK_BITS + RANK_BITS & (1 << VERSION_BITS) - 1
    if last_batch == batch and last_id and known != version:
        raise WouldLoseRows(
            f"{stream!r} has rows of batch {batch} already that were arranged otherwise: the "
            "target's partitions, the order, the columns or Warren's encoding changed meanwhile, "
            f"and rows would be in two streams. {_WAY_OUT}"
        )


def check_stored_rows(last_id: int, batch: int, ids: range, stream: str) -> None:
    """Raises if others may have taken the place of rows that were published and confirmed.

    `last_id` is the stream's afterwards.
    """
    if last_id == ids[-1]:
        return
    raise RowsDropped(
        f"the last row that {stream!r} has of this query is row {last_id & MAX_RANK} of batch "
        f"{_batch_of(last_id, batch)}, and not the last of the {len(ids)} that this task has just "
        f"published as batch {batch}: another task published other rows under the same query, or "
        "the stream was made again. Some of these rows may not be stored. If no other driver or "
        "executor runs the query any more, begin a new checkpoint and accept that rows come twice"
    )


def older_checkpoint(stream: str, batch: int, found: str) -> WouldLoseRows:
    return WouldLoseRows(
        f"{stream!r} has {found} of this query already, so those of batch {batch} would be dropped "
        "or come twice: the checkpoint is older than the stream. This task published nothing. Go "
        "on from the newest checkpoint, or begin a new one and accept that rows come twice"
    )


def _batch_of(last_id: int, batch: int) -> int:
    """The batch of an id under the same name as `batch`."""
    return batch - batch % BATCHES + (last_id >> VERSION_BITS + CHECK_BITS + RANK_BITS)


def _first_bits(digest: bytes, bits: int) -> int:
    """Of eight bytes."""
    return int.from_bytes(digest) >> 64 - bits
