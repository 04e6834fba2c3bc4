"""`exactly_once`: a streaming query that stores every row in its stream once, whatever fails.

    exactly_once(orders, superStream="invoices", keyColumn="customer", order_by=["offset"]) \\
        .option("checkpointLocation", "…").start()

It returns the writer of the query, for the trigger, the checkpoint and the output mode. The query
shuffles each row to the one task that owns its stream; see `own_shards` for why that is needed, and
for the rules.

What it can't know, and asks for:

* The rows of a batch depend on its input alone. Expressions that Spark itself calls not
  deterministic are refused, but under Spark Connect, whose client can't see that; a function of
  one's own that reads a clock is not seen.
* The checkpoint is not deleted, or everything comes twice: its query id is the producer's name.
* The partitions of the target stay as many as they are while a batch is unfinished.
* A stream remembers 255 names, so as many queries may write to it.

The broker must be reachable from where this is called, as it is asked for the partitions; under
Spark Connect that is the client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from spark.message_columns import MessageColumns
from spark.option_values import BadOption
from spark.own_shards import OwnShards
from spark.targets import parse, resolve
from spark.write_options import OWN_SHARDS, WriteOptions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

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
    if not rows.isStreaming:
        rule = "must be a streaming DataFrame: a batch has no id by which Spark repeats it"
        raise BadOption("the rows of exactly_once", rule, "a batch DataFrame")
    columns = MessageColumns.find(write, rows.schema)
    order = _order_columns(order_by, rows.schema)
    _check_deterministic(rows)
    own = own_shards(resolve(connect, write).streams, tasks, order)
    kept = dict.fromkeys(
        name
        for name in (columns.value, columns.key, columns.properties, columns.headers, *order)
        if name is not None
    )
    chosen = rows.select(*(_exactly(rows, name) for name in kept))
    placed = chosen.repartitionById(own.tasks, _task_column(own, columns))
    return placed.writeStream.format(FORMAT).options(**texts, **{OWN_SHARDS: own.dumps()})


def own_shards(streams: Sequence[str], tasks: int | None, order_by: Sequence[str]) -> OwnShards:
    """More tasks than streams would have nothing to do."""
    if tasks is not None and tasks < 1:
        raise BadOption("tasks", "must be at least 1", tasks)
    wanted = len(streams) if tasks is None else min(tasks, len(streams))
    return OwnShards(tuple(streams), wanted, tuple(order_by))


def _task_column(own: OwnShards, columns: MessageColumns) -> Column:
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
    if write.own_shards is not None:
        raise BadOption(OWN_SHARDS, "is set by exactly_once()", "a value")
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


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
