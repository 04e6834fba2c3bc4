"""A shard that is left while its dead letters can't be stored. Time is moved by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

from sharding.amqp.received import ReceivedProperties
from sharding.amqp.session import Message
from sharding.errors import RemoteError
from sharding.groups import GroupOptions, Retry
from sharding.groups.handling.tasks import HandlerTasks
from sharding.groups.queues.shard_reader import DeadLetters, ShardReader
from tests.support.hand_time import run_without_waiting

ANSWER_TIMEOUT = 5.0


class FakeChannel:
    """`publish` is what becomes of a letter."""

    room_for_properties = 131_072

    def __init__(self, publish: Callable[[], Any]) -> None:
        self.closed = asyncio.get_running_loop().create_future()
        self.acknowledged: list[int] = []
        self._publish = publish

    async def confirm_publishes(self) -> None: ...

    async def publish_mandatory(self, *_: Any) -> bool:
        return bool(await self._publish())

    def ack(self, tag: int, multiple: bool) -> None:
        self.acknowledged.append(-tag if multiple else tag)

    def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result("closed")

    async def wait_closed(self) -> None:
        self.close()


class Shop:
    """A reader of a shard whose letters meet `publish`; each message fails at once."""

    def __init__(self, publish: Callable[[], Any]) -> None:
        self.attempts = 0
        self._publish = publish
        options = GroupOptions(parallelism=8, retry=Retry(attempts=1))
        letters = DeadLetters("images.dead", cast(Any, self), ANSWER_TIMEOUT)
        self.counters = Counter[str]()
        self.own = FakeChannel(publish)
        self.runner = HandlerTasks(self._fail, options)
        self.reader = ShardReader(
            "s", "rmq0", cast(Any, self.own), self.runner, letters, self.counters
        )
        self.reader._early = None

    async def channel(self) -> FakeChannel:
        return FakeChannel(self._count)

    async def _count(self) -> Any:
        self.attempts += 1
        return await self._publish()

    async def _fail(self, _: Any) -> None:
        raise ValueError("no")

    async def begin(self, letters: int) -> None:
        for number in range(letters):
            message = Message(b"x", ReceivedProperties(b"\0\0"), number + 1, f"k{number}")
            self.reader._submit(message)
        while self.runner.counters["dead"] < letters:
            await asyncio.sleep(0)


async def never() -> None:
    await asyncio.Event().wait()


def test_a_shard_whose_letters_get_no_answer_is_left_after_one_time_out() -> None:
    async def main() -> None:
        shop = Shop(never)
        await shop.begin(40)
        before = asyncio.get_running_loop().time()
        await shop.reader.give_up()
        assert asyncio.get_running_loop().time() - before <= ANSWER_TIMEOUT
        assert shop.attempts == 1
        assert shop.own.acknowledged == []

    run_without_waiting(main())


def test_letters_that_wait_for_their_next_attempt_are_not_tried_when_the_shard_is_left() -> None:
    async def refuse() -> None:
        raise RemoteError("no")

    async def main() -> None:
        shop = Shop(refuse)
        await shop.begin(3)
        while shop.counters["dead_letter_failures"] < 9:  # three times each, so pauses are long
            await asyncio.sleep(0.01)
        attempts, before = shop.attempts, asyncio.get_running_loop().time()
        await shop.reader.give_up()
        assert shop.attempts == attempts
        assert asyncio.get_running_loop().time() == pytest.approx(before)

    run_without_waiting(main())


def test_letters_that_are_taken_are_stored_before_the_shard_is_left() -> None:
    async def take() -> bool:
        await asyncio.sleep(1)
        return True

    async def main() -> None:
        shop = Shop(take)
        await shop.begin(10)
        await shop.reader.give_up()
        assert shop.counters["dead_lettered"] == 10

    run_without_waiting(main())
