"""Bringing what was kept to its shard: messages that reached an exchange of ours without our keys.

A channel that did not know of a map yet, another client or another language published them. The
broker kept them, and whoever brings them is an ordinary publisher with confirms:

* one at a time: an exclusive consumer is the lock, and who finds it taken waits. Of a process one
  waits, for all who ask meanwhile: many channels may come to know of a map at the same moment;
* in the order in which they were kept, each to the shard of its key, as it was sent. Of one key one
  is on its way: a shard that is full refuses it, and may have room for the next;
* a message is acknowledged as soon as its shard has it; what its shard does not take stays where it
  is, with all that comes later for that shard, and holds up no other.

A connection that is lost in between may bring some of them a second time, and so may a shard that
does not answer: it is sent nothing more until it does.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import suppress

import pika

from sharding.amqp.field_table import Malformed
from sharding.amqp.session import ACCESS_REFUSED, Channel, Message, Refused, Session
from sharding.backoff import Backoff
from sharding.cluster.topology import Begins, Routing, Topology
from sharding.errors import InvalidInput, RemoteError, ShardUnavailable, Unreachable
from sharding.maps.json_fields import is_text
from sharding.maps.naming import MAX_NAME_BYTES, unrouted
from sharding.maps.shard_map import ShardMap
from sharding.publishing.addressing import forwarded

logger = logging.getLogger("warren.publisher")

_NOT_FOUND = 404
_AT_ONCE = 200
_CONFIRM_TIMEOUT = 10.0
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
            return await _bring(session, shard_map, begins, topology)

        return topology.futures.on_connection(logical, bring)

    return topology.kept.bring_once(logical, start)


async def _bring(session: Session, shard_map: ShardMap, begins: Begins, routing: Routing) -> int:
    queue = unrouted(shard_map.logical)
    shards = _Shards(await session.channel(), shard_map, routing)
    await shards.channel.confirm_publishes()
    attempt = 0
    while True:
        reading = await session.channel()
        try:
            arrived = await _read(reading, queue)
            begins()
            try:
                return await _bring_all(arrived, reading, queue, shards)
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


class _Shards:
    """The shards of one map, and which of them did not take a message."""

    def __init__(self, channel: Channel, shard_map: ShardMap, routing: Routing) -> None:
        self.channel = channel
        self.map = shard_map
        self._routing = routing
        self._away: set[str] = set()
        self._returned: Counter[tuple[str, bytes]] = Counter()
        channel.on_return(lambda key, body: self._returned.update([(key, body)]))

    def are_open_to(self, message: Message) -> bool:
        """Whether it may be sent: no earlier one of its key waits for the same shard."""
        shard = self.map.shard_of(message.routing_key).name
        if self._routing.unavailable(shard):
            self._away.add(shard)
        return shard not in self._away

    async def store(self, message: Message) -> bool:
        """Whether its shard has it. The broker also takes what it then returns."""
        key, taken = message.routing_key, False
        shard = self.map.shard_of(key).name
        sent = forwarded(message.raw, shard, self.channel.frame_max)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CONFIRM_TIMEOUT):
                publishing = self.channel.publish(
                    self.map.exchange, key, message.body, sent, mandatory=True
                )
                taken = await publishing
        if taken and not self._returned[key, message.body]:
            return True
        self._away.add(shard)
        self._routing.suspect(shard)
        return False

    def did_not_take_all(self, queue: str) -> ShardUnavailable:
        return ShardUnavailable(
            f"what is kept in {queue!r} can't be brought to {min(self._away)!r}, which did not "
            "take it; try again later"
        )


async def _bring_all(arrived: Arrived, reading: Channel, queue: str, shards: _Shards) -> int:
    """Bring what was kept before a message of our own, which is put behind it."""

    async def bring(message: Message) -> bool:
        is_stored = await shards.store(message)
        if is_stored:  # at once: what others wait for must not have it brought again
            reading.ack(message.delivery_tag)
        return is_stored

    own = uuid.uuid4().hex
    await shards.channel.publish("", queue, b"", _end(own))
    most = _AT_ONCE // 2  # that stay: the broker gives no more than `_AT_ONCE` at a time
    brought = staying = waiting = 0
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
            elif (why := _why_it_stays(message, shards.map, shards.channel.frame_max)) is not None:
                logger.warning("a message in %r is not brought: %s", queue, why)
                staying += 1
                if staying == most:
                    rule = "must have keys and properties that can be sent again; take them out"
                    raise InvalidInput(f"messages in {queue!r}", rule, f"{staying} that have not")
            elif message.routing_key in keys:
                held = message
                break
            elif not shards.are_open_to(message):
                waiting += 1
            else:
                batch.append(message)
                keys.add(message.routing_key)
            if at_end or waiting >= most or arrived.empty():
                break
            message = arrived.get_nowait()
        if message is None:
            raise Unreachable(f"{queue!r} can't be read any more: {reading.closed.result()}")
        stored = sum(await asyncio.gather(*map(bring, batch)))
        brought += stored
        waiting += len(batch) - stored
        if waiting >= most:
            break
    if waiting:
        raise shards.did_not_take_all(queue)
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
    """Whether somebody who brings put it there. What is kept came through another exchange."""
    reached_by_name = not message.exchange and message.routing_key == queue
    return reached_by_name and message.properties.type == _END
