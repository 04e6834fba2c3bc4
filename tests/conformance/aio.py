"""aio-pika's channels, plain and robust, as callers: the event loop runs in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import aio_pika

from tests.cluster.waiting import PATIENCE
from tests.conformance import values
from tests.conformance.caller import Caller, Publication, Wrap
from tests.conformance.values import HANGS, Value


class AioCaller(Caller):
    def __init__(self, url: str, wrap: Wrap, *, confirms: bool = False) -> None:
        super().__init__(url, wrap, confirms=confirms)
        self._transaction: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._open(), PATIENCE)

    async def _connect(self) -> Any:
        return await aio_pika.connect(self.url)

    async def _open(self) -> None:
        self.connection = await self._connect()
        self.channel = self.wrap(
            await self.connection.channel(publisher_confirms=self.confirms),
        )
        self.channel.close_callbacks.add(self._on_close)
        self.channel.return_callbacks.add(self._on_return)
        # aio-pika says nothing of a consumer that the broker cancelled; the layer below does.
        underlay = await self.channel.get_underlay_channel()
        underlay.on_consumer_cancel_callbacks.add(self._on_cancel)

    def _run(self, work: Coroutine[Any, Any, Any], patience: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(patience)
        except TimeoutError:
            future.cancel()
            raise

    def _ask(self, work: Callable[[], Awaitable[Value]], patience: float = PATIENCE) -> Value:
        if self.hung:
            return HANGS

        async def run() -> Value:
            return await work()

        seen = values.attempt(lambda: self._run(run(), patience))
        self.hung = seen == HANGS
        return seen

    async def _queue(self, name: str) -> Any:
        return await self.channel.get_queue(name, ensure=False)

    def declare(
        self,
        queue: str,
        *,
        durable: bool = False,
        passive: bool = False,
        patience: float = PATIENCE,
    ) -> Value:
        async def work() -> Value:
            found = await self.channel.declare_queue(queue, durable=durable, passive=passive)
            seen = values.declared(found.declaration_result)
            return {"name of the queue object": found.name, "DeclareOk": seen}

        return self._ask(work, patience)

    def bind(self, queue: str, exchange: str, key: str) -> Value:
        async def work() -> Value:
            return values.answer(await (await self._queue(queue)).bind(exchange, key))

        return self._ask(work)

    def unbind(self, queue: str, exchange: str, key: str) -> Value:
        async def work() -> Value:
            return values.answer(await (await self._queue(queue)).unbind(exchange, key))

        return self._ask(work)

    def purge(self, queue: str) -> Value:
        async def work() -> Value:
            return values.answer(await (await self._queue(queue)).purge())

        return self._ask(work)

    def delete(self, queue: str) -> Value:
        async def work() -> Value:
            return values.answer(await self.channel.queue_delete(queue))

        return self._ask(work)

    def consume(
        self,
        queue: str,
        *,
        tag: str | None = None,
        no_ack: bool = False,
        exclusive: bool = False,
        reply: Publication | None = None,
    ) -> Value:
        async def on_message(incoming: Any) -> None:
            self.noticed.messages.append(_message(incoming))
            if reply is not None and incoming.exchange != reply.exchange:
                self.noticed.answered.append(await self._publish(reply))
                # What a callback of aio-pika gets is the message; its channel is aiormq's.
                below = replace(reply, body=f"{reply.body}, by message.channel")
                self.noticed.answered.append(_name(await _reply(incoming.channel, below)))
                self.noticed.messages_answered += 1

        async def work() -> Value:
            found = await self._queue(queue)
            return str(
                await found.consume(
                    on_message, no_ack=no_ack, exclusive=exclusive, consumer_tag=tag
                )
            )

        return self._ask(work)

    def consume_declared(self, queue: str, *, tag: str) -> Value:
        async def on_message(incoming: Any) -> None:
            self.noticed.messages.append(_message(incoming))

        async def work() -> Value:
            found = await self.channel.declare_queue(queue, durable=True)
            await found.consume(on_message, consumer_tag=tag)
            return str(found.name)

        return self._ask(work)

    def iterate(self, queue: str, count: int) -> Value:
        async def work() -> Value:
            taken: list[Value] = []
            found = await self._queue(queue)
            async with found.iterator(timeout=PATIENCE / 2) as incoming:
                async for each in incoming:
                    await each.ack()
                    taken.append({**_message(each), "consumer_tag": "any"})
                    if len(taken) == count:
                        break
            return taken

        return self._ask(work)

    def cancel(self, tag: str) -> Value:
        async def work() -> Value:
            return values.answer(await (await self._queue("images")).cancel(tag))

        return self._ask(work)

    def get(self, queue: str) -> Value:
        async def work() -> Value:
            queue_object = await self._queue(queue)
            found = await queue_object.get(no_ack=True, fail=False, timeout=PATIENCE)
            return None if found is None else _message(found)

        return self._ask(work)

    def publish(self, publication: Publication) -> Value:
        return self._ask(lambda: self._publish(publication))

    async def _publish(self, publication: Publication) -> Value:
        exchange = (
            await self.channel.get_exchange(publication.exchange, ensure=False)
            if publication.exchange
            else self.channel.default_exchange
        )
        outgoing = _outgoing(publication)
        result = await exchange.publish(outgoing, publication.key, mandatory=publication.mandatory)
        return values.sent(_name(result), publication.headers, outgoing.headers)

    def acknowledge(self, delivery_tag: int) -> Value:
        async def work() -> Value:
            return _name(await (await self._below()).basic_ack(delivery_tag))

        return self._ask(work)

    def refuse(self, delivery_tag: int, *, requeue: bool) -> Value:
        async def work() -> Value:
            return _name(await (await self._below()).basic_nack(delivery_tag, requeue=requeue))

        return self._ask(work)

    def recover(self) -> Value:
        async def work() -> Value:
            return values.answer(await (await self._below()).basic_recover(requeue=True))

        return self._ask(work)

    def prefetch(self, count: int) -> Value:
        async def work() -> Value:
            return values.answer(await self.channel.set_qos(prefetch_count=count))

        return self._ask(work)

    def begin_transaction(self) -> Value:
        async def work() -> Value:
            self._transaction = self.channel.transaction()
            return values.answer(await self._transaction.select())

        return self._ask(work)

    def commit(self) -> Value:
        async def work() -> Value:
            return values.answer(await self._transaction.commit())

        return self._ask(work)

    def declare_exchange(
        self,
        exchange: str,
        kind: str = "direct",
        *,
        durable: bool = False,
        passive: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> Value:
        async def work() -> Value:
            found = await self.channel.declare_exchange(
                exchange, kind, durable=durable, passive=passive, arguments=arguments
            )
            return f"the exchange {found.name}"

        return self._ask(work)

    def delete_exchange(self, exchange: str) -> Value:
        async def work() -> Value:
            return values.answer(await self.channel.exchange_delete(exchange))

        return self._ask(work)

    def round_trip(self) -> Value:
        async def work() -> Value:
            # Below aio-pika, whose robust channel would declare it again when it opens again.
            channel = await self._below()
            return values.answer(await channel.exchange_declare("amq.direct", passive=True))

        return self._ask(work)

    def consume_all(self, queue: str) -> Value:
        async def on_message(incoming: Any) -> None:
            self.noticed.messages.append(_message(incoming))

        async def work() -> Value:
            return list(await self.channel.consume_all(queue, on_message, no_ack=True))

        return self._ask(work)

    def counters(self) -> Value:
        async def work() -> Value:
            return dict(self.channel.counters)

        return self._ask(work)

    def is_open(self) -> Value:
        async def work() -> Value:
            return not self.channel.is_closed

        return self._ask(work)

    def connection_is_open(self) -> Value:
        async def work() -> Value:
            return not self.connection.is_closed

        return self._ask(work)

    def open_channel(self) -> Value:
        async def work() -> Value:
            channel = self.wrap(await self.connection.channel())
            await channel.declare_exchange("amq.direct", passive=True)
            await channel.close()
            return "works"

        return self._ask(work)

    def close(self) -> None:
        try:
            self._run(self.connection.close(), PATIENCE)
        finally:
            self._run(_rest(), PATIENCE)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE)
            self._loop.close()

    async def _below(self) -> Any:
        """aio-pika has no acknowledgement by tag, nor recover: its messages do it through this."""
        return await self.channel.get_underlay_channel()

    def _on_close(self, channel: Any, reason: BaseException | None) -> None:
        seen = None if reason is None else values.failure(reason)
        own = channel is self.channel
        self.noticed.closed.append({"reason": seen, values.OWN_CHANNEL: own})

    def _on_return(self, channel: Any, incoming: Any) -> None:
        own = channel is self.channel
        self.noticed.returned.append({**_message(incoming), values.OWN_CHANNEL: own})

    def _on_cancel(self, frame: Any) -> None:
        self.noticed.cancelled.append(str(frame.consumer_tag))


class RobustCaller(AioCaller):
    reopens = True

    async def _connect(self) -> Any:
        return await aio_pika.connect_robust(self.url)


async def _rest() -> None:
    """End what the client left running, so that the loop can be closed."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for each in left:
        each.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _reply(channel: Any, publication: Publication) -> Any:
    return await channel.basic_publish(
        publication.body.encode(),
        exchange=publication.exchange,
        routing_key=publication.key,
        properties=_outgoing(publication).properties,
        mandatory=publication.mandatory,
    )


def _outgoing(publication: Publication) -> aio_pika.Message:
    return aio_pika.Message(
        publication.body.encode(),
        headers=dict(publication.headers),
        content_type="text/plain",
        correlation_id="c-1",
        delivery_mode=2,
    )


def _message(incoming: Any) -> dict[str, Value]:
    return {
        "method": type(incoming).__name__,
        "consumer_tag": incoming.consumer_tag,
        "delivery_tag": incoming.delivery_tag,
        "redelivered": incoming.redelivered,
        "message_count": incoming.message_count,
        "exchange": incoming.exchange,
        "routing_key": incoming.routing_key,
        "headers": values.headers(incoming.headers),
        "content_type": incoming.content_type,
        "correlation_id": incoming.correlation_id,
        "delivery_mode": int(incoming.delivery_mode or 0),
        "body": incoming.body.decode(),
    }


def _name(result: object) -> Value:
    return "sent" if result is None else type(result).__name__
