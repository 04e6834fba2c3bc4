"""How eagerly the route cache asks the cluster; every period is an option, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sharding.errors import InvalidInput


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
    """… up to this, and starts anew after a calm of twice as long."""
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
