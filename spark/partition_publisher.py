"""`publish_partition`: for code below DataFrames, with the options and promises of the plain sink.

    options = PublishOptions.of(superStream="invoices", keyColumn="customer").resolved()
    rdd.foreachPartition(lambda rows: publish_partition(rows, options))

A row is a `Row` or a mapping, taken by the names of its columns; a pair of key and body; or a body
alone. The call returns when every row is confirmed, and raises otherwise: at-least-once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from spark.message_columns import MessageColumns
from spark.messages import of_rows
from spark.option_values import BadOption
from spark.options import ConnectOptions
from spark.targets import Target, parse, resolve, sender_to
from spark.write_options import OWN_SHARDS, WriteOptions


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
        if write.own_shards is not None:
            raise BadOption(OWN_SHARDS, "is set by exactly_once()", "a value")
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
