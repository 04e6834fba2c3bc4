"""aio-pika: a broker that does not answer ends no wait; `confirm_timeout` does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import aio_pika
import pytest
from aio_pika.tools import CallbackCollection

from interceptors import AioShardedChannel
from sharding import OutcomeUnknown, ShardMap
from sharding.cluster.topology import Claims, KeptMessages
from tests.cluster.waiting import PATIENCE
from tests.support.maps import queue_map

pytestmark = pytest.mark.timeout(PATIENCE)


class Broker:
    """An exchange and a channel of aio-pika's on a node that is frozen until it `answers`."""

    name = "images"

    def __init__(self) -> None:
        self.close_callbacks: CallbackCollection[Any, Any] = CallbackCollection(self)
        self.return_callbacks: CallbackCollection[Any, Any] = CallbackCollection(self)
        self.answers = False
        self.suspected: list[str] = []
        self.maps: dict[str, ShardMap] = {}

    async def _answer(self) -> None:
        if not self.answers:
            await asyncio.get_running_loop().create_future()

    async def publish(self, message: Any, *_: Any, **__: Any) -> None:
        assert message.body
        await self._answer()

    async def delete(self, *_: Any) -> None:
        await self._answer()

    async def exchange_delete(self, *_: Any) -> None:
        await self._answer()

    async def declare_exchange(self, *_: Any, **__: Any) -> Broker:
        await self._answer()
        return self

    async def get_exchange(self, _: str, *, ensure: bool) -> Broker:
        assert not ensure
        return self

    async def get_underlay_channel(self) -> Any:
        return SimpleNamespace(publisher_confirms=True)

    def sharded(self) -> AioShardedChannel:
        topology: Any = SimpleNamespace(
            is_ready=True,
            shard_map=self.maps.get,
            may_drop=lambda *_: False,
            kept=KeptMessages(),
            claims=Claims(),
            unavailable=lambda _: False,
            suspect=self.suspected.append,
        )
        channel: Any = self
        return AioShardedChannel(channel, topology, confirm_timeout=0.05)


def done(result: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(result)
    return future


def test_publish_before_the_map_is_known_ends_and_lets_later_ones_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("interceptors.calls.bring_unrouted", lambda *_: done(0))

    async def run() -> None:
        broker = Broker()
        channel = broker.sharded()
        exchange = await channel.get_exchange("images", ensure=False)
        with pytest.raises(OutcomeUnknown, match="confirm_timeout"):
            await exchange.publish(aio_pika.Message(b"1"), "key")
        assert (broker.suspected, channel.counters["unknown"]) == ([], 1)
        broker.answers = True
        broker.maps["images"] = queue_map()
        await exchange.publish(aio_pika.Message(b"2"), "key")

    asyncio.run(run())


@pytest.mark.parametrize(
    "call",
    [
        lambda channel, _: channel.declare_exchange("images"),
        lambda channel, _: channel.get_exchange("images"),
        lambda channel, _: channel.exchange_delete("images"),
        lambda _, exchange: exchange.delete(),
    ],
    ids=["declare_exchange", "get_exchange", "exchange_delete", "delete"],
)
def test_calls_about_exchanges_end_without_an_answer(
    call: Callable[[AioShardedChannel, Any], Awaitable[Any]],
) -> None:
    async def run() -> None:
        channel = Broker().sharded()
        exchange = await channel.get_exchange("images", ensure=False)
        with pytest.raises(OutcomeUnknown, match="confirm_timeout"):
            await call(channel, exchange)

    asyncio.run(run())


def test_the_applications_own_timeout_is_told_as_aio_pika_tells_it() -> None:
    async def run() -> None:
        channel = Broker().sharded()
        exchange = await channel.get_exchange("images", ensure=False)
        with pytest.raises(TimeoutError):
            await exchange.publish(aio_pika.Message(b"1"), "key", timeout=0.01)
        with pytest.raises(TimeoutError):
            await channel.declare_exchange("images", timeout=0.01)

    asyncio.run(run())
