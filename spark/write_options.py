"""What a sink can be asked for: where to, from which columns, and how long to wait.

| option | default | meaning |
|---|---|---|
| `superStream`, `stream`, `queue` | exactly one | where the rows go; `queue` is a sharded one |
| `keyColumn` | `key`, if there is one | decides the partition or shard; needed for those |
| `valueColumn` | `value` | the body |
| `propertiesColumn` | `properties`, if there is one | struct of AMQP's properties |
| `headersColumn` | `headers`, if there is one | map of application properties or headers |
| `filterColumn` | none | the filter value of each row; streams on RabbitMQ 3.13 or newer |
| `routing` | `hash` | `broker`: by the binding keys of the super stream |
| `compression` | `none` | of sub-entry batches: `gzip`, `snappy`, `lz4`, `zstd` |
| `subEntryMessages` | 250; 0 with filters or exactly_once | how many messages share an entry |
| `amqpUri` | `amqp://localhost:5672` | of queue shards: addresses of one cluster, without a login |
| `through` | `exchange` | of queue shards: `default` is cheaper, and consumers see it |
| `maxUnconfirmed` | 50000; queues 2000 | how many messages may be on their way at once |
| `confirmTimeout` | `30s` | for the broker's word on one message |
| `flushTimeout` | `2m` | for the outcome of all that is left at the end of a task |
| `maxTaskBytes` | 536870912 | what a task of `exactly_once` may hold: all its rows of a batch |

Columns that no option names are not published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from spark.credentials import uri_without_login
from spark.option_values import BadOption, OptionValues

Kind: TypeAlias = Literal["superStream", "stream", "queue"]
Routing: TypeAlias = Literal["hash", "broker"]
Through: TypeAlias = Literal["exchange", "default"]
Codec: TypeAlias = Literal["none", "gzip", "snappy", "lz4", "zstd"]

_ROUTING: dict[str, Routing] = {"hash": "hash", "broker": "broker"}
_THROUGH: dict[str, Through] = {"exchange": "exchange", "default": "default"}
_CODECS: dict[str, Codec] = {
    "none": "none", "gzip": "gzip", "snappy": "snappy", "lz4": "lz4", "zstd": "zstd"
}  # fmt: skip
_KINDS: tuple[Kind, ...] = ("superStream", "stream", "queue")
_ONLY_STREAMS = ("filterColumn", "compression", "subEntryMessages", "maxTaskBytes")
_ONLY_QUEUES = ("amqpUri", "through")
_SPARKS_OWN = ("checkpointLocation", "path", "queryName")  # it hands all of a query's options on
_DEFAULT_AMQP = "amqp://localhost:5672"
OWN_SHARDS = "ownShards"
"""Set by `exactly_once`, and by nothing else: it holds only with the query that is made there."""


@dataclass(frozen=True)
class ColumnNames:
    """The columns as asked for; None is the default name, if there is such a column."""

    key: str | None = None
    value: str | None = None
    properties: str | None = None
    headers: str | None = None
    filter: str | None = None


@dataclass(frozen=True)
class WriteOptions:
    kind: Kind
    name: str
    """Of the stream, super stream or logical queue."""
    columns: ColumnNames = ColumnNames()
    routing: Routing = "hash"
    compression: Codec = "none"
    sub_entry_messages: int | None = None
    amqp_uris: tuple[str, ...] = (_DEFAULT_AMQP,)
    through: Through = "exchange"
    max_unconfirmed: int = 50_000
    confirm_timeout: float = 30.0
    flush_timeout: float = 120.0
    max_task_bytes: int = 512 * 1024 * 1024
    own_shards: str | None = None
    """The text of an `OwnShards`."""

    @classmethod
    def parse(cls, values: OptionValues) -> WriteOptions:
        """Asks for every name, whatever the target, so that none of them is taken for unknown."""
        for name in _SPARKS_OWN:
            values.given(name)
        kind: Kind = next(kind for kind in _KINDS if kind == values.one_of(*_KINDS))
        for name in _ONLY_STREAMS:
            if values.given(name) and kind == "queue":
                raise BadOption(name, "is for streams; a queue has no such thing", name)
        for name in _ONLY_QUEUES:
            if values.given(name) and kind != "queue":
                raise BadOption(name, "is for queue shards", kind)
        if values.given("routing") and kind != "superStream":
            raise BadOption("routing", "is for super streams", kind)
        compression = values.choice("compression", _CODECS, "none")
        sub_entries = 100 if compression != "none" else None
        if values.given("subEntryMessages"):
            sub_entries = values.whole("subEntryMessages", 0)
        if compression != "none" and not sub_entries:
            raise BadOption("subEntryMessages", "must be at least 1 with a compression", 0)
        columns = ColumnNames(
            key=values.text("keyColumn"),
            value=values.text("valueColumn"),
            properties=values.text("propertiesColumn"),
            headers=values.text("headersColumn"),
            filter=values.text("filterColumn"),
        )
        if columns.filter and sub_entries:
            raise BadOption("filterColumn", "can't be combined with subEntryMessages", sub_entries)
        return cls(
            kind=kind,
            name=values.text(kind, ""),
            columns=columns,
            routing=values.choice("routing", _ROUTING, "hash"),
            compression=compression,
            sub_entry_messages=sub_entries,
            amqp_uris=_amqp_uris(values),
            through=values.choice("through", _THROUGH, "exchange"),
            max_unconfirmed=values.whole(
                "maxUnconfirmed", 2_000 if kind == "queue" else 50_000, least=1
            ),
            confirm_timeout=values.seconds("confirmTimeout", 30.0),
            flush_timeout=values.seconds("flushTimeout", 120.0),
            max_task_bytes=values.whole("maxTaskBytes", 512 * 1024 * 1024, least=1),
            own_shards=values.text(OWN_SHARDS),
        )


def _amqp_uris(values: OptionValues) -> tuple[str, ...]:
    uris = values.names("amqpUri") or (_DEFAULT_AMQP,)
    schemes = {uri_without_login("amqpUri", uri).scheme for uri in uris}
    if not schemes <= {"amqp", "amqps"}:
        raise BadOption("amqpUri", "must begin with amqp:// or amqps://", ", ".join(uris))
    return uris
