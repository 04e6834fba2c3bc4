"""Storing what failed for the last time, with the reason. Thin I/O.

Published through the default exchange, with confirms and mandatory: a queue that is missing is made
(durable, classic), one that exists is used as it is, whatever its kind. What would make the broker
do more than store the message is moved into headers of ours:

* `expiration`: a dead letter that expires is lost (the broker's own dead-lettering does the same);
* `user_id`: the broker refuses one that is not the publisher's own;
* `CC` and `BCC`: the broker would route a copy by each.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pika

from sharding.amqp.session import Refused
from sharding.errors import RemoteError
from sharding.groups.connections import SideConnection
from sharding.groups.delivery import Dead, Delivery
from sharding.groups.transport import GroupChannel

NO_ROUTE = 312


def dead_letter_properties(delivery: Delivery, dead: Dead, at: float) -> pika.BasicProperties:
    """The message's own properties and headers, with ours added."""
    given = delivery.properties
    properties = pika.BasicProperties() if given is None else copy.copy(given)
    headers = dict(delivery.headers)
    moved: dict[str, Any] = {name: headers.pop(name) for name in ("CC", "BCC") if name in headers}
    for name in ("expiration", "user_id"):
        if getattr(properties, name) is not None:
            moved[name.replace("_", "-")] = getattr(properties, name)
            setattr(properties, name, None)
    properties.headers = {
        **headers,
        **{f"x-warren-{name.lower()}": value for name, value in moved.items()},
        "x-warren-reason": str(dead.why),
        "x-warren-error": dead.error,
        "x-warren-attempts": dead.attempts,
        "x-warren-shard": delivery.shard,
        "x-warren-key": delivery.key,
        "x-warren-time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
    }
    return properties


class DeadLetters:
    def __init__(
        self,
        queue: str,
        side: SideConnection,
        timeout: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.queue = queue
        self._side = side
        self._timeout = timeout
        self._wall_clock = wall_clock
        self._channel: GroupChannel | None = None
        self._turn = asyncio.Lock()

    async def store(self, delivery: Delivery, dead: Dead) -> None:
        """Return when the broker has it; a `RemoteError` or `TimeoutError` says that it may not."""
        properties = dead_letter_properties(delivery, dead, self._wall_clock())
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout):
                    await self._publish(delivery.body, properties)
            except BaseException:
                # A late confirm would be taken for the next one's.
                self._leave_channel()
                raise

    async def _publish(self, body: bytes, properties: pika.BasicProperties) -> None:
        channel = await self._open_channel()
        try:
            stored = await channel.publish_mandatory(self.queue, body, properties)
        except Refused as error:
            if error.code != NO_ROUTE:
                raise
            await channel.declare(self.queue, durable=True)
            stored = await channel.publish_mandatory(self.queue, body, properties)
        if not stored:
            raise RemoteError(f"the broker did not take a dead letter into {self.queue!r}")

    async def _open_channel(self) -> GroupChannel:
        if self._channel is None or self._channel.closed.done():
            self._channel = await self._side.channel()
            await self._channel.confirm_publishes()
        return self._channel

    def _leave_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
