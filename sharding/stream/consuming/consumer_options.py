"""What can be asked of a consumer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sharding.errors import InvalidInput
from sharding.stream.formats.columns import Columns
from sharding.stream.protocol import FIRST, LAST, MAX_REFERENCE_BYTES, NEXT, OffsetSpec

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
        for field in ("subscribe_timeout", "recovery_timeout"):
            _check(field, "must be more than 0", getattr(self, field), getattr(self, field) > 0)
        for field in ("store_every_messages", "store_every_seconds"):
            every = getattr(self, field)
            _check(field, "must be more than 0, or None", every, every is None or every > 0)
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
        if self.filter_values:
            properties |= _numbered("filter", self.filter_values)
            properties["match-unfiltered"] = str(self.match_unfiltered).lower()
        return properties


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
