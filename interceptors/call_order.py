"""What the wrapper of pika's asynchronous channel is made of: order, hops, settling.

Everything here runs on the connection's I/O loop, except where it says otherwise, and nothing
blocks it. pika's adapters differ in their loops; what they have in common is how the connection
itself calls later and from other threads, so that is what is used.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pika
from pika.spec import Basic

from sharding.amqp.connected_node import REPLY_TO
from sharding.cluster.topology import Topology
from sharding.errors import Unreachable
from sharding.maps.consumer_spread import Looks, better_shard

logger = logging.getLogger("warren.channel")

Done = Callable[[], None]
Step = Callable[[Done], None]
"""A call whose turn has come; it says when the next one may have its own."""

_MOST_WAITING = 100_000


ANSWER_TIMEOUT = 30.0
"""How long calls wait behind a consume that the broker does not answer."""


def later(connection: Any, seconds: float, work: Callable[[], None]) -> None:
    """Run `work` on the connection's loop after a while."""
    connection._adapter_call_later(seconds, work)


def on_loop(connection: Any, call: Callable[[], None]) -> None:
    """Run `call` on the connection's loop; may be called on any thread."""
    # A loop that has been closed refuses, each kind in its own way, and nobody waits there.
    with suppress(Exception):
        connection._adapter_add_callback_threadsafe(call)


def off_loop(
    connection: Any, work: Callable[[], Any], then: Callable[[Any, Exception | None], None]
) -> None:
    """Do blocking `work` in a thread of its own, then call `then(result, error)` on the loop."""

    def run() -> None:
        result, problem = None, None
        try:
            result = work()
        except Exception as error:
            problem = error
        on_loop(connection, lambda: then(result, problem))

    threading.Thread(target=run, name="warren-work", daemon=True).start()


def answered(
    connection: Any, timeout: float, late: Any, then: Callable[[Any], None]
) -> Callable[[Any], None]:
    """A function that hands the first answer to `then`; after `timeout` that is `late`."""
    given: list[Any] = []

    def give(answer: Any) -> None:
        if not given:
            given.append(answer)
            connection._adapter_remove_timeout(timer)
            then(answer)

    timer = connection._adapter_call_later(timeout, lambda: give(late))
    return give


class CallOrder:
    """Lets no call overtake one that is not through yet.

    A call that has to wait for something holds all calls behind it. A call that can't be made when
    its turn comes has no caller any more to raise to; `on_failure` is told.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._waiting: deque[Step] = deque()
        self._current: object | None = None
        self._going_on = False

    @property
    def idle(self) -> bool:
        return self._current is None and not self._waiting

    def run(self, step: Step) -> None:
        """Start `step` now if nothing is before it, and then it may raise; else in its turn."""
        if self.idle:
            self._start(step)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append(step)
        else:
            raise Unreachable(f"{_MOST_WAITING} calls wait for the cluster; try again later")

    def stop(self) -> None:
        """Start nothing more, as a broker ignores what comes behind a call that it refused."""
        self._current = object()

    def drop(self) -> int:
        """Forget what waits, and what is not through; returns how many calls waited."""
        waited = len(self._waiting)
        self._waiting.clear()
        self._current = None
        return waited

    def _start(self, step: Step) -> None:
        turn = self._current = object()

        def done() -> None:
            if self._current is turn:
                self._current = None
                # Not deeper and deeper, where call after call is through at once.
                if not self._going_on:
                    self._go_on()

        try:
            step(done)
        except BaseException:
            self._current = None
            raise

    def _go_on(self) -> None:
        self._going_on = True
        try:
            while self._waiting and self._current is None:
                try:
                    self._start(self._waiting.popleft())
                except Exception as error:
                    self._on_failure(error)
        finally:
            self._going_on = False


class InTurn(Basic.Ack):
    """An acknowledgement that waits its turn behind the calls that pika holds back.

    pika sends a synchronous method only when the one before it is answered, and others at once. A
    refused `queue_bind` must not overtake the `queue_declare` before it.
    """

    synchronous: Any = True


def ask_reply_to(connection: Any, timeout: float, then: Callable[[str | None], None]) -> None:
    """What the connected node writes into a reply-to, asked on a channel of its own; else None."""

    def ask(opened: Any) -> None:
        opened.basic_consume(REPLY_TO, lambda *_: None, auto_ack=True)
        opened.basic_publish(
            "", "warren.nobody", b"", pika.BasicProperties(reply_to=REPLY_TO), mandatory=True
        )

    def finish(reply_to: str | None) -> None:
        if not (channel.is_closed or channel.is_closing):
            channel.close()
        then(reply_to)

    channel = connection.channel(on_open_callback=ask)
    give = answered(connection, timeout, None, finish)
    channel.add_on_return_callback(lambda _, __, properties, ___: give(properties.reply_to))
    channel.add_on_close_callback(lambda *_: give(None))


class Settling:
    """Looks after a new consumer for a while: a herd that chose the same shard spreads out.

    To move is to cancel and to consume again under the same tag, by the bare methods: for pika the
    consumer is there all the time, so that what is delivered until cancel-ok reaches the
    application. `basic_cancel` would drop it, and with auto_ack it would be lost.
    """

    def __init__(
        self,
        channel: Any,
        topology: Topology,
        order: CallOrder,
        consume: Basic.Consume,
        shards: list[str],
    ) -> None:
        self._channel = channel
        self._topology = topology
        self._order = order
        self._consume = consume
        self._shards = shards
        self._random = random.Random()
        self._looks = Looks()
        # The same tag may be used again for another consumer; the callback tells them apart.
        self._callback = channel._consumers.get(consume.consumer_tag)

    def look_later(self) -> None:
        pause = self._looks.pause(self._random.random())
        if pause is not None and self._alive():
            self._channel.connection._adapter_call_later(pause, self._count)

    def _alive(self) -> bool:
        tag = self._consume.consumer_tag
        return (
            bool(self._channel.is_open)
            and self._callback is not None
            and self._channel._consumers.get(tag) is self._callback
            and tag not in self._channel._cancelled
        )

    def _count(self) -> None:
        if self._alive():
            connection = self._channel.connection
            self._topology.when_counted(
                self._shards,
                lambda counts: on_loop(connection, lambda: self._decide(counts)),
            )

    def _decide(self, counts: dict[str, int | None]) -> None:
        if not self._alive():
            return
        target = better_shard(str(self._consume.queue), counts, self._random.random)
        self._looks.seen(counts, moved=target is not None)
        if target is None:
            self.look_later()
        else:
            self._order.run(lambda done: self._move(target, done))

    def _move(self, target: str, done: Done) -> None:
        """Every call on the channel waits meanwhile: a cancel must find the consumer."""
        if not self._alive():
            done()
            return
        logger.info("moving a consumer from %r to %r, which has fewer", self._consume.queue, target)
        tag = {"consumer_tag": self._consume.consumer_tag}
        # A node that hangs never answers; the calls behind the move then go on without it.
        go_on = answered(self._channel.connection, ANSWER_TIMEOUT, None, lambda _: done())

        def cancelled(_: Any) -> None:
            if not self._alive():
                go_on(None)
                return
            self._consume.queue = target
            self._channel._rpc(self._consume, consumed, [(Basic.ConsumeOk, tag)])

        def consumed(frame: Any) -> None:
            go_on(frame)
            self.look_later()

        cancel = Basic.Cancel(consumer_tag=self._consume.consumer_tag, nowait=False)
        self._channel._rpc(cancel, cancelled, [(Basic.CancelOk, tag)])
