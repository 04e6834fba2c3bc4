"""Time that a test moves itself, so that what is promised of deadlines needs no patience."""

from __future__ import annotations

from typing import Any

from sharding.publishing.publisher import ShardedPublisher


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class TimedPublisher(ShardedPublisher):
    """A publisher whose deadlines come when the test says so."""

    def __init__(self, clock: Clock, *arguments: Any, **options: Any) -> None:
        self._clock = clock
        super().__init__(*arguments, **options)
