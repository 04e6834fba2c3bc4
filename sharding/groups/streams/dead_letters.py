"""Dead letters of a group over streams: kept in a stream of their own, before the offset passes.

A thread publishes what waits and holds each message's key until the broker has confirmed the
letter. What was refused, or is of unknown outcome, is sent again after a pause: a letter may be
there twice, and is never lost. The letter has the body, the key and the properties of the message;
its application properties too, and beside them why, where and when.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

from sharding.backoff import Backoff
from sharding.errors import WarrenError
from sharding.groups.handling.delivery import Dead, Delivery
from sharding.groups.streams.progress import Counts
from sharding.stream.environment import StreamEnvironment
from sharding.stream.messages.amqp_values import AmqpValue
from sharding.stream.messages.message import Message, encode_message
from sharding.stream.producer.producer import Producer

logger = logging.getLogger("warren.groups")

_FLUSH_TIMEOUT = 10.0
_CLOSE_TIMEOUT = 1.0
_random = random.Random()  # its own, so that nobody else's sequence of numbers changes
_BACKOFF = Backoff(first=0.2, longest=10.0)


class _Letter(NamedTuple):
    delivery: Delivery
    dead: Dead
    time: datetime
    then: Callable[[], None]
    still: Callable[[], bool]


class DeadLetters:
    """`stream` is made when the first letter comes; one that exists is used as it is.

    Without a stream no letter may come: messages are tried without end instead.
    """

    def __init__(
        self, environment: StreamEnvironment, stream: str | None, group: str, counts: Counts
    ) -> None:
        self._environment = environment
        self._stream = stream or ""
        self._group = group
        self._counts = counts
        self._changed = threading.Condition()
        self._waiting: list[_Letter] = []
        self._closed = False
        self._producer: Producer | None = None
        self._thread: threading.Thread | None = None

    def store(
        self, delivery: Delivery, dead: Dead, then: Callable[[], None], still: Callable[[], bool]
    ) -> None:
        """Call `then` once it is stored; give up when it is `still` wanted no more."""
        with self._changed:
            if not self._closed:
                self._waiting.append(_Letter(delivery, dead, datetime.now(UTC), then, still))
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="warren-dead-letters", daemon=True
                    )
                    self._thread.start()
                return
        dead.stored()

    def close(self, timeout: float) -> None:
        """End; what waits still is given up, and so not passed by any offset."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        failures = 0
        while letters := self._next():
            rest = self._store(letters)
            with self._changed:
                self._waiting[:0] = rest
                failures = failures + 1 if rest else 0
                if rest:
                    pause = _BACKOFF.pause(failures, _random.random())
                    self._changed.wait_for(lambda: self._closed, pause)
        for letter in self._waiting:
            letter.dead.stored()
        self._let_go()

    def _next(self) -> list[_Letter]:
        """What waits and is wanted; nothing once it is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return []
                letters, self._waiting = self._waiting, []
            for letter in letters:
                if not letter.still():
                    letter.dead.stored()
            if wanted := [letter for letter in letters if letter.still()]:
                return wanted

    def _store(self, letters: list[_Letter]) -> list[_Letter]:
        """Returns what has to be sent again."""
        try:
            producer = self._open()
            bodies = [
                letter_of(each.delivery, each.dead, each.time, self._group) for each in letters
            ]
            numbers = producer.send_encoded(bodies)
            reports = [producer.flush(_FLUSH_TIMEOUT)]
            if not reports[0].all_stored:
                reports.append(producer.close(_CLOSE_TIMEOUT))  # nothing is pending after that
        except WarrenError as error:
            logger.warning("%d dead letters for %s wait: %s", len(letters), self._stream, error)
            self._let_go()
            return letters
        failed = {each.number: each.reason for report in reports for each in report.not_stored}
        # Where some are not named, any may be among them.
        is_named = not any(report.omitted for report in reports)
        rest = []
        for number, letter in zip(numbers, letters, strict=True):
            if number in failed or not is_named:
                rest.append(letter)
                continue
            self._counts.add("dead_lettered")
            logger.warning(
                "offset %s of %s is stored in %s as a dead letter: %s, %s",
                letter.delivery.offset,
                letter.delivery.shard,
                self._stream,
                letter.dead.why,
                letter.dead.error,
            )
            letter.then()
            letter.dead.stored()
        if rest:
            reason = next(iter(failed.values()))
            logger.warning("%d dead letters for %s wait: %s", len(rest), self._stream, reason)
        if len(reports) > 1:
            self._let_go()
        return rest

    def _open(self) -> Producer:
        if self._producer is None:
            if not self._environment.exists(self._stream):
                self._environment.create_stream(self._stream, exist_ok=True)
            self._producer = self._environment.producer(self._stream)
        return self._producer

    def _let_go(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(WarrenError):
                producer.close(_CLOSE_TIMEOUT)


def letter_of(delivery: Delivery, dead: Dead, moment: datetime, group: str) -> bytes:
    """The dead letter of a message, encoded."""
    message = delivery.properties
    assert isinstance(message, Message)
    told: dict[str, AmqpValue] = {
        **message.application_properties,
        "x-warren-reason": str(dead.why),
        "x-warren-error": dead.error,
        "x-warren-attempts": dead.attempts,
        "x-warren-shard": delivery.shard,
        "x-warren-key": delivery.key,
        "x-warren-time": moment.isoformat(timespec="milliseconds"),
        "x-warren-offset": delivery.offset,
        "x-warren-group": group,
    }
    named = {str(name): value for name, value in message.annotations.items()}
    return encode_message(
        delivery.body,
        key=message.key,
        properties=message.properties,
        application_properties=told,
        annotations=named,
    )
