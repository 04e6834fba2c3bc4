"""Dead letters of a group over streams: kept in a stream of their own, before the offset passes.

A thread publishes what waits and holds each message's key until the broker has confirmed the
letter. What was refused, or is of unknown outcome, is sent again after a pause: a letter may be
there twice, and is never lost. Nothing ends the thread: no other one would store what waits. The
letter has the body, the key and the properties of the message; its application properties too, and
beside them why, where and when, as far as that can be written.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sharding.backoff import Backoff
from sharding.errors import WarrenError, reason
from sharding.groups.handling.delivery import Dead, Delivery
from sharding.groups.log import logger
from sharding.groups.streams.progress import Counts
from sharding.stream.environment import StreamEnvironment
from sharding.stream.messages.amqp_values import AmqpValue
from sharding.stream.messages.message import Message, encode_message
from sharding.stream.producer.producer import Producer

_FLUSH_TIMEOUT = 10.0
_CLOSE_TIMEOUT = 1.0
_SAID = 200  # of why a part can't be encoded
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
            _call(letter.dead.stored)
        self._let_go()

    def _next(self) -> list[_Letter]:
        """What waits and is wanted; nothing once it is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return []
                letters, self._waiting = self._waiting, []
            wanted = []
            for letter in letters:
                if letter.still():  # asked once: a turn may end at any moment
                    wanted.append(letter)
                else:
                    _call(letter.dead.stored)
            if wanted:
                return wanted

    def _store(self, letters: list[_Letter]) -> list[_Letter]:
        """Returns what has to be sent again."""
        rest = []
        written = []
        try:
            producer = self._open()
            for each in letters:
                made = self._write(each, producer.largest_message)
                if made is None:
                    rest.append(each)
                else:
                    written.append((each, made))
            if not written:
                return rest
            numbers = producer.send_encoded([made.encoded for _, made in written])
            reports = [producer.flush(_FLUSH_TIMEOUT)]
            if not reports[0].all_stored:
                reports.append(producer.close(_CLOSE_TIMEOUT))  # nothing is pending after that
        except Exception as error:
            self._warn(len(letters), error)
            self._let_go()
            return letters
        failed = {each.number: each.reason for report in reports for each in report.not_stored}
        # Where some are not named, any may be among them.
        is_named = not any(report.omitted for report in reports)
        unstored = []
        for number, (letter, (_, left_out)) in zip(numbers, written, strict=True):
            if number in failed or not is_named:
                unstored.append(letter)
                continue
            self._counts.add("dead_lettered")
            logger.warning(
                "offset %s of %s is stored in %s as a dead letter%s: %s, %s",
                letter.delivery.offset,
                letter.delivery.shard,
                self._stream,
                f", without {', '.join(left_out)}" if left_out else "",
                letter.dead.why,
                letter.dead.error,
            )
            _call(letter.then)
            _call(letter.dead.stored)
        if unstored:
            why = next(iter(failed.values()), "it is not known which are stored")
            logger.warning("%d dead letters for %s wait: %s", len(unstored), self._stream, why)
        if len(reports) > 1:
            self._let_go()
        return rest + unstored

    def _write(self, letter: _Letter, room: int) -> Letter | None:
        """None where that fails now; the others must not wait for it."""
        try:
            return letter_of(letter.delivery, letter.dead, letter.time, self._group, room)
        except Exception as error:
            self._warn(1, error)
            return None

    def _warn(self, count: int, error: Exception) -> None:
        logger.warning(
            "%d dead letters for %s wait: %s",
            *(count, self._stream, reason(error)),
            exc_info=None if isinstance(error, WarrenError) else error,
        )

    def _open(self) -> Producer:
        if self._producer is None:
            if not self._environment.exists(self._stream):
                self._environment.create_stream(self._stream, exist_ok=True)
            self._producer = self._environment.producer(self._stream)
        return self._producer

    def _let_go(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(Exception):
                producer.close(_CLOSE_TIMEOUT)


def _call(owner: Callable[[], None]) -> None:
    """What the owner of a message raises must not end the thread."""
    try:
        owner()
    except Exception as error:
        logger.error("the owner of a message failed to settle it", exc_info=error)


class Letter(NamedTuple):
    encoded: bytes
    left_out: tuple[str, ...] = ()
    """What of the message is not in it, and why."""


# A dead letter always comes to be. What of the message can't be encoded is left out, and then,
# until the letter has room in a frame, what is largest. `x-warren-left-out` names each part with
# its size; the message itself stays in its stream, at `x-warren-offset`, until retention deletes
# it.


def letter_of(delivery: Delivery, dead: Dead, moment: datetime, group: str, room: int) -> Letter:
    """The dead letter of a message, of `room` bytes at most."""
    message = delivery.properties
    assert isinstance(message, Message)
    whole: dict[str, Callable[[], dict[str, Any]]] = {
        "body": lambda: {"body": delivery.body},
        "key": lambda: {"key": message.key},
        "properties": lambda: {"properties": message.properties},
        "application properties": lambda: {
            "application_properties": message.application_properties
        },
        "annotations": lambda: {
            "annotations": {str(name): value for name, value in message.annotations.items()}
        },
    }
    told: dict[str, AmqpValue] = {
        "x-warren-reason": str(dead.why),
        "x-warren-error": dead.error.encode("utf-8", "backslashreplace").decode(),
        "x-warren-attempts": dead.attempts,
        "x-warren-shard": delivery.shard,
        "x-warren-time": moment.isoformat(timespec="milliseconds"),
        "x-warren-offset": delivery.offset,
        "x-warren-group": group,
    }
    left_out: list[str] = []
    parts: dict[str, dict[str, Any]] = {}
    sizes: dict[str, int] = {}
    for name, part in whole.items():
        try:
            parts[name] = part()
            sizes[name] = len(encode_message(**{"body": b""} | parts[name]))
        except Exception as error:  # whatever is wrong with it, the rest is stored
            left_out.append(f"{name}: {reason(error)}"[:_SAID])
    while True:
        kept = {field: value for name in sizes for field, value in parts[name].items()}
        own = kept.pop("application_properties", {})
        if "key" in kept and delivery.key:
            told["x-warren-key"] = delivery.key
        else:
            told.pop("x-warren-key", None)
        if left_out:
            told["x-warren-left-out"] = "; ".join(left_out)
        encoded = encode_message(**{"body": b""} | kept, application_properties={**own, **told})
        if len(encoded) <= room or not sizes:
            return Letter(encoded, tuple(left_out))
        largest = max(sizes, key=sizes.__getitem__)
        left_out.append(f"{largest}: {sizes.pop(largest)} bytes")
