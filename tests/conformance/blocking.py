"""pika's blocking channel as a caller. It lives in a thread of its own, so that it may hang."""

from __future__ import annotations

import itertools
import queue as queues
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pika

from tests.cluster.waiting import PATIENCE
from tests.conformance import values
from tests.conformance.caller import Caller, Outcome, Publication, Wrap
from tests.conformance.values import HANGS, Value
from tests.support import patient


class BlockingCaller(Caller):
    has_close_callback = False  # BlockingChannel offers none

    def __init__(self, url: str, wrap: Wrap, *, confirms: bool = False) -> None:
        super().__init__(url, wrap, confirms=confirms)
        self._work: queues.Queue[tuple[Callable[[], Value], Outcome] | None] = queues.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        opened = self._ask(self._open)
        if opened is not None:
            raise RuntimeError(f"no channel: {opened}")

    def _open(self) -> Value:
        self.connection = pika.BlockingConnection(patient.parameters(self.url))
        self.channel = self.wrap(self.connection.channel())
        if self.confirms:
            self.channel.confirm_delivery()
        self.channel.add_on_return_callback(self._on_return)
        self.channel.add_on_cancel_callback(self._on_cancel)
        return None

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            call, outcome = item
            try:
                outcome.give(call())
            except BaseException as error:
                outcome.fail(error)

    def _ask(self, call: Callable[[], Value], patience: float = PATIENCE) -> Value:
        if self.hung:
            return HANGS
        outcome = Outcome()
        self._work.put((call, outcome))
        seen = values.attempt(lambda: outcome.wait(patience))
        if seen == HANGS:
            self.hung = True
            sever(self.connection._impl)  # type: ignore[attr-defined]  # pika's own, not in its stubs
        return seen

    def declare(
        self,
        queue: str,
        *,
        durable: bool = False,
        passive: bool = False,
        patience: float = PATIENCE,
    ) -> Value:
        return self._ask(
            lambda: values.declared(
                self.channel.queue_declare(queue, durable=durable, passive=passive).method
            ),
            patience,
        )

    def bind(self, queue: str, exchange: str, key: str) -> Value:
        return self._ask(lambda: values.answer(self.channel.queue_bind(queue, exchange, key)))

    def unbind(self, queue: str, exchange: str, key: str) -> Value:
        return self._ask(lambda: values.answer(self.channel.queue_unbind(queue, exchange, key)))

    def purge(self, queue: str) -> Value:
        return self._ask(lambda: values.answer(self.channel.queue_purge(queue)))

    def delete(self, queue: str) -> Value:
        return self._ask(lambda: values.answer(self.channel.queue_delete(queue)))

    def consume(
        self,
        queue: str,
        *,
        tag: str | None = None,
        no_ack: bool = False,
        exclusive: bool = False,
        reply: Publication | None = None,
    ) -> Value:
        def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            seen = values.message(method, properties, body)
            seen[values.OWN_CHANNEL] = channel is self.channel
            self.noticed.messages.append(seen)
            if reply is not None and method.exchange != reply.exchange:
                self.noticed.answered.append(
                    values.attempt(lambda: self._publish(channel, reply)),
                )
                self.noticed.messages_answered += 1

        return self._ask(
            lambda: str(
                self.channel.basic_consume(
                    queue, on_message, auto_ack=no_ack, exclusive=exclusive, consumer_tag=tag
                )
            )
        )

    def consume_declared(self, queue: str, *, tag: str) -> Value:  # noqa: ARG002
        return None  # pika has no queue objects

    def iterate(self, queue: str, count: int) -> Value:
        def take() -> Value:
            taken: list[Value] = []
            generator = self.channel.consume(queue, inactivity_timeout=PATIENCE / 2)
            for method, properties, body in itertools.islice(generator, count):
                if method is None:
                    break
                self.channel.basic_ack(method.delivery_tag)
                taken.append({**values.message(method, properties, body), "consumer_tag": "any"})
            requeued = self.channel.cancel()
            return [*taken, {"requeued by cancel()": requeued}]

        return self._ask(take)

    def cancel(self, tag: str) -> Value:
        return self._ask(
            lambda: [values.message(*pending) for pending in self.channel.basic_cancel(tag)]
        )

    def get(self, queue: str) -> Value:
        def fetch() -> Value:
            method, properties, body = self.channel.basic_get(queue, auto_ack=True)
            return None if method is None else values.message(method, properties, body)

        return self._ask(fetch)

    def publish(self, publication: Publication) -> Value:
        return self._ask(lambda: self._publish(self.channel, publication))

    def _publish(self, channel: Any, publication: Publication) -> Value:
        outgoing = properties(publication)
        given = channel.basic_publish(
            publication.exchange,
            publication.key,
            publication.body.encode(),
            outgoing,
            mandatory=publication.mandatory,
        )
        result = "sent" if given is None else str(given)
        return values.sent(result, publication.headers, outgoing.headers)

    def acknowledge(self, delivery_tag: int) -> Value:
        return self._ask(lambda: values.answer(self.channel.basic_ack(delivery_tag)))

    def refuse(self, delivery_tag: int, *, requeue: bool) -> Value:
        return self._ask(
            lambda: values.answer(self.channel.basic_nack(delivery_tag, requeue=requeue))
        )

    def recover(self) -> Value:
        return self._ask(lambda: values.answer(self.channel.basic_recover(requeue=True)))

    def prefetch(self, count: int) -> Value:
        return self._ask(lambda: values.answer(self.channel.basic_qos(prefetch_count=count)))

    def begin_transaction(self) -> Value:
        return self._ask(lambda: values.answer(self.channel.tx_select()))

    def commit(self) -> Value:
        return self._ask(lambda: values.answer(self.channel.tx_commit()))

    def declare_exchange(
        self,
        exchange: str,
        kind: str = "direct",
        *,
        durable: bool = False,
        passive: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> Value:
        return self._ask(
            lambda: values.answer(
                self.channel.exchange_declare(
                    exchange, kind, durable=durable, passive=passive, arguments=arguments
                )
            )
        )

    def delete_exchange(self, exchange: str) -> Value:
        return self._ask(lambda: values.answer(self.channel.exchange_delete(exchange)))

    def round_trip(self) -> Value:
        def ask() -> Value:
            answer = values.answer(self.channel.exchange_declare("amq.direct", passive=True))
            self.connection.process_data_events(0)
            return answer

        return self._ask(ask)

    def consume_all(self, queue: str) -> Value:
        def on_message(_: Any, method: Any, properties: Any, body: bytes) -> None:
            self.noticed.messages.append(values.message(method, properties, body))

        return self._ask(lambda: list(self.channel.basic_consume_all(queue, on_message, True)))

    def counters(self) -> Value:
        return self._ask(lambda: dict(self.channel.counters))

    def is_open(self) -> Value:
        return self._ask(lambda: bool(self.channel.is_open))

    def connection_is_open(self) -> Value:
        return self._ask(lambda: bool(self.connection.is_open))

    def open_channel(self) -> Value:
        def use() -> Value:
            channel = self.wrap(self.connection.channel())
            channel.exchange_declare("amq.direct", passive=True)
            channel.close()
            return "works"

        return self._ask(use)

    def pump(self, seconds: float) -> None:
        def process() -> Value:
            self.connection.process_data_events(seconds)
            return None

        self._ask(process)

    def close(self) -> None:
        def shut() -> Value:
            if self.connection.is_open:
                self.connection.close()
            return None

        self._ask(shut)
        self._work.put(None)
        self._thread.join(PATIENCE)

    def _on_return(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        seen = values.message(method, properties, body)
        seen[values.OWN_CHANNEL] = channel is self.channel
        self.noticed.returned.append(seen)

    def _on_cancel(self, frame: Any) -> None:
        self.noticed.cancelled.append(str(frame.method.consumer_tag))


def properties(publication: Publication) -> pika.BasicProperties:
    return pika.BasicProperties(
        headers=dict(publication.headers),
        content_type="text/plain",
        correlation_id="c-1",
        delivery_mode=2,
    )


def sever(connection: Any) -> None:
    """End a pika connection that waits for ever. Its socket can be had in no public way."""
    transport = connection._transport
    if transport is not None:
        try:
            transport._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone already
