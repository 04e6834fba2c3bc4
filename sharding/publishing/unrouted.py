"""Bringing what was kept to its shard: messages that reached an exchange of ours without our keys.

A channel that did not know of a map yet, another client or another language published them. The
broker kept them, and whoever brings them is an ordinary publisher with confirms:

* one at a time: an exclusive consumer is the lock, and who finds it taken waits. Of a process one
  waits, for all who ask meanwhile: many channels may come to know of a map at the same moment;
* in the order in which they were kept, each to the shard of its key, as it was sent. Of one key one
  is on its way: a shard that is full refuses it, and may have room for the next;
* a message is acknowledged when its shard has it; what no shard takes stays where it is.

A connection that is lost in between may bring some of them a second time.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pika

from sharding.amqp.field_table import Malformed
from sharding.amqp.session import ACCESS_REFUSED, Channel, Message, Refused, Session
from sharding.backoff import Backoff
from sharding.cluster.topology import Begins, Topology
from sharding.errors import InvalidInput, RemoteError, ShardUnavailable, Unreachable
from sharding.maps.json_fields import is_text
from sharding.maps.naming import MAX_NAME_BYTES, unrouted
from sharding.maps.shard_map import ShardMap
from sharding.publishing.addressing import forwarded

logger = logging.getLogger("warren.publisher")

_NOT_FOUND = 404
_AT_ONCE = 200
_LAST_WORDS = 5.0
# Each look at a lock that is taken costs the broker a channel and an error in its log.
_LOOK_AGAIN = Backoff(first=0.05, longest=0.25)
_random = random.Random()  # its own, so that nobody else's sequence of numbers changes
_END = "warren.end"


def bring_unrouted(topology: Topology, logical: str) -> Future[int]:
    """Bring all that is kept now to its shards; how many those were.

    Done when nothing that was kept before the call is left, whoever brought it.
    """

    def start(begins: Begins) -> Future[int]:
        async def bring(session: Session, shard_map: ShardMap) -> int:
            return await _bring(session, shard_map, begins)

        return topology.futures.on_connection(logical, bring)

    return topology.kept.bring_once(logical, start)


async def _bring(session: Session, shard_map: ShardMap, begins: Begins) -> int:
    queue = unrouted(shard_map.logical)
    publishing = await session.channel()
    returned: Counter[tuple[str, bytes]] = Counter()
    publishing.on_return(lambda key, body: returned.update([(key, body)]))
    await publishing.confirm_publishes()
    attempt = 0
    while True:
        reading = await session.channel()
        try:
            arrived = await _read(reading, queue)
            begins()
            try:
                return await _bring_all(arrived, reading, queue, publishing, shard_map, returned)
            finally:
                # What is acknowledged on a channel that is closed at once may come again (seen: 9
                # of 36); what is confirmed behind the acknowledgements proves that they arrived.
                await _in_time(reading.publish("", queue, b"", _end("", expires_ms=1)))
        except Refused as error:
            if error.code == _NOT_FOUND and "no queue" in error.text:  # somebody deleted it
                return 0
            if error.code != ACCESS_REFUSED or "exclusive use" not in error.text:
                raise
            attempt += 1
            await asyncio.sleep(_LOOK_AGAIN.pause(attempt, _random.random()))
        finally:
            # Gives back, in its place, what was not brought.
            await _in_time(reading.wait_closed())


async def _in_time(leaving: Awaitable[object]) -> None:
    """The last words on a channel; a broker with an alarm on does not hear them."""
    with suppress(RemoteError, TimeoutError):
        async with asyncio.timeout(_LAST_WORDS):
            await leaving


Arrived = asyncio.Queue[Message | None]
"""What was delivered, and None when nothing more will be."""


async def _read(reading: Channel, queue: str) -> Arrived:
    arrived: Arrived = asyncio.Queue()
    reading.closed.add_done_callback(lambda _: arrived.put_nowait(None))
    await reading.confirm_publishes()
    await reading.qos(_AT_ONCE)
    await reading.consume(queue, arrived.put_nowait, exclusive=True)
    return arrived


async def _bring_all(
    arrived: Arrived,
    reading: Channel,
    queue: str,
    publishing: Channel,
    shard_map: ShardMap,
    returned: Counter[tuple[str, bytes]],
) -> int:
    """Bring what was kept before a message of our own, which is put behind it."""
    own = uuid.uuid4().hex
    await publishing.publish("", queue, b"", _end(own))
    brought = staying = 0
    at_end = False
    held: Message | None = None  # until the one of its key that is in the batch has been stored
    while not at_end:
        batch: list[Message] = []
        keys: set[str] = set()
        message, held = held or await arrived.get(), None
        while message is not None:
            if _is_end(message, queue):
                at_end = at_end or message.properties.message_id == own
                reading.ack(message.delivery_tag)
            elif (why := _why_it_stays(message, shard_map, publishing.frame_max)) is not None:
                logger.warning("a message in %r is not brought: %s", queue, why)
                staying += 1
                if staying == _AT_ONCE // 2:  # the broker gives no more than that at a time
                    rule = "must have keys and properties that can be sent again; take them out"
                    raise InvalidInput(f"messages in {queue!r}", rule, f"{staying} that have not")
            elif message.routing_key in keys:
                held = message
                break
            else:
                batch.append(message)
                keys.add(message.routing_key)
            if at_end or arrived.empty():
                break
            message = arrived.get_nowait()
        if message is None:
            raise Unreachable(f"{queue!r} can't be read any more: {reading.closed.result()}")
        stored = await _publish(batch, publishing, shard_map)
        left = []
        for message, taken in zip(batch, stored, strict=True):
            if taken and not returned[message.routing_key, message.body]:
                reading.ack(message.delivery_tag)
            else:
                left.append(shard_map.shard_of(message.routing_key).name)
        if left:
            raise ShardUnavailable(
                f"what is kept in {queue!r} can't be brought to {left[0]!r}, which did not take "
                "it; try again later"
            )
        brought += len(batch)
    return brought


def _why_it_stays(message: Message, shard_map: ShardMap, frame_max: int) -> str | None:
    if not is_text(message.routing_key):
        return "its key is not UTF-8"
    copies = (message.properties.headers or {}).get("CC")
    keys = [message.routing_key, *(copies if isinstance(copies, list) else ())]
    if any(isinstance(key, str) and shard_map.leads_to_shard(key) for key in keys):
        return "its key, or a copy's, is the name of a shard, which would store it too"
    try:
        forwarded(message.raw, "x" * MAX_NAME_BYTES, frame_max)
    except (InvalidInput, Malformed) as error:
        return str(error)
    return None


def _end(message_id: str, *, expires_ms: int = 600_000) -> pika.BasicProperties:
    """It expires: where bringing failed, nobody shall count it as kept for long."""
    return pika.BasicProperties(type=_END, message_id=message_id, expiration=str(expires_ms))


def _is_end(message: Message, queue: str) -> bool:
    """Whether somebody who brings put it there: nobody else reaches this queue by its name."""
    return message.properties.type == _END and message.routing_key == queue


async def _publish(
    batch: Sequence[Message], channel: Channel, shard_map: ShardMap
) -> Sequence[bool]:
    """Whether the broker took each; it also takes what it then returns."""

    def publish(message: Message) -> Coroutine[Any, Any, bool]:
        key = message.routing_key
        sent = forwarded(message.raw, shard_map.shard_of(key).name, channel.frame_max)
        return channel.publish(shard_map.exchange, key, message.body, sent, mandatory=True)

    return await asyncio.gather(*map(publish, batch))
