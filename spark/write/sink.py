"""The sinks of `format("warren")`, batch and streaming, over Arrow.

A task succeeds only when every one of its rows is confirmed. A task that fails is run again by
Spark, and so may a batch be: the plain sinks are at-least-once. `exactly_once` makes the query of
the third writer.

Spark calls for a streaming writer twice in each batch, the second time to commit. By then all rows
are stored, so a cluster that can't be reached at that moment must not fail the batch: the driver
looks the target up if it can, and otherwise the tasks do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from sharding.errors import LocalError, is_retryable
from spark.options.connect import ConnectOptions
from spark.options.values import BadOption
from spark.options.write import STREAM_OWNERS, MessageColumns, WriteOptions
from spark.process import environment
from spark.write.exactly_once_rules import StreamOwners
from spark.write.messages import RowCount, of_batch, of_rows
from spark.write.targets import Target, parse, producer_options, resolve, sender_to

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from sharding.stream.producer.producer import Producer

BATCH_ID, QUERY_ID = "streaming.sql.batchId", "sql.streaming.queryId"


@dataclass(frozen=True)
class Stored(WriterCommitMessage):
    """How many rows a task has stored."""

    rows: int


@dataclass(frozen=True)
class Task:
    """All that a task needs to publish its rows; made on the driver, and pickled."""

    connect: ConnectOptions
    options: WriteOptions
    columns: MessageColumns
    target: Target | None = None

    def publish(self, batches: Iterator[pa.RecordBatch]) -> Stored:
        count = RowCount()
        key_needed = self.options.kind != "stream"
        with sender_to(self.connect, self.options, self.target) as sender:
            for batch in batches:
                sender.send(of_batch(batch, self.columns, count, key_needed=key_needed))
            return Stored(sender.finish())


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceArrowWriter:
    connect, write = _checked(options, overwrite)
    if write.stream_owners is not None:
        raise BadOption(STREAM_OWNERS, "is for streaming queries made by exactly_once()", "a batch")
    columns = MessageColumns.find(write, schema)
    return BatchWriter(Task(connect, write, columns, resolve(connect, write)))


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    connect, write = _checked(options, overwrite)
    columns = MessageColumns.find(write, schema)
    if write.stream_owners is not None:
        own = StreamOwners.loads(STREAM_OWNERS, write.stream_owners)
        return ExactlyOnceWriter(Task(connect, write, columns), own)
    return StreamWriter(Task(connect, write, columns, _target_if_reachable(connect, write)))


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, task: Task) -> None:
        self._task = task

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Stored:
        return self._task.publish(iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, task: Task) -> None:
        self._task = task

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Stored:
        return self._task.publish(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing is left to do: the rows are stored."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing can be undone: what is stored stays, and the batch is run again."""


class ExactlyOnceWriter(StreamWriter):
    """Works only in the query that `exactly_once` makes, and refuses to do so in another."""

    def __init__(self, task: Task, own: StreamOwners) -> None:
        super().__init__(task)
        self._own = own

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Stored:
        from spark.write.exactly_once import TaskRows, publish_task_rows

        task, own = self._task, self._own
        number, query, batch = _place_in_query()
        rows = TaskRows(own, number, task.options.max_task_bytes)
        count = RowCount()
        for each in iterator:
            messages = of_batch(each, task.columns, count, key_needed=len(own.streams) > 1)
            rows.add(messages.encoded(), messages.keys, each)
        with environment(task.connect) as found:

            def open_producer(stream: str, name: str) -> Producer:
                return found.producer(stream, producer_options(task.options, name))

            stored = publish_task_rows(
                own,
                rows,
                query=query,
                batch=batch,
                last_id=found.last_publishing_id,
                open_producer=open_producer,
                timeout=task.options.flush_timeout,
            )
        return Stored(stored)


def _checked(options: Mapping[str, str], overwrite: bool) -> tuple[ConnectOptions, WriteOptions]:
    if overwrite:
        rule = "must be append: what is stored in a stream or a queue can't be overwritten"
        raise BadOption("the save mode", rule, "overwrite")
    return parse(options)


def _target_if_reachable(connect: ConnectOptions, options: WriteOptions) -> Target | None:
    try:
        return resolve(connect, options)
    except Exception as error:
        if is_retryable(error):
            return None
        raise


def _place_in_query() -> tuple[int, str, int]:
    """The number of this task, the query's id and the batch's."""
    from pyspark import TaskContext

    context = TaskContext.get()
    batch = context.getLocalProperty(BATCH_ID) if context is not None else None
    query = context.getLocalProperty(QUERY_ID) if context is not None else None
    if context is None or batch is None or query is None:
        raise LocalError("exactly_once() needs a streaming query: Spark gave no batch id")
    return context.partitionId(), query, int(batch)


# `publish_partition`: for code below DataFrames, with the options and promises of the plain sink.
#
#     options = PublishOptions.of(superStream="invoices", keyColumn="customer").resolved()
#     rdd.foreachPartition(lambda rows: publish_partition(rows, options))
#
# A row is a `Row` or a mapping, taken by the names of its columns; a pair of key and body; or a
# body alone. The call returns when every row is confirmed, and raises otherwise: at-least-once.


@dataclass(frozen=True)
class PublishOptions:
    """The options of the sink, parsed and checked. Goes to executors as it is.

    A password among the options goes with it; one in a file or an environment variable does not.
    """

    connect: ConnectOptions
    write: WriteOptions
    target: Target | None = None

    @classmethod
    def of(cls, **options: Any) -> PublishOptions:
        """From the sink's options by their names, in any case. Asks no broker."""
        connect, write = parse({name: str(value) for name, value in options.items()})
        if write.stream_owners is not None:
            raise BadOption(STREAM_OWNERS, "is set by exactly_once()", "a value")
        return cls(connect, write)

    def resolved(self) -> PublishOptions:
        """The same, with the target looked up once, for all tasks; raises if it is not there."""
        return replace(self, target=resolve(self.connect, self.write))


def publish_partition(rows: Iterable[object], options: PublishOptions) -> None:
    """Publish `rows` and wait until all are stored."""
    write = options.write
    names = write.columns
    columns = MessageColumns(
        value=names.value or "value",
        key=names.key or "key",
        properties=names.properties or "properties",
        headers=names.headers or "headers",
        filter=names.filter,
    )
    asked_for = (names.key, names.properties, names.headers, names.filter)
    parts = of_rows(
        rows,
        columns,
        key_needed=write.kind != "stream",
        needed=[name for name in asked_for if name is not None],
    )
    with sender_to(options.connect, write, options.target) as sender:
        for messages in parts:
            sender.send(messages)
        sender.finish()
