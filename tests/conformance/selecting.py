"""pika's asynchronous channel as a caller: a SelectConnection whose loop runs in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pika
from pika.spec import Basic

from tests.cluster.waiting import PATIENCE
from tests.conformance import values
from tests.conformance.blocking import properties, sever
from tests.conformance.caller import Caller, Outcome, Publication, Wrap
from tests.conformance.values import HANGS, Value
from tests.support import patient

Start = Callable[[Outcome], object]
"""Begins a call in the loop's thread; the outcome is given by a callback."""


class AsyncCaller(Caller):
    def __init__(self, url: str, wrap: Wrap, *, confirms: bool = False) -> None:
        super().__init__(url, wrap, confirms=confirms)
        self._pending: list[Outcome] = []
        self._unconfirmed: dict[int, Outcome] = {}
        self._published = 0
        self._ended = threading.Event()
        opened, self._ready = Outcome(), Outcome()
        self.connection = pika.SelectConnection(
            patient.parameters(url),
            on_open_callback=lambda _: opened.give(None),
            on_open_error_callback=lambda _, error: opened.fail(_error(error)),
            on_close_callback=lambda *_: self._end(),
        )
        self._thread = threading.Thread(target=self.connection.ioloop.start, daemon=True)
        self._thread.start()
        opened.wait(PATIENCE)
        self._ask(self._open)
        if confirms:
            self._ask(
                lambda outcome: self.channel.confirm_delivery(
                    self._on_confirm, callback=lambda _: outcome.give(None)
                )
            )

    def _open(self, outcome: Outcome) -> None:
        def use(raw: Any) -> None:
            self.channel = self.wrap(raw)
            self.channel.add_on_close_callback(self._on_close)
            self.channel.add_on_return_callback(self._on_return)
            self.channel.add_on_cancel_callback(self._on_cancel)
            outcome.give(None)

        self.connection.channel(on_open_callback=use)

    def _ask(self, start: Start, patience: float = PATIENCE) -> Value:
        if self.hung:
            return HANGS
        outcome = Outcome()

        def run() -> None:
            self._pending.append(outcome)
            try:
                start(outcome)
            except Exception as error:
                outcome.fail(error)

        if self._ended.is_set():
            run()  # the loop has stopped: nothing else touches the connection
        else:
            self.connection.ioloop.add_callback_threadsafe(run)
        seen = values.attempt(lambda: outcome.wait(patience))
        if seen == HANGS:
            self.hung = True
            sever(self.connection)
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
            lambda outcome: self.channel.queue_declare(
                queue,
                durable=durable,
                passive=passive,
                callback=lambda frame: outcome.give(values.declared(frame.method)),
            ),
            patience,
        )

    def bind(self, queue: str, exchange: str, key: str) -> Value:
        return self._ask(
            lambda outcome: self.channel.queue_bind(queue, exchange, key, callback=_to(outcome))
        )

    def unbind(self, queue: str, exchange: str, key: str) -> Value:
        return self._ask(
            lambda outcome: self.channel.queue_unbind(queue, exchange, key, callback=_to(outcome))
        )

    def purge(self, queue: str) -> Value:
        return self._ask(lambda outcome: self.channel.queue_purge(queue, callback=_to(outcome)))

    def delete(self, queue: str) -> Value:
        return self._ask(lambda outcome: self.channel.queue_delete(queue, callback=_to(outcome)))

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
                self.noticed.answered.append(values.attempt(lambda: _send(channel, reply)))
                self.noticed.messages_answered += 1

        def start(outcome: Outcome) -> None:
            self.channel.basic_consume(
                queue,
                on_message,
                auto_ack=no_ack,
                exclusive=exclusive,
                consumer_tag=tag,
                callback=lambda frame: outcome.give(str(frame.method.consumer_tag)),
            )

        return self._ask(start)

    def consume_declared(self, queue: str, *, tag: str) -> Value:  # noqa: ARG002
        return None  # pika has no queue objects

    def iterate(self, queue: str, count: int) -> Value:  # noqa: ARG002
        return None  # nor an iterator on its asynchronous channel

    def cancel(self, tag: str) -> Value:
        def start(outcome: Outcome) -> None:
            self.channel.basic_cancel(tag, callback=_to(outcome))
            # A channel answers in order: what is not answered before this one never is.
            self.channel.exchange_declare(
                "amq.direct", passive=True, callback=lambda _: outcome.fail(TimeoutError(HANGS))
            )

        return self._ask(start)

    def get(self, queue: str) -> Value:
        def start(outcome: Outcome) -> None:
            def on_message(channel: Any, *parts: Any) -> None:
                own = channel is self.channel
                outcome.give({**values.message(*parts), values.OWN_CHANNEL: own})

            self.channel.add_callback(lambda _: outcome.give(None), [Basic.GetEmpty])
            self.channel.basic_get(queue, on_message, auto_ack=True)

        return self._ask(start)

    def publish(self, publication: Publication) -> Value:
        def start(outcome: Outcome) -> None:
            sent = _send(self.channel, publication)
            # Counted when it was sent: one that is refused has no delivery tag.
            if self.confirms:
                self._published += 1
                self._unconfirmed[self._published] = outcome
            else:
                outcome.give(sent)

        return self._ask(start)

    def acknowledge(self, delivery_tag: int) -> Value:
        return self._at_once(lambda: self.channel.basic_ack(delivery_tag))

    def refuse(self, delivery_tag: int, *, requeue: bool) -> Value:
        return self._at_once(lambda: self.channel.basic_nack(delivery_tag, requeue=requeue))

    def recover(self) -> Value:
        return self._ask(
            lambda outcome: self.channel.basic_recover(requeue=True, callback=_to(outcome))
        )

    def prefetch(self, count: int) -> Value:
        return self._ask(
            lambda outcome: self.channel.basic_qos(prefetch_count=count, callback=_to(outcome))
        )

    def begin_transaction(self) -> Value:
        return self._ask(lambda outcome: self.channel.tx_select(callback=_to(outcome)))

    def commit(self) -> Value:
        return self._ask(lambda outcome: self.channel.tx_commit(callback=_to(outcome)))

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
            lambda outcome: self.channel.exchange_declare(
                exchange,
                kind,
                durable=durable,
                passive=passive,
                arguments=arguments,
                callback=_to(outcome),
            )
        )

    def delete_exchange(self, exchange: str) -> Value:
        return self._ask(
            lambda outcome: self.channel.exchange_delete(exchange, callback=_to(outcome))
        )

    def round_trip(self) -> Value:
        return self.declare_exchange("amq.direct", passive=True)

    def consume_all(self, queue: str) -> Value:
        def on_message(_: Any, method: Any, properties: Any, body: bytes) -> None:
            self.noticed.messages.append(values.message(method, properties, body))

        return self._at_once(lambda: self.channel.basic_consume_all(queue, on_message, True))

    def counters(self) -> Value:
        return self._at_once(lambda: dict(self.channel.counters))

    def is_open(self) -> Value:
        return self._at_once(lambda: bool(self.channel.is_open))

    def connection_is_open(self) -> Value:
        return self._at_once(lambda: bool(self.connection.is_open))

    def open_channel(self) -> Value:
        def start(outcome: Outcome) -> None:
            def use(raw: Any) -> None:
                channel = self.wrap(raw)
                channel.add_on_close_callback(lambda _, reason: outcome.fail(reason))

                def finish(_: Any) -> None:
                    outcome.give("works")
                    channel.close()

                channel.exchange_declare("amq.direct", passive=True, callback=finish)

            self.connection.channel(on_open_callback=use)

        return self._ask(start)

    def close(self) -> None:
        def shut() -> None:
            if self.connection.is_open:
                self.connection.close()

        if not self._ended.is_set():
            self.connection.ioloop.add_callback_threadsafe(shut)
        if not self._ended.wait(PATIENCE):
            raise TimeoutError("the connection does not close")
        self._thread.join(PATIENCE)
        self.connection.ioloop.close()

    def _at_once(self, call: Callable[[], Value]) -> Value:
        return self._ask(lambda outcome: outcome.give(call()))

    def _end(self) -> None:
        self._ended.set()
        self.connection.ioloop.stop()

    def _on_close(self, channel: Any, reason: Exception) -> None:
        own = channel is self.channel
        self.noticed.closed.append({"reason": values.failure(reason), values.OWN_CHANNEL: own})
        for outcome in [*self._pending, *self._unconfirmed.values()]:
            outcome.fail(reason)

    def _on_return(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        seen = values.message(method, properties, body)
        seen[values.OWN_CHANNEL] = channel is self.channel
        self.noticed.returned.append(seen)

    def _on_cancel(self, frame: Any) -> None:
        self.noticed.cancelled.append(str(frame.method.consumer_tag))

    def _on_confirm(self, frame: Any) -> None:
        last = frame.method.delivery_tag
        for tag in [tag for tag in self._unconfirmed if tag <= last]:
            if tag == last or frame.method.multiple:
                self._unconfirmed.pop(tag).give(values.answer(frame))


def _send(channel: Any, publication: Publication) -> Value:
    outgoing = properties(publication)
    channel.basic_publish(
        publication.exchange,
        publication.key,
        publication.body.encode(),
        outgoing,
        mandatory=publication.mandatory,
    )
    return values.sent("sent", publication.headers, outgoing.headers)


def _to(outcome: Outcome) -> Callable[[Any], None]:
    return partial(_give_answer, outcome)


def _give_answer(outcome: Outcome, frame: Any) -> None:
    outcome.give(values.answer(frame))


def _error(error: object) -> BaseException:
    return error if isinstance(error, BaseException) else RuntimeError(str(error))
