"""What a queue group asks over aio-pika, where nobody waits for the answer any more."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any
from unittest.mock import Mock

import aiormq
import pytest

from sharding.groups.queues.aio_transport import AioChannel


def test_whoever_asks_may_be_cancelled_the_question_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """aiormq closes the channel of a cancelled question, and warns of it on the user's terminal."""
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asked = asyncio.Event()

        async def ask(**_: Any) -> None:
            asked.set()
            await answer

        channel = AioChannel(Mock(), Mock(basic_qos=ask))
        asking = asyncio.create_task(channel.qos(1))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not answer.cancelled()
        answer.set_exception(aiormq.exceptions.ChannelInvalidStateError("closed"))
        while channel._questions:
            await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()  # what failed and was asked by nobody would complain now
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
