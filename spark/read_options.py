"""What a source can be asked for, besides how to reach the cluster (`options`).

| option | default | meaning |
|---|---|---|
| `stream`, `superStream`, `streams`, `streamPattern` | exactly one | what to read: a name, the \
name of a super stream, names with commas between, a regular expression for whole names |
| `managementUrl` | none | `http://host:15672`; needed for `streamPattern`, and only for that |
| `startingOffsets` | batch `earliest`, streaming `latest` | see `positions`; a running checkpoint \
is stronger; streams that are found later are read from their beginning |
| `endingOffsets` | `latest` | batch only |
| `maxOffsetsPerTrigger` | none | streaming: the most that one batch may read |
| `minOffsetsPerTrigger` | none | streaming: wait for so many, but not longer than… |
| `maxTriggerDelay` | `15m` | …this |
| `minPartitions` | one per stream | at least so many tasks, if there are as many rows |
| `maxRecordsPerPartition` | none | no task reads more than this |
| `failOnDataLoss` | `true` | fail when messages were deleted before they were read |
| `columns` | `key,value,stream,partition,offset,timestamp` | which columns, in which order; those \
that are left out cost nothing |
| `includeProperties`, `includeHeaders`, `includeNode` | `false` | add the column `properties`, \
`headers`, or `node`: host and port of the node that a row was read from |
| `rawMessages` | `false` | `value` is the message as it was published, not looked into |
| `filterValues` | none | names with commas between: the broker leaves out chunks that have none \
of these filter values. What comes may hold others: select again by the rows' content |
| `matchUnfiltered` | `false` | with `filterValues`: also messages without a filter value |
| `storeOffsets` | none | streaming: a name under which the broker keeps how far the query is, for \
others to see its lag. The checkpoint decides where a query goes on, never this |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark.columns import COLUMNS, DEFAULT_COLUMNS
from spark.filters import ChunkFilter
from spark.option_values import BadOption, OptionValues
from spark.options import ConnectOptions
from spark.positions import Place, Positions
from spark.selection import Selection

_ONLY_STREAMING = (
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "storeOffsets"
)  # fmt: skip
_MAX_REFERENCE_BYTES = 255


@dataclass(frozen=True)
class ReadOptions:
    connect: ConnectOptions
    selection: Selection
    starting: Positions | None = None
    ending: Positions | None = None
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_trigger_delay: float = 900.0
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    raw: bool = False
    filter: ChunkFilter = field(default_factory=ChunkFilter)
    store_offsets: str | None = None
    only_streaming: tuple[str, ...] = ()
    """The given options that a batch has no use for."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        values = OptionValues(options, "reading")
        found = cls(
            connect=ConnectOptions.parse(values),
            selection=Selection.parse(values),
            starting=_positions(values, "startingOffsets"),
            ending=_positions(values, "endingOffsets"),
            max_offsets=values.whole("maxOffsetsPerTrigger", least=1),
            min_offsets=values.whole("minOffsetsPerTrigger", least=1),
            max_trigger_delay=values.seconds("maxTriggerDelay", 900.0),
            min_partitions=values.whole("minPartitions", least=1),
            max_records_per_partition=values.whole("maxRecordsPerPartition", least=1),
            fail_on_data_loss=values.boolean("failOnDataLoss", True),
            columns=_columns(values),
            raw=values.boolean("rawMessages", False),
            filter=ChunkFilter.parse(values),
            store_offsets=_reference(values),
            only_streaming=tuple(name for name in _ONLY_STREAMING if values.given(name)),
        )
        values.refuse_unknown()
        found._check(values)
        return found

    def for_batch(self) -> ReadOptions:
        """Itself, if a batch can be read with it."""
        if self.only_streaming:
            raise BadOption(self.only_streaming[0], "is for streaming only", "a batch")
        if self.starting is not None and self.starting.everywhere is Place.LATEST:
            raise BadOption("startingOffsets", "can't be latest for a batch: it is empty", "latest")
        if self.ending is not None and self.ending.everywhere is Place.EARLIEST:
            raise BadOption("endingOffsets", "can't be earliest: it is empty", "earliest")
        return self

    def for_streaming(self) -> ReadOptions:
        """Itself, if a stream can be read with it."""
        if self.ending is not None:
            raise BadOption("endingOffsets", "is for batches only", "a streaming query")
        return self

    def _check(self, values: OptionValues) -> None:
        low, high = self.min_offsets, self.max_offsets
        if low is not None and high is not None and low > high:
            raise BadOption(
                "minOffsetsPerTrigger", f"must be at most maxOffsetsPerTrigger, {high}", low
            )
        if values.given("maxTriggerDelay") and low is None:
            raise BadOption("maxTriggerDelay", "needs minOffsetsPerTrigger", "none")
        hidden = {"properties", "headers"} & set(self.columns)
        if self.raw and hidden:
            raise BadOption("rawMessages", "can't have the columns properties and headers", hidden)


def _positions(values: OptionValues, name: str) -> Positions | None:
    text = values.text(name)
    return None if text is None else Positions.parse(name, text)


def _columns(values: OptionValues) -> tuple[str, ...]:
    columns = values.names("columns") or DEFAULT_COLUMNS
    for column in columns:
        if column not in COLUMNS:
            raise BadOption("columns", f"must be among {', '.join(COLUMNS)}", column)
    included = [
        column
        for column in ("properties", "headers", "node")
        if values.boolean(f"include{column.capitalize()}", False) and column not in columns
    ]
    return (*columns, *included)


def _reference(values: OptionValues) -> str | None:
    name = values.text("storeOffsets")
    if name is not None and len(name.encode()) > _MAX_REFERENCE_BYTES:
        rule = f"must be a name of at most {_MAX_REFERENCE_BYTES} bytes"
        raise BadOption("storeOffsets", rule, name)
    return name
