"""Dead letters of a stream group: none is called stored that the broker has not confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from sharding.errors import Unreachable
from sharding.groups.handling.delivery import Dead, Delivery, Why
from sharding.groups.streams.dead_letters import DeadLetters
from sharding.groups.streams.progress import Counts
from sharding.outcomes import Outcome, Report, Result
from sharding.stream import Message, StreamEnvironment
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE


def unknown(number: int) -> Result:
    return Result(number, Outcome.UNKNOWN, "not confirmed")


class FakeProducer:
    """Takes every letter, and reports what it was told to."""

    largest_message = 1_000

    def __init__(self, flushed: Report, closed: Report | Exception) -> None:
        self.letters: list[bytes] = []
        self._flushed, self._closed = flushed, closed

    def send_encoded(self, messages: Sequence[bytes]) -> range:
        self.letters += messages
        return range(len(messages))

    def flush(self, timeout: float) -> Report:
        assert timeout > 0
        return self._flushed

    def close(self, timeout: float) -> Report:
        assert timeout > 0
        closed, self._closed = self._closed, Report()
        if isinstance(closed, Exception):
            raise closed
        return closed


class FakeEnvironment:
    def __init__(self, *producers: FakeProducer) -> None:
        self._producers = list(producers)

    def exists(self, stream: str) -> bool:
        return bool(stream)

    def producer(self, stream: str, **_: Any) -> FakeProducer:
        assert stream == "events.dead"
        return self._producers.pop(0)


class Room:
    """Dead letters over some producers, one after the other, and whose offset may pass."""

    def __init__(self, *producers: FakeProducer) -> None:
        environment = cast(StreamEnvironment, FakeEnvironment(*producers))
        self.counts = Counts(["dead_lettered"])
        self.letters = DeadLetters(environment, "events.dead", "g", self.counts)
        self.passed: list[int] = []

    def store(self, count: int) -> None:
        """All at once, so that they are sent together."""
        with self.letters._changed:
            for offset in range(count):
                self._store(offset)

    def _store(self, offset: int) -> None:
        message = Message(body=b"%d" % offset, offset=offset, stream="events-0")
        delivery = Delivery(b"%d" % offset, "k", "events-0", properties=message, offset=offset)
        dead = Dead(Why.FAILED, "ValueError: no", 5, lambda: None)
        self.letters.store(delivery, dead, lambda: self.passed.append(offset), lambda: True)

    def finish(self, count: int) -> None:
        wait_until(lambda: len(self.passed) == count, PATIENCE)
        assert self.counts.all() == {"dead_lettered": count}
        self.letters.close(PATIENCE)


@pytest.fixture
def well() -> FakeProducer:
    return FakeProducer(Report(stored=3), Report())


def test_letters_that_are_stored_are_sent_once(well: FakeProducer) -> None:
    room = Room(well)
    room.store(3)
    room.finish(3)
    assert (len(well.letters), room.passed) == (3, [0, 1, 2])


@pytest.mark.parametrize(
    ("flushed", "closed", "again"),
    [
        # Named as not stored, …
        (Report(stored=2, unknown=1, not_stored=(unknown(1),)), Report(), [1]),
        # … without an outcome at first, and then of an unknown one, or stored after all, …
        (Report(stored=1, pending=2), Report(stored=1, unknown=1, not_stored=(unknown(2),)), [2]),
        (
            Report(refused=1, pending=2, not_stored=(Result(0, Outcome.REFUSED, "full"),)),
            Report(unknown=2, not_stored=(unknown(1), unknown(2))),
            [0, 1, 2],
        ),
        (Report(stored=1, pending=2), Report(stored=2), []),
        # … and where nobody can tell which ones are not, all are sent again.
        (Report(stored=1, unknown=2, not_stored=(unknown(1),)), Report(), [0, 1, 2]),
        (Report(stored=1, pending=2), Unreachable("gone"), [0, 1, 2]),
    ],
)
def test_letter_is_sent_again_unless_it_is_known_to_be_stored(
    flushed: Report, closed: Report | Exception, again: list[int], well: FakeProducer
) -> None:
    ill = FakeProducer(flushed, closed)
    room = Room(ill, well)
    room.store(3)
    room.finish(3)
    assert len(ill.letters) == 3
    assert well.letters == [ill.letters[number] for number in again]
    assert room.passed == [n for n in range(3) if n not in again] + again
