"""Finding the end of the map log where the broker is slow and the user may not write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pika
import pytest

from sharding.amqp.session import ACCESS_REFUSED, Message, Refused, Session
from sharding.cluster import stream_log
from sharding.cluster.stream_log import LOOKS_AT_THE_END, NOTHING, LogFollower
from sharding.errors import Unreachable
from tests.cluster.waiting import PATIENCE

RECORD = Message(
    NOTHING, pika.BasicProperties(message_id="m", headers={"x-stream-offset": 0}), 1, "", False
)


class Broker:
    """Has one record, which it sends when somebody has tried to write; that it refuses."""

    def __init__(self, *, empty: bool = False) -> None:
        self._empty = empty
        self._readers: list[Callable[[Message], None]] = []
        self.tried = 0

    async def channel(self) -> Broker:
        return self

    async def declare(self, *_: Any, **__: Any) -> None: ...
    async def confirm_publishes(self) -> None: ...
    async def qos(self, prefetch: int) -> None: ...
    def ack(self, delivery_tag: int) -> None: ...
    def close(self) -> None: ...

    async def consume(self, _: str, on_message: Callable[[Message], None], **__: Any) -> None:
        self._readers.append(on_message)

    async def publish(self, *_: Any) -> bool:
        self.tried += 1
        if not self._empty:
            asyncio.get_running_loop().call_soon(self._send)
        raise Refused(ACCESS_REFUSED, "ACCESS_REFUSED - write access refused")

    def _send(self) -> None:
        for reader in self._readers:
            reader(RECORD)


def record(offset: int) -> Message:
    headers = {"x-stream-offset": offset}
    properties = pika.BasicProperties(message_id=f"m{offset}", headers=headers)
    return Message(NOTHING, properties, 1, "", False)


class BusyReplica(Broker):
    """Hands three records out, and calls the second one its last for the first `late` times."""

    first_record_after = 0.0

    def __init__(self, late: int) -> None:
        super().__init__()
        self._late = late
        self.asked_for_the_end = 0

    async def consume(self, _: str, on_message: Callable[[Message], None], **how: Any) -> None:
        records = [record(offset) for offset in range(3)]
        if how["arguments"]["x-stream-offset"] == "first":
            asyncio.get_running_loop().call_later(self.first_record_after, on_message, records[0])
            return
        if how["arguments"]["x-stream-offset"] == "last":
            self.asked_for_the_end += 1
            records = records[1:2] if self.asked_for_the_end <= self._late else records[2:]
        for each in records:
            asyncio.get_running_loop().call_soon(on_message, each)


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_log, "EMPTY_AFTER", 0.001)
    monkeypatch.setattr(stream_log, "LOOK_AGAIN", 0.001)


def test_a_slow_log_is_read_by_who_may_not_write() -> None:
    async def main() -> None:
        broker, log = Broker(), LogFollower(lambda *_: None)
        session = cast(Session, broker)
        async with asyncio.timeout(PATIENCE):
            await log.attach(session)
            await log.catch_up(session)
        assert broker.tried == 1
        assert log.refused is None

    asyncio.run(main())


def test_of_an_empty_log_it_is_known_that_the_user_may_not_write() -> None:
    async def main() -> None:
        broker, log = Broker(empty=True), LogFollower(lambda *_: None)
        session = cast(Session, broker)
        await log.attach(session)
        waiting = asyncio.create_task(log.catch_up(session))
        async with asyncio.timeout(PATIENCE):
            while log.refused is None:
                await asyncio.sleep(0)
        assert log.refused.code == ACCESS_REFUSED
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())


def caught_up_with(late: int) -> int:
    """How often the end was asked for until the log was read; the first time nothing is read."""

    async def main() -> int:
        broker, log = BusyReplica(late), LogFollower(lambda *_: None)
        session = cast(Session, broker)
        async with asyncio.timeout(PATIENCE):
            await log.attach(session)
            await asyncio.sleep(0)  # all three records are read
            await log.catch_up(session)
        return broker.asked_for_the_end

    return asyncio.run(main())


def test_a_replica_that_tells_of_its_last_record_late_is_asked_again() -> None:
    assert caught_up_with(late=0) == 1
    assert caught_up_with(late=2) == 3


def test_a_slow_replica_is_not_taken_for_another_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first record comes later than an empty log is waited for."""
    monkeypatch.setattr(BusyReplica, "first_record_after", 20 * stream_log.EMPTY_AFTER)
    assert caught_up_with(late=2) == 3


def test_a_replica_that_stays_behind_what_was_read_is_left() -> None:
    with pytest.raises(Unreachable, match="is behind"):
        caught_up_with(late=LOOKS_AT_THE_END)
