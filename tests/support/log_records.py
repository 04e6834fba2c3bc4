"""A map log as a list of records."""

from __future__ import annotations

from collections.abc import Iterable

from sharding.maps.map_log import State, apply


def replay(records: Iterable[bytes], state: State | None = None) -> State:
    """The state after all `records`, read from the first, or from `state` on."""
    current = state if state is not None else State()
    for record in records:
        current = apply(current, record).state
    return current
