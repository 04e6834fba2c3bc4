"""What can be asked of streams, producers, consumers and the route cache: values, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Literal

from sharding.errors import InvalidInput
from sharding.stream.messages import codecs
from sharding.stream.messages.codecs import Compression
from sharding.stream.producer.publish_entries import MAX_RECORDS
from sharding.stream.protocol.constants import (
    FIRST,
    LAST,
    MAX_REFERENCE_BYTES,
    NEXT,
    OffsetSpec,
)


@dataclass(frozen=True, slots=True)
class Columns:
    """What a batch holds besides offset, timestamp and body."""

    key: bool = False
    properties: bool = False
    application_properties: bool = False
    raw: bool = False
    """The body column is each message as it was published, and is not looked into: for streams
    whose messages are not AMQP 1.0. Then there are no other columns to ask for."""

    def __post_init__(self) -> None:
        if self.raw and (self.key or self.properties or self.application_properties):
            raise InvalidInput(
                "columns", "raw messages have no key and no properties to be read", self
            )


LeaderLocator = Literal["client-local", "balanced", "least-leaders", "random"]

_NAMES = {
    "max_length_bytes": "max-length-bytes",
    "max_age": "max-age",
    "max_segment_bytes": "stream-max-segment-size-bytes",
    "filter_bytes": "stream-filter-size-bytes",
    "initial_cluster_size": "initial-cluster-size",
    "leader_locator": "queue-leader-locator",
}


@dataclass(frozen=True)
class StreamArguments:
    """What is None is left to the broker.

    >>> StreamArguments(max_age=timedelta(hours=2)).over_streams()
    {'max-age': '7200s'}
    """

    max_length_bytes: int | None = None
    """Beyond it the oldest segments are deleted."""
    max_age: timedelta | None = None
    """Segments whose newest message is older are deleted."""
    max_segment_bytes: int | None = None
    """Retention deletes whole segments, so small ones make it exact."""
    filter_bytes: int | None = None
    """The size of the Bloom filter of each chunk, 16 to 255."""
    initial_cluster_size: int | None = None
    """On how many nodes the stream has a copy."""
    leader_locator: LeaderLocator | None = None
    """Which node leads a new stream; `client-local` is the one that is asked."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, int) and value < 1:
                raise InvalidInput(option.name, "must be positive", value)
        if self.max_age is not None and self.max_age <= timedelta():
            raise InvalidInput("max_age", "must be positive", self.max_age)

    def over_streams(self) -> dict[str, str]:
        """As the stream protocol takes them: everything is text."""
        return {name: str(value) for name, value in self._given().items()}

    def over_amqp(self) -> dict[str, str | int]:
        """As `queue_declare` takes them."""
        return {"x-queue-type": "stream"} | {f"x-{k}": v for k, v in self._given().items()}

    def _given(self) -> dict[str, str | int]:
        given: dict[str, str | int] = {}
        for option, name in _NAMES.items():
            value = getattr(self, option)
            if isinstance(value, timedelta):
                given[name] = f"{math.ceil(value.total_seconds())}s"
            elif value is not None:
                given[name] = value
        return given


@dataclass(frozen=True)
class ProducerOptions:
    """The bounds hold for each partition of a super stream, so that one that is away does not hold
    up the others."""

    name: str | None = None
    """Makes the broker drop what it has already, by publishing id, so that messages can be sent
    again after a lost connection. Each partition has ids of its own. Two producers must not use
    one name on one stream at the same time, and a stream remembers 255 names."""
    batch_messages: int = 1_000
    """Written as soon as so many messages are waiting …"""
    batch_bytes: int = 256 * 1024
    """… or so many bytes …"""
    linger: float = 0.005
    """… or when the first of them has waited so many seconds. 0: each message at once."""
    max_unconfirmed: int = 50_000
    """Messages held until the broker has settled them; `send` waits while there are so many."""
    max_unconfirmed_bytes: int = 64 * 1024 * 1024
    """The same in bytes; the one message that crosses the bound is still taken."""
    send_timeout: float = 10
    """How long `send` waits for room, and a write for a broker that does not read."""
    confirm_timeout: float = 30
    """A message not settled so many seconds after it was written makes the producer connect again:
    a named one sends again, an unnamed one reports it as unknown."""
    open_timeout: float = 30
    """For connecting to every partition's leader when the producer is made."""
    recovery_timeout: float = 120
    """A partition that can't be published to for so long fails for good."""
    compression: Compression = Compression.NONE
    """Of sub-entry batches; needs `sub_entry_messages`."""
    sub_entry_messages: int = 0
    """Put so many messages into one entry, which the broker stores, confirms and deduplicates as
    one: under the publishing id of its last message. 0: an entry for each message. An entry costs
    the broker as much as a small message does, so 250 give about twice the messages a second. But
    not every client reads shared entries whole: docs/streams.md."""
    filtering: bool = False
    """Messages may have filter values. Needs RabbitMQ 3.13."""

    def __post_init__(self) -> None:
        if self.name is not None:
            length = len(self.name.encode())
            if not 0 < length <= MAX_REFERENCE_BYTES:
                raise InvalidInput(
                    "name", f"must have 1 to {MAX_REFERENCE_BYTES} bytes in UTF-8", self.name
                )
        for option in ("batch_messages", "batch_bytes", "max_unconfirmed", "max_unconfirmed_bytes"):
            if getattr(self, option) < 1:
                raise InvalidInput(option, "must be at least 1", getattr(self, option))
        for option in ("send_timeout", "confirm_timeout", "open_timeout", "recovery_timeout"):
            if not getattr(self, option) > 0:
                raise InvalidInput(option, "must be more than 0 seconds", getattr(self, option))
        if not self.linger >= 0:
            raise InvalidInput("linger", "must be 0 seconds or more", self.linger)
        self._check_sub_entries()

    def _check_sub_entries(self) -> None:
        if not 0 <= self.sub_entry_messages <= MAX_RECORDS:
            raise InvalidInput(
                "sub_entry_messages", f"must be 0 to {MAX_RECORDS}", self.sub_entry_messages
            )
        if self.compression is not Compression.NONE and not self.sub_entry_messages:
            raise InvalidInput(
                "compression", "needs sub_entry_messages, since batches are compressed", 0
            )
        if self.filtering and self.sub_entry_messages:
            raise InvalidInput(
                "filtering",
                "can't be combined with sub_entry_messages: a batch has no filter value",
                self.sub_entry_messages,
            )
        codecs.require(self.compression)


Offset = Literal["first", "last", "next"] | int | datetime | OffsetSpec
OnDataLoss = Literal["raise", "skip"]

_NAMED = {"first": FIRST, "last": LAST, "next": NEXT}
_MAX_CREDITS = 1000


@dataclass(frozen=True)
class ConsumerOptions:
    """How a consumer reads. The defaults read everything that is stored from now on."""

    offset: Offset = "next"
    """Where to begin: "first", "last" (the last chunk), "next", an offset, or a time, which must
    have a time zone. A named consumer begins after its stored offset, and here if it has none."""
    name: str | None = None
    """Under which offsets are stored, and which the members of a group share."""
    single_active: bool = False
    """Of all consumers with this name only one gets messages at a time, per partition; the broker
    chooses, and another takes over when that one goes. Needs a name, and RabbitMQ 3.11."""
    filter_values: tuple[str, ...] = ()
    """Only chunks that may hold messages with one of these filter values. The broker filters
    whole chunks by Bloom filters, so other messages come along: the application has to look at
    each message again, by what it can see in it. Needs RabbitMQ 3.13."""
    match_unfiltered: bool = False
    """With `filter_values`: messages without a filter value as well."""
    columns: Columns = Columns()
    """Which columns batches have."""
    credits: int = 32
    """How many chunks per partition may wait here for the application. Chunks hold up to some
    thousand messages each; more credits make larger batches, and cost memory."""
    check_crc: bool = True
    on_data_loss: OnDataLoss = "raise"
    """What to do when retention deleted messages before they were read: raise `DataLost`, after
    which one may go on to iterate, or skip them with a warning in the log."""
    require_replica: bool = False
    """Rather fail than read from a leader that has no replica."""
    store_every_messages: int | None = None
    """Store the offset after so many messages, and at close. Needs a name."""
    store_every_seconds: float | None = None
    """Store the offset when it has moved for so long, and at close. Needs a name."""
    subscribe_timeout: float = 15
    """How long the first subscription to each partition may take."""
    recovery_timeout: float = 120
    """For how long to try to connect again before the consumer fails."""

    def __post_init__(self) -> None:
        offset_spec(self.offset)
        _check("credits", "must be from 2 to 1000", self.credits, 2 <= self.credits <= _MAX_CREDITS)
        for option in ("subscribe_timeout", "recovery_timeout"):
            _check(option, "must be more than 0", getattr(self, option), getattr(self, option) > 0)
        for option in ("store_every_messages", "store_every_seconds"):
            every = getattr(self, option)
            _check(option, "must be more than 0, or None", every, every is None or every > 0)
        if self.name is not None:
            fits = 0 < len(self.name.encode()) <= MAX_REFERENCE_BYTES
            _check("name", f"must have 1 to {MAX_REFERENCE_BYTES} bytes", self.name, fits)
        needs_name = self.single_active or self.stores_by_itself
        _check(
            "name",
            "single_active and stored offsets need one",
            self.name,
            self.name or not needs_name,
        )
        _check("on_data_loss", '"raise" or "skip"', self.on_data_loss, self.on_data_loss in _LOSS)
        _check(
            "match_unfiltered", "goes with filter_values", True,
            self.filter_values or not self.match_unfiltered,
        )  # fmt: skip
        if isinstance(self.filter_values, str):
            raise InvalidInput("filter_values", "must be several texts", self.filter_values)

    @property
    def stores_by_itself(self) -> bool:
        return self.store_every_messages is not None or self.store_every_seconds is not None

    def subscription_properties(self, super_stream: str | None) -> dict[str, str]:
        """What Subscribe says about names and filters."""
        properties = {}
        if self.single_active:
            properties = {"single-active-consumer": "true", "name": str(self.name)}
            if super_stream is not None:
                properties["super-stream"] = super_stream
        elif self.name is not None:
            properties = {"name": self.name}
        return properties | self.filter_properties

    @property
    def filter_properties(self) -> dict[str, str]:
        """What Subscribe says about filters."""
        if not self.filter_values:
            return {}
        unfiltered = {"match-unfiltered": str(self.match_unfiltered).lower()}
        return _numbered("filter", self.filter_values) | unfiltered


_LOSS = ("raise", "skip")


def offset_spec(offset: Offset) -> OffsetSpec:
    """
    >>> offset_spec("first").kind.name, offset_spec(17)
    ('FIRST', OffsetSpec(kind=<OffsetType.OFFSET: 4>, value=17))
    """
    if isinstance(offset, OffsetSpec):
        return offset
    if isinstance(offset, str) and offset in _NAMED:
        return _NAMED[offset]
    if isinstance(offset, datetime) and offset.tzinfo is not None:
        return OffsetSpec.since(max(0, round(offset.timestamp() * 1000)))
    if isinstance(offset, int) and not isinstance(offset, bool) and 0 <= offset < 2**63:
        return OffsetSpec.at(offset)
    rule = '"first", "last", "next", an offset from 0, or a datetime with a time zone'
    raise InvalidInput("offset", rule, offset)


def _numbered(name: str, values: Sequence[str]) -> dict[str, str]:
    return {f"{name}.{number}": value for number, value in enumerate(values)}


def _check(field: str, rule: str, found: object, holds: object) -> None:
    if not holds:
        raise InvalidInput(field, rule, found)


@dataclass(frozen=True, slots=True)
class RouteOptions:
    poll_interval: float = 30.0
    """Everything in use is asked for again this often, names that do not exist too."""
    poll_jitter: float = 0.25
    """A poll comes up to this part of the interval early, so that clients spread out."""
    forget_after: float = 300.0
    """What nobody used for so long is dropped, and neither polled nor armed any more."""
    pushes: bool = True
    """Whether streams are armed, so that the broker tells of changes."""
    pressure_limit: float = 0.9
    """Above this part of memory or CPU, pushes are ignored and the poll does the work."""
    coalesce: float = 0.05
    """How long the first news of a change waits for more, so that one query asks for all."""
    round_gap: float = 0.1
    """The time between two rounds of questions about changes; it doubles while changes go on …"""
    round_gap_max: float = 0.25
    """… up to this, and starts again after a calm of twice as long."""
    repeat_gap_max: float = 2.0
    """The same for names that were asked for in such a round shortly before."""
    leader_rounds: int = 7
    """In how many rounds a stream without a leader is asked for again before the next poll."""
    replica_rounds: int = 2
    """The same for one without replicas; a new one has them some 50 ms later, if it ever has."""
    batch_names: int = 500
    """The most names in one query."""
    arms_per_second: float = 100.0
    """The most streams armed in a second, all together."""
    rearm_interval: float = 1.0
    """The least time between two armings of one stream."""
    arm_timeout: float = 1.0
    query_timeout: float = 5.0
    """How long one query may take, with all locators tried."""
    retry_delay: float = 0.2
    """How long to wait after a query failed; it doubles with each further failure …"""
    retry_delay_max: float = 5.0
    """… up to this."""
    max_names: int = 100_000
    """The most names remembered; beyond, the one unused for longest is dropped."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if not isinstance(value, bool) and not value >= 0:
                raise InvalidInput(option.name, "must not be negative", value)
        for name in ("poll_interval", "arms_per_second", "batch_names", "max_names"):
            if not getattr(self, name) > 0:
                raise InvalidInput(name, "must be more than 0", getattr(self, name))
        if self.poll_jitter > 1:
            raise InvalidInput("poll_jitter", "is a part of the interval, 0 to 1", self.poll_jitter)
