"""How a stream is made: how much it keeps, how it is cut, where its leader starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Literal

from sharding.errors import InvalidInput

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
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise InvalidInput(field.name, "must be positive", value)
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
        for field, name in _NAMES.items():
            value = getattr(self, field)
            if isinstance(value, timedelta):
                given[name] = f"{math.ceil(value.total_seconds())}s"
            elif value is not None:
                given[name] = value
        return given
