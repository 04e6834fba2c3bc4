"""What an environment lends to its consumers: routes, connections, and threads for later work."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sharding.stream.connections.attachments import SubscriberHandler
from sharding.stream.protocol.constants import Broker, Limits
from sharding.stream.routes.near_replicas import Placement
from sharding.stream.routes.values import Partitions, StreamRoute

if TYPE_CHECKING:
    from sharding.stream.connections.connection import StreamClient


class Routes(Protocol):
    """Where streams live; `RouteCache` in real life."""

    def route(self, stream: str, timeout: float) -> StreamRoute: ...

    def leader(self, stream: str, timeout: float) -> Broker: ...

    def partitions(self, super_stream: str, timeout: float) -> Partitions: ...

    def suspect(self, name: str, reason: str) -> None: ...


class Connections(Protocol):
    """Connections by node; `Pool` in real life."""

    def subscriber(
        self,
        candidates: Sequence[Broker],
        stream: str,
        handler: SubscriberHandler,
        deadline: float,
    ) -> tuple[StreamClient, int]: ...

    def release(self, client: StreamClient) -> None: ...


class Scheduled(Protocol):
    @property
    def cancelled(self) -> bool: ...


class Later(Protocol):
    """Runs what may wait, apart from the caller; `Recovery` in real life."""

    def schedule(self, delay: float, job: Callable[[], None]) -> Scheduled:
        """Cancelled from the start if the environment is closed."""


@dataclass(frozen=True)
class Access:
    routes: Routes
    pool: Connections
    later: Later
    placement: Placement = Placement()
    limits: Limits = Limits()
    clock: Callable[[], float] = time.monotonic
    rng: random.Random = field(default_factory=random.Random)
