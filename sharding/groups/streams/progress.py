"""One worker's turn at a partition: what it has in hand, how far it is, when to store that.

A turn begins when the broker makes this worker the active one and ends when it makes another one
so, or when the connection is lost. Outcomes that come after the end are not heard: the message is
somebody else's by then.

Messages are submitted on the partition's thread; outcomes come on the runner's threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Protocol, TypeVar

from sharding.errors import InvalidInput
from sharding.groups.handling.delivery import Dead, Delivery, Done, Outcome
from sharding.groups.handling.threads import HandlerThreads
from sharding.groups.streams.options import StreamGroupOptions
from sharding.stream.messages.amqp_values import AmqpValue, Described
from sharding.stream.messages.message import Message


class DeadLetterStore(Protocol):
    """Stores dead letters; `DeadLetters` in real life."""

    def store(
        self, delivery: Delivery, dead: Dead, then: Callable[[], None], still: Callable[[], bool]
    ) -> None:
        """Call `then` once it is stored; give up when it is `still` wanted no more."""


class Turn:
    """`is_stored` says whether the broker has `mark`; if not, it is to be stored at once."""

    def __init__(
        self,
        mark: int | None,
        runner: HandlerThreads,
        dead_letters: DeadLetterStore,
        options: StreamGroupOptions,
        on_progress: Callable[[bool], None],
        clock: Callable[[], float],
        *,
        is_stored: bool = True,
    ) -> None:
        self.sure = mark if is_stored else None
        """What the broker has for sure: what this turn sends to be stored may get lost."""
        self._runner = runner
        self._dead_letters = dead_letters
        self._options = options
        self._on_progress = on_progress
        self._clock = clock
        self._lock = threading.Lock()
        self._worthwhile = max(1, options.prefetch // 10)
        self._most = max(options.prefetch, options.max_ahead)
        self._watermark = Watermark(mark)
        self._stored = self.sure
        self._moved = 0 if is_stored else 1
        self._since = clock()
        self._over = False

    @property
    def room(self) -> int:
        """How many more messages may be submitted now."""
        watermark = self._watermark
        return min(self._options.prefetch - watermark.in_hand, self._most - watermark.open)

    @property
    def has_room(self) -> bool:
        """Whether it is worth to submit more: to wake a thread for each message costs too much."""
        return self.room >= self._worthwhile

    def held_back_by(self) -> int | None:
        """The offset that nothing more is begun behind, if `max_ahead` are."""
        with self._lock:
            left = self._most - self._watermark.open
            return self._watermark.oldest if left < self._worthwhile else None

    @property
    def in_hand(self) -> int:
        """Messages submitted of which the outcome is not known."""
        return self._watermark.in_hand

    def submit(self, message: Message, stream: str) -> None:
        offset = message.offset
        assert offset is not None
        delivery = Delivery(
            message.body,
            message.key or "",
            stream,
            message.application_properties,
            message,
            offset=offset,
        )
        with self._lock:
            self._watermark.begin(offset)
        # Messages without a key share one lane, so that they keep the partition's order. The dead
        # letter holds the message as it came, so the handler gets another one to write into.
        given = copy_of(message)
        theirs = Delivery(
            given.body, delivery.key, stream, given.application_properties, given, offset=offset
        )
        self._runner.submit(message.key, theirs, lambda outcome: self._on(outcome, delivery))

    def due_at(self) -> float | None:
        """When the offset has to be stored; None while there is nothing new to store."""
        with self._lock:
            if not self._moved:
                return None
            many = self._moved >= self._options.store_every_messages
            first = self._stored is None  # so that "next" has a fixed meaning as early as can be
            return self._since if many or first else self._since + self._options.store_every_seconds

    def to_store(self) -> int | None:
        """The offset to store now; it counts as stored from here on."""
        with self._lock:
            if not self._moved:
                return None
            self._moved = 0
            self._since = self._clock()
            self._stored = self._watermark.mark
            return self._stored

    def end(self) -> int | None:
        """The last offset up to which all is handled; what comes later is not heard."""
        with self._lock:
            self._over = True
            return self._watermark.mark

    def _on(self, outcome: Outcome, delivery: Delivery) -> None:
        assert delivery.offset is not None
        if isinstance(outcome, Dead):
            self._dead_letters.store(
                delivery, outcome, lambda: self._on(Done(), delivery), lambda: not self._over
            )
            return
        with self._lock:
            if self._over:
                return
            nothing_new = not self._moved
            if isinstance(outcome, Done):
                if nothing_new:
                    self._since = self._clock()
                self._moved += self._watermark.handled(delivery.offset)
            else:
                self._watermark.given_back(delivery.offset)
            is_first = nothing_new and self._moved > 0
        self._on_progress(is_first)


def copy_of(message: Message) -> Message:
    """The same, with nothing in it that one may write into and the other would see."""
    # Each message passes here, and `replace` would take twice as long.
    return Message(
        message.body,
        message.key,
        None if message.properties is None else replace(message.properties),
        _copy_of(message.application_properties),
        _copy_of(message.annotations),
        None if message.value is None else deepcopy(message.value),
        message.offset,
        message.timestamp,
        message.stream,
    )


_Name = TypeVar("_Name")


def _copy_of(named: Mapping[_Name, AmqpValue]) -> dict[_Name, AmqpValue]:
    # To copy a text deeply takes longer than to copy a whole dict of them.
    return {
        name: deepcopy(value) if isinstance(value, tuple | dict | Described) else value
        for name, value in named.items()
    }


# Up to which offset everything is handled, though handlers finish in any order. Pure.
#
#     begun     10 11 12 14 15        13 was never a message: stored offsets take an offset too
#     handled   10 11    14
#     mark         11
#
# The mark is what may be stored: whoever goes on after it repeats what is behind it and was handled
# already (14), and misses nothing. Beginnings come in rising order, endings in any.


class Watermark:
    """Of one partition, while it is this worker's turn."""

    def __init__(self, mark: int | None = None) -> None:
        self.mark = mark
        """The last offset that is handled together with all before it; None if none is."""
        self._in_hand: set[int] = set()
        self._open: deque[int] = deque()
        self._handled: set[int] = set()

    @property
    def in_hand(self) -> int:
        """Messages begun of which the outcome is not known."""
        return len(self._in_hand)

    @property
    def open(self) -> int:
        """Messages begun that the mark has not passed, those included that are handled."""
        return len(self._open)

    @property
    def oldest(self) -> int | None:
        """The first offset that the mark has not passed."""
        return self._open[0] if self._open else None

    def begin(self, offset: int) -> None:
        last = self._open[-1] if self._open else self.mark
        if last is not None and offset <= last:
            raise InvalidInput("offset", f"must be above {last}, the one begun before", offset)
        self._open.append(offset)
        self._in_hand.add(offset)

    def handled(self, offset: int) -> int:
        """Returns by how many messages the mark moved; it may be said twice."""
        if offset not in self._in_hand:
            return 0
        self._handled.add(offset)
        moved = 0
        while self._open and self._open[0] in self._handled:
            self.mark = self._open.popleft()
            self._handled.remove(self.mark)
            moved += 1
        self._in_hand.discard(offset)
        return moved

    def given_back(self, offset: int) -> None:
        """It will not be handled in this turn, so the mark will never pass it."""
        self._in_hand.discard(offset)


class Counts:
    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def all(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)
