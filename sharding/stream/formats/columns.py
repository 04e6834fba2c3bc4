"""Which columns a reader of batches asks for."""

from __future__ import annotations

from dataclasses import dataclass

from sharding.errors import InvalidInput


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
