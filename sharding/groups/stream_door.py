"""One worker at a time gets in line for the partitions of a super stream.

The broker gives partition *n* to the consumer that is number *n* modulo all in the partition's own
line, in the order they came. Loads are even only if every line has the same order; two workers
that start together would mix the lines up (seen on 4.0.5: 1, 1, 2, 4, 4 of 12). So whoever
subscribes goes through the door first: a single active consumer of its own name on the first
partition, which reads nothing. Whoever is active is inside; who leaves, or dies, lets the next in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sharding.errors import WarrenError
from sharding.stream.consuming.consumer_options import ConsumerOptions
from sharding.stream.frames.requests import Subscribe, Unsubscribe
from sharding.stream.network.access import Access
from sharding.stream.network.placement import consumer_candidates
from sharding.stream.protocol import NEXT, OffsetSpec

_PREFIX = "warren.door."
_LEAVE_TIMEOUT = 2.0
MAX_GROUP_BYTES = 255 - len(_PREFIX)


@contextmanager
def door(access: Access, stream: str, group: str, timeout: float) -> Iterator[bool]:
    """Whether this worker is inside alone; False if the door did not open in time."""
    deadline = access.clock() + timeout
    guest = _Guest()
    route = access.routes.route(stream, timeout)
    candidates = consumer_candidates(route, access.placement, access.rng)
    client, number = access.pool.subscriber(candidates, stream, guest, deadline)
    properties = ConsumerOptions(name=_PREFIX + group, single_active=True)
    subscribe = Subscribe(number, stream, NEXT, 1, properties.subscription_properties(None))
    try:
        client.call(subscribe, timeout=max(0.0, deadline - access.clock()))
        yield guest.turn.wait(max(0.0, deadline - access.clock())) and not guest.lost
    finally:
        if not guest.lost:
            with suppress(WarrenError):
                client.call(Unsubscribe(number), timeout=_LEAVE_TIMEOUT)
            client.detach_subscriber(number)
        access.pool.release(client)


class _Guest:
    def __init__(self) -> None:
        self.turn = threading.Event()
        self.lost = False

    def on_chunk(self, chunk: memoryview) -> None:
        """One may come, for the one credit; it is not wanted."""

    def on_activity(self, active: bool) -> OffsetSpec:
        if active:
            self.turn.set()
        return NEXT

    def on_lost(self, reason: Exception) -> None:  # noqa: ARG002
        self.lost = True
        self.turn.set()
