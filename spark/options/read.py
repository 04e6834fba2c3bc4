"""What a source can be asked for, besides how to reach the cluster (`options`).

| option | default | meaning |
|---|---|---|
| `stream`, `superStream`, `streams`, `streamPattern` | exactly one | what to read: a name, the \
name of a super stream, names with commas between, a regular expression for whole names |
| `managementUrl` | none | `http://host:15672`; needed for `streamPattern`, and only for that |
| `startingOffsets` | batch `earliest`, streaming `latest` | see `Positions`; a running checkpoint \
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
| `credits` | `32` | how many chunks of a stream may be on their way to a task; with very large \
ones fewer take less memory |
| `batchMax` | `16777216` | how many bytes of messages, unpacked, become one Arrow batch; a \
message that is larger makes one of its own |
| `uncompressedMax` | `67108864` | a compressed sub-entry batch that unpacks to more fails the \
query |
| `chunkMax` | `268435456` | so does a chunk that is larger as it arrives |
| `storeOffsets` | none | streaming: a name under which the broker keeps how far the query is, for \
others to see its lag. The checkpoint decides where a query goes on, never this |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import Literal, Protocol, TypeAlias

from sharding.cluster.management import Management, NoAnswer
from sharding.errors import RemoteError, Unreachable
from sharding.stream.errors import StreamNotFound
from sharding.stream.options import ConsumerOptions
from sharding.stream.protocol.constants import Limits
from spark.options.connect import ConnectOptions, uri_without_login
from spark.options.values import BadOption, OptionValues, parse_json_object
from spark.read.columns import COLUMNS, DEFAULT_COLUMNS


@dataclass(frozen=True)
class ChunkFilter:
    """No values: everything. Brokers filter whole chunks, so rows with other values come along."""

    values: tuple[str, ...] = ()
    match_unfiltered: bool = False

    @classmethod
    def parse(cls, options: OptionValues) -> ChunkFilter:
        found = cls(
            options.names("filterValues"),
            options.boolean("matchUnfiltered", False),
        )
        if found.match_unfiltered and not found.values:
            raise BadOption("matchUnfiltered", "needs filterValues", "none")
        return found


_MAX_OFFSET = 2**63 - 1


# Where to begin and to end reading, as the options `startingOffsets` and `endingOffsets` say it.
#
#     earliest                                    the first message there is latest
#     after the last message there is 2026-01-31T12:00:00Z                        the first message
#     stored at that time or later {"invoices-0": 17, "invoices-1": "latest"}  each stream by
#     itself: an offset or one of the above
#
# An end is not read itself: 17 to 20 are three offsets. An object must name every stream that is
# read, and no other.


class Place(Enum):
    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True)
class Time:
    """A time, in milliseconds since 1970, as streams count it."""

    milliseconds: int


Position: TypeAlias = Place | Time | int


@dataclass(frozen=True)
class Positions:
    """One position for all streams, or one for each."""

    option: str
    everywhere: Position | None = None
    by_stream: tuple[tuple[str, Position], ...] = ()

    @classmethod
    def parse(cls, option: str, text: str) -> Positions:
        if not text.startswith("{"):
            return cls(option, everywhere=_position(option, text))
        pairs = parse_json_object(option, text).items()
        return cls(option, by_stream=tuple((name, _position(option, at)) for name, at in pairs))

    def for_streams(self, streams: Iterable[str]) -> dict[str, Position]:
        """The position in each of these streams."""
        if self.everywhere is not None:
            return dict.fromkeys(streams, self.everywhere)
        wanted, given = list(streams), dict(self.by_stream)
        missing = [name for name in wanted if name not in given]
        unknown = [name for name in given if name not in wanted]
        if unknown:
            raise BadOption(self.option, f"must name only {_few(wanted)}", _few(unknown))
        if missing:
            rule = f"must name every stream; {_few(missing)} missing"
            raise BadOption(self.option, rule, _few(list(given)))
        return {name: given[name] for name in wanted}


def resolve(
    position: Position, first: int, end: int, offset_at: Callable[[int], int | None]
) -> int:
    """The offset that `position` means in a stream that begins at `first` and ends before `end`.

    A time later than all that is stored means the end: what comes next is later still.
    """
    if position is Place.EARLIEST:
        return first
    if position is Place.LATEST:
        return end
    if isinstance(position, Time):
        found = offset_at(position.milliseconds)
        return end if found is None else found
    assert isinstance(position, int)
    return position


def _position(option: str, value: object) -> Position:
    rule = "must be earliest, latest, a time with its zone (2026-01-31T12:00:00Z), or a JSON object"
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_OFFSET:
        return value
    if not isinstance(value, str):
        raise BadOption(option, f"{rule} from streams to such or to offsets from 0", value)
    if value.lower() in ("earliest", "latest"):
        return Place(value.lower())
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        raise BadOption(option, rule, value) from None
    if time.tzinfo is None:
        raise BadOption(option, rule, value)
    return Time(max(0, round(time.timestamp() * 1000)))


def _few(names: list[str], most: int = 5) -> str:
    """
    >>> _few(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "nothing"


Kind: TypeAlias = Literal["stream", "superStream", "streams", "streamPattern"]
_KINDS: tuple[Kind, ...] = ("stream", "superStream", "streams", "streamPattern")


class Cluster(Protocol):
    """What is asked of the cluster; `StreamEnvironment` in real life."""

    def partitions(self, super_stream: str) -> tuple[str, ...]: ...

    def route(self, stream: str) -> object: ...

    def exists(self, stream: str) -> bool: ...


@dataclass(frozen=True)
class Selection:
    kind: Kind
    names: tuple[str, ...] = ()
    """Of streams, or of the one super stream."""
    pattern: str = ""
    management_url: str = ""

    @classmethod
    def parse(cls, values: OptionValues) -> Selection:
        given = values.one_of(*_KINDS)
        kind = next(kind for kind in _KINDS if kind == given)
        url = values.text("managementUrl", "")
        names = values.names("streams")
        pattern = values.text("streamPattern", "")
        single = values.text("stream") or values.text("superStream")
        if url:
            uri_without_login("managementUrl", url, ("http", "https"))
        if kind != "streamPattern":
            if url:
                raise BadOption("managementUrl", "is for streamPattern only", kind)
            return cls(kind, (single,) if single else names)
        try:
            re.compile(pattern)
        except re.error as problem:
            rule = f"must be a regular expression ({problem})"
            raise BadOption("streamPattern", rule, pattern) from None
        if not url:
            rule = "needs managementUrl (http://host:15672): only the management API lists streams"
            raise BadOption("streamPattern", rule, "none")
        return cls(kind, pattern=pattern, management_url=url.rstrip("/"))

    def find(
        self, cluster: Cluster, all_streams: Callable[[], Iterable[str]], *, missing_ok: bool
    ) -> dict[str, int]:
        """The streams there are now, in order, each with its number in its super stream."""
        if self.kind == "superStream":
            return self._of_super_stream(cluster)
        if self.kind == "streamPattern":
            matches = re.compile(self.pattern).fullmatch
            return dict.fromkeys(sorted(name for name in all_streams() if matches(name)), 0)
        missing = [name for name in self.names if not _exists(cluster, name)]
        if missing and not missing_ok:
            raise BadOption(self.kind, "must exist", ", ".join(missing))
        return dict.fromkeys((name for name in self.names if name not in missing), 0)

    def _of_super_stream(self, cluster: Cluster) -> dict[str, int]:
        (name,) = self.names
        try:
            found = cluster.partitions(name)
        except StreamNotFound:
            found = ()
        if not found:
            raise BadOption("superStream", "must be a super stream that exists", name)
        return {stream: number for number, stream in enumerate(found)}


def _exists(cluster: Cluster, stream: str) -> bool:
    """From memory, if it says yes. A no may be old, and is asked for again."""
    try:
        cluster.route(stream)
    except StreamNotFound:
        return cluster.exists(stream)
    return True


def listed_streams(options: ConnectOptions, management_url: str) -> list[str]:
    """The names of all streams in the virtual host, as the management API lists them."""
    login = options.credentials.login()
    management = Management(management_url, login.user, login.password)
    try:
        answer = management.get("queues", options.vhost, timeout=options.request_timeout)
    except NoAnswer as error:
        if error.status is None or error.status >= 500:  # its node restarts, say
            raise Unreachable(str(error)) from None
        raise
    try:
        return [str(queue["name"]) for queue in answer if queue.get("type") == "stream"]
    except (AttributeError, KeyError, TypeError):
        raise RemoteError(
            f"{management_url} does not answer as RabbitMQ's management API does"
        ) from None


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
    credits: int = ConsumerOptions.credits
    store_offsets: str | None = None
    only_streaming: tuple[str, ...] = ()
    """The given options that a batch has no use for."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        values = OptionValues(options, "reading")
        found = cls(
            connect=replace(ConnectOptions.parse(values), limits=_limits(values)),
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
            credits=values.whole("credits", ConsumerOptions.credits, least=2, most=1000),
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


def _limits(values: OptionValues) -> Limits:
    return Limits(
        chunk_max=values.whole("chunkMax", Limits.chunk_max, least=1),
        uncompressed_max=values.whole("uncompressedMax", Limits.uncompressed_max, least=1),
        batch_max=values.whole("batchMax", Limits.batch_max, least=1),
    )


def _reference(values: OptionValues) -> str | None:
    name = values.text("storeOffsets")
    if name is not None and len(name.encode()) > _MAX_REFERENCE_BYTES:
        rule = f"must be a name of at most {_MAX_REFERENCE_BYTES} bytes"
        raise BadOption("storeOffsets", rule, name)
    return name
