"""`exactly_once`: a streaming query that stores every row in its stream once, whatever fails.

    exactly_once(orders, superStream="invoices", keyColumn="customer", order_by=["offset"]) \\
        .option("checkpointLocation", "…").start()

It returns the writer of the query, for the trigger and the checkpoint; the output mode is append.
The query shuffles each row to the one task that owns its stream; `exactly_once_rules` says why, and
by what rules.

What it can't know, and asks for:

* The rows of a batch depend on its input alone. Expressions that Spark itself calls not
  deterministic are refused, but under Spark Connect, whose client can't see that. A function of
  one's own that reads a clock is not seen before a batch is repeated, and refused then.
* The checkpoint is not deleted, or everything comes twice: its query id is the producer's name.
* Query, options, input and the target's partitions stay as they are while a batch is unfinished:
  it is refused when it is repeated, by every task if partitions, order or columns are others, and
  else by the tasks whose streams have other rows of it.
* A stream remembers 255 names, so as many queries may write to it.

The broker must be reachable from where this is called, as it is asked for the partitions; under
Spark Connect that is the client.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from sharding.errors import LocalError
from spark.options.connect import ConnectOptions
from spark.options.values import BadOption, Hidden
from spark.options.write import STREAM_OWNERS, MessageColumns, WriteOptions
from spark.write.exactly_once_rules import (
    BATCHES,
    StreamOwners,
    check_known_rows,
    check_known_version,
    check_stored_rows,
    content_check,
    older_checkpoint,
    producer_name,
    row_ids,
)
from spark.write.messages import Key
from spark.write.targets import parse, resolve

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

    from sharding.stream.producer.producer import Producer

FORMAT: Final = "warren"
_SORTABLE: Final = (
    *("byte", "short", "integer", "long", "float", "double", "decimal", "boolean"),
    *("string", "varchar", "char", "binary", "date", "time", "timestamp", "timestamp_ntz"),
)


def exactly_once(
    rows: DataFrame,
    *,
    order_by: Sequence[str] = (),
    tasks: int | None = None,
    **options: Any,
) -> DataStreamWriter:
    """The writer of a query that stores `rows` exactly once.

    `options` are those of the sink, for `stream` or `superStream`. `order_by` names the columns by
    which the rows of a batch are stored in each stream; without it their order within a batch is by
    content. `tasks` is how many tasks publish, by default one for each partition; it may differ
    from run to run.
    """
    texts = {name: _text(value) for name, value in options.items()}
    connect, write = parse(texts)
    _check_options(write)
    _check_shown(rows, connect)
    if not rows.isStreaming:
        rule = "must be a streaming DataFrame: a batch has no id by which Spark repeats it"
        raise BadOption("the rows of exactly_once", rule, "a batch DataFrame")
    columns = MessageColumns.find(write, rows.schema)
    order = _order_columns(order_by, rows.schema)
    _check_deterministic(rows)
    own = stream_owners(resolve(connect, write).bound, tasks, order, columns)
    kept = dict.fromkeys(
        name
        for name in (columns.value, columns.key, columns.properties, columns.headers, *order)
        if name is not None
    )
    chosen = rows.select(*(_exactly(rows, name) for name in kept))
    placed = chosen.repartitionById(own.tasks, _task_column(own, columns))
    return placed.writeStream.format(FORMAT).options(**texts, **{STREAM_OWNERS: own.dumps()})


def stream_owners(
    bound: Sequence[str],
    tasks: int | None,
    order_by: Sequence[str],
    columns: MessageColumns | None = None,
) -> StreamOwners:
    """More tasks than streams would have nothing to do."""
    if tasks is not None and tasks < 1:
        raise BadOption("tasks", "must be at least 1", tasks)
    streams = len(set(bound))
    wanted = streams if tasks is None else min(tasks, streams)
    names = () if columns is None else astuple(columns)
    return StreamOwners(tuple(bound), wanted, tuple(order_by), tuple(name or "" for name in names))


def _task_column(own: StreamOwners, columns: MessageColumns) -> Column:
    """The number of the task that owns a row's stream."""
    from pyspark.sql import functions
    from pyspark.sql.pandas.functions import arrow_udf
    from pyspark.sql.types import IntegerType

    if len(own.streams) == 1 or columns.key is None:
        return functions.lit(0)

    # Spark's own hash is another murmur3 (its tail differs), so the rows go through Python.
    def owners(keys: pa.Array) -> pa.Array:
        numbers = [
            None if key is None else own.shard_of(key) % own.tasks for key in keys.to_pylist()
        ]
        return pa.array(numbers, pa.int32())

    # By its hints: Spark warns of a kind that is named, and its stub knows no other way.
    task_of: Callable[[Column], Column] = arrow_udf(owners, IntegerType())  # type: ignore[call-overload]
    return task_of(functions.col(_quoted(columns.key)))


def _check_options(write: WriteOptions) -> None:
    if write.kind == "queue":
        rule = "can't be written exactly once: queues know no publishing ids; use a stream"
        raise BadOption("queue", rule, write.name)
    if write.stream_owners is not None:
        raise BadOption(STREAM_OWNERS, "is set by exactly_once()", "a value")
    if write.sub_entry_messages:
        rule = "can't be combined with exactly_once(): an id would stand for many rows"
        raise BadOption("subEntryMessages", rule, write.sub_entry_messages)
    if write.columns.filter is not None:
        raise BadOption(
            "filterColumn", "can't be combined with exactly_once()", write.columns.filter
        )
    if write.routing != "hash":
        raise BadOption("routing", "must be hash with exactly_once()", write.routing)


def _order_columns(order_by: Sequence[str], schema: StructType) -> tuple[str, ...]:
    if isinstance(order_by, str):
        raise BadOption("order_by", "must be a list of columns", order_by)
    there = {field.name: field.dataType for field in schema.fields}
    for name in order_by:
        if name not in there:
            raise BadOption("order_by", f"must be columns; {name!r} is none", sorted(there))
        kind = there[name].typeName()
        if kind not in _SORTABLE:
            raise BadOption("order_by", f"{name!r} must be a number, text, bytes or a time", kind)
    return tuple(dict.fromkeys(order_by))


def _check_deterministic(rows: DataFrame) -> None:
    plan = getattr(rows, "_jdf", None)
    if plan is not None and not plan.queryExecution().analyzed().deterministic():
        rule = (
            "must be the same when a batch is repeated; something in the query is not "
            "deterministic (rand, uuid, first, collect_list, monotonically_increasing_id, …)"
        )
        raise BadOption("the rows of exactly_once", rule, "such an expression")


def _exactly(rows: DataFrame, name: str) -> Column:
    return rows[_quoted(name)]


def _quoted(name: str) -> str:
    """A column's name as Spark reads it, dots and all."""
    return "`" + name.replace("`", "``") + "`"


def _check_shown(rows: DataFrame, connect: ConnectOptions) -> None:
    """Under Spark Connect the plan of a query is a text, which the server shows and logs with all
    of its options; Spark hides a password only in those of its own plans."""
    if connect.credentials.password is not None and not hasattr(rows, "_jdf"):
        rule = (
            "must not be given to exactly_once() under Spark Connect, whose server shows it in its "
            "UI and event log; use passwordFile or passwordEnv (of the server's executors and of "
            "this process), or WARREN_PASSWORD"
        )
        raise BadOption("password", rule, Hidden())


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_MESSAGE = "message"
SLICE = 10_000


class BatchTooLarge(LocalError):
    """The rows of one task need more memory than they may have."""


class TaskRows:
    """Collects the encoded messages of a task; the owner adds Arrow batches and then publishes."""

    def __init__(self, own: StreamOwners, task: int, max_bytes: int) -> None:
        self._own = own
        self.task = task
        self._max_bytes = max_bytes
        self._bytes = 0
        self._parts: dict[int, list[pa.RecordBatch]] = defaultdict(list)
        self._sorted: dict[int, tuple[pa.ChunkedArray, pa.Array]] = {}

    def add(
        self, messages: Sequence[bytes], keys: Sequence[Key | None] | None, rows: pa.RecordBatch
    ) -> None:
        """`messages` and `keys` of the rows; of `rows` the columns of the order are kept."""
        shards = [0] * len(messages) if keys is None else list(map(self._own.shard_of, keys))
        self._own.check_own(shards, self.task)
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

    def count(self, shard: int) -> int:
        """How many rows there are for a stream."""
        return sum(part.num_rows for part in self._parts.get(shard, ()))

    def ordered(self, shard: int) -> Iterator[list[bytes]]:
        """The messages of a stream in their order, some at a time; all are there by then."""
        if not self._parts.get(shard):
            return
        if shard not in self._sorted:
            table = pa.Table.from_batches(self._parts[shard])
            keys = [(name, "ascending") for name in self._names]
            self._sorted[shard] = table.column(_MESSAGE), pc.sort_indices(table, sort_keys=keys)
        messages, order = self._sorted[shard]
        for start in range(0, len(order), SLICE):
            yield messages.take(order.slice(start, SLICE)).to_pylist()

    def forget(self, shard: int) -> None:
        """The rows of a stream are not needed any more."""
        self._parts.pop(shard, None)
        self._sorted.pop(shard, None)

    @property
    def _names(self) -> list[str]:
        # Numbered: a column of the user's may be called as ours is.
        return [*(f"order {number}" for number in range(len(self._own.order_by))), _MESSAGE]


_CLOSE_TIMEOUT = 2.0


def publish_task_rows(
    own: StreamOwners,
    rows: TaskRows,
    *,
    query: str,
    batch: int,
    last_id: Callable[[str, str], int],
    open_producer: Callable[[str, str], Producer],
    timeout: float,
) -> int:
    """Publish all rows; how many there are, if every one is stored. `WouldLoseRows` comes before
    the task publishes anything, `RowsDropped` afterwards. A task without streams has no rows.

    `last_id` is given a producer's name and a stream, `open_producer` a stream and a name.

    All of a stream's rows are sent again in a replay, also those whose ids the broker knows: it
    counts an id as known before the message is safe, and confirms a duplicate only when the
    original is.
    """
    name, later_name = producer_name(query, batch), producer_name(query, batch + BATCHES)
    with ExitStack() as opened:
        producers: dict[int, Producer] = {}
        ids: dict[int, range] = {}
        mine = own.shards_of(rows.task)
        for shard, stream in enumerate(own.streams) if mine else ():
            if shard not in mine:
                check_known_version(last_id(name, stream), batch, own.version, stream)
        for shard in mine:
            stream, count = own.streams[shard], rows.count(shard)
            if last_id(later_name, stream):
                raise older_checkpoint(stream, batch, "rows of much later batches")
            if count:
                producers[shard] = producer = open_producer(stream, name)
                opened.callback(producer.close, _CLOSE_TIMEOUT)
                known = producer.last_publishing_ids[stream]
            else:
                known = last_id(name, stream)
            check = content_check(rows.ordered(shard))
            ids[shard] = row_ids(batch, own.version, check, count)
            check_known_rows(known, batch, ids[shard], stream)
        for shard, producer in producers.items():
            left = ids[shard]
            for messages in rows.ordered(shard):
                these, left = left[: len(messages)], left[len(messages) :]
                producer.send_encoded(messages, publishing_ids=these, timeout=timeout)
            rows.forget(shard)
        stored = 0
        for producer in producers.values():
            report = producer.flush(timeout)
            report.raise_for_failures()
            stored += report.stored
        for shard in producers:
            stream = own.streams[shard]
            check_stored_rows(last_id(name, stream), batch, ids[shard], stream)
    return stored
