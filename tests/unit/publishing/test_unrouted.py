"""Bringing what is kept, against a broker that takes less than it is sent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pika
import pytest

from sharding import ShardUnavailable
from sharding.amqp.content_header import room_in_frame
from sharding.amqp.session import Message
from sharding.errors import Unreachable, WarrenError
from sharding.maps.naming import unrouted
from sharding.maps.shard_map import ShardMap
from sharding.publishing.unrouted import _bring
from tests.cluster.waiting import PATIENCE
from tests.support.maps import queue_map

pytestmark = pytest.mark.timeout(PATIENCE)
QUEUE = unrouted("images")


@dataclass(frozen=True)
class Kept:
    key: str
    body: bytes
    properties: pika.BasicProperties


@dataclass
class Broker:
    """What is kept, and shards that have taken `stored`; `takes` says whether they take one, and
    `hangs` whether nothing is said of one."""

    kept: list[Kept]
    takes: Callable[[bytes], bool] = lambda _: True
    hangs: Callable[[bytes], bool] = lambda _: False
    shard_map: ShardMap = field(default_factory=lambda: queue_map("a"))
    frame_max: int = 131_072
    away: set[str] = field(default_factory=set)
    sent: list[bytes] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    most_in_flight: int = 0
    in_flight: int = 0
    lost: bool = False

    def bring(self) -> int:
        """Over a connection of its own; what ends one does so only once."""
        self.lost = False
        return asyncio.run(self._bring())

    async def _bring(self) -> int:
        channels: list[FakeChannel] = []

        class Session:
            async def channel(_) -> FakeChannel:  # noqa: N805
                channels.append(FakeChannel(self, channels))
                return channels[-1]

        class Routing:
            def unavailable(_, shard: str) -> bool:  # noqa: N805
                return shard in self.away

            def suspect(_, shard: str) -> None:  # noqa: N805
                self.away.add(shard)

        session: Any = Session()
        routing: Any = Routing()
        try:
            async with asyncio.timeout(PATIENCE / 2):
                return await _bring(session, self.shard_map, lambda: None, routing)
        finally:  # which expires
            self.kept = [each for each in self.kept if each.key != QUEUE]


class FakeChannel:
    def __init__(self, broker: Broker, channels: list[FakeChannel]) -> None:
        self._broker = broker
        self._channels = channels
        self._tags = itertools.count(1)
        self._delivered: dict[int, Kept] = {}
        self._deliver: Callable[[Message], None] | None = None
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def frame_max(self) -> int:
        return self._broker.frame_max

    def on_return(self, _: Any) -> None: ...

    async def confirm_publishes(self) -> None: ...

    async def qos(self, _: int) -> None: ...

    async def consume(self, _: str, deliver: Callable[[Message], None], **__: bool) -> None:
        self._deliver = deliver
        for each in self._broker.kept:
            self.deliver(each)

    def deliver(self, kept: Kept) -> None:
        if self._deliver is not None:
            tag = next(self._tags)
            self._delivered[tag] = kept
            raw = b"".join(kept.properties.encode())
            properties = pika.BasicProperties()
            properties.decode(raw)
            self._deliver(Message(kept.body, properties, tag, kept.key, raw=raw))

    def ack(self, tag: int) -> None:
        self._broker.kept.remove(self._delivered.pop(tag))

    async def publish(
        self, _: str, key: str, body: bytes, properties: pika.BasicProperties, **__: bool
    ) -> bool:
        broker = self._broker
        broker.in_flight += 1
        broker.most_in_flight = max(broker.most_in_flight, broker.in_flight)
        try:
            if sum(map(len, properties.encode())) > room_in_frame(broker.frame_max):
                broker.lost = True
            if broker.lost:
                raise Unreachable("501 FRAME_ERROR")
            if key == QUEUE:
                broker.kept.append(Kept(key, body, properties))
                for channel in self._channels:
                    channel.deliver(broker.kept[-1])
                return True
            broker.sent.append(body)
            if broker.hangs(body):
                await asyncio.Event().wait()
            taken = broker.takes(body)
            if taken:
                broker.stored.append(body)
            await asyncio.sleep(0)
            if broker.lost:
                raise Unreachable("501 FRAME_ERROR")
            return taken
        finally:
            broker.in_flight -= 1

    async def wait_closed(self) -> None:
        if not self.closed.done():
            self.closed.set_result("closed")


def kept(key: str, body: bytes, headers: dict[str, Any] | None = None) -> Kept:
    return Kept(key, body, pika.BasicProperties(headers=headers))


def test_no_message_overtakes_one_of_its_key_that_the_shard_did_not_take() -> None:
    """It is full, and a consumer makes room right behind the first one."""
    refused = iter([False])
    broker = Broker(
        [kept("one", b"1"), kept("two", b"a"), kept("one", b"2"), kept("one", b"3")],
        takes=lambda _: next(refused, True),
    )
    with pytest.raises(ShardUnavailable, match="did not take it"):
        broker.bring()
    assert broker.stored == [b"a"]
    broker.away.clear()
    assert broker.bring() == 3
    assert broker.stored == [b"a", b"1", b"2", b"3"]
    assert broker.kept == []


def test_a_shard_that_does_not_answer_has_nothing_of_others_brought_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sharding.publishing.unrouted._CONFIRM_TIMEOUT", 0.1)
    broker = Broker(
        [kept("two", b"1"), kept("hung", b"?"), kept("three", b"2"), kept("hung", b"??")],
        shard_map=queue_map("ab"),
        hangs=lambda body: b"?" in body,
    )
    hung, *well = (broker.shard_map.shard_of(key).name for key in ("hung", "two", "three"))
    assert hung not in well
    for _ in range(3):
        with pytest.raises(ShardUnavailable, match="did not take it"):
            broker.bring()
        assert broker.stored == [b"1", b"2"]
        assert [each.body for each in broker.kept] == [b"?", b"??"]
    assert broker.sent.count(b"?") == 1  # it counts as away, and may have taken that one
    broker.hangs = lambda _: False
    broker.away.clear()
    assert broker.bring() == 2
    assert broker.kept == []


def test_messages_of_different_keys_are_brought_at_once() -> None:
    broker = Broker([kept(f"user-{n % 50}", b"%d" % n) for n in range(150)])
    assert broker.bring() == 150
    assert broker.stored == [b"%d" % n for n in range(150)]
    assert broker.most_in_flight == 50


def test_what_does_not_fit_into_the_frames_of_the_connection_stays() -> None:
    large = kept("large", b"large", {"baggage": "x" * 8_150})
    broker = Broker([kept("a", b"1"), large, kept("b", b"2")], frame_max=8_192)
    assert broker.bring() == 2
    assert (broker.stored, broker.kept) == ([b"1", b"2"], [large])
    broker.frame_max = 131_072
    assert broker.bring() == 1
    assert broker.kept == []


def test_what_was_stored_is_not_stored_again_at_each_try() -> None:
    """As a message that ended the connection each time would have it."""
    broker = Broker([kept("a", b"1"), kept("b", b"2", {"baggage": "x" * 8_150})], frame_max=8_192)
    for _ in range(3):
        try:
            broker.bring()
        except WarrenError:
            continue
    assert broker.stored == [b"1"]
