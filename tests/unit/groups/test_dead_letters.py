"""Dead letters of a stream group: none is called stored that the broker has not confirmed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import pytest

from sharding.errors import Unreachable
from sharding.groups import Retry, StreamGroupOptions
from sharding.groups.handling.delivery import Dead, Delivery, Why
from sharding.groups.handling.threads import HandlerThreads
from sharding.groups.streams import dead_letters
from sharding.groups.streams.dead_letters import DeadLetters, Letter, letter_of
from sharding.groups.streams.progress import Counts, Turn
from sharding.outcomes import Outcome, Report, Result
from sharding.stream import Message, StreamEnvironment
from sharding.stream.messages.message import Properties, decode_message, encode_message
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE


def unknown(number: int) -> Result:
    return Result(number, Outcome.UNKNOWN, "not confirmed")


class FakeProducer:
    """Takes every letter, and reports what it was told to."""

    largest_message = 1_000

    def __init__(self, flushed: Report, closed: Report | Exception) -> None:
        self.letters: list[bytes] = []
        self.raises: list[Exception] = []
        self._flushed, self._closed = flushed, closed

    def send_encoded(self, messages: Sequence[bytes]) -> range:
        if self.raises:
            raise self.raises.pop()
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
        self.let_go: list[int] = []
        self.odd: dict[int, dict[str, Any]] = {}
        """By offset, application properties."""
        self.raises: set[int] = set()
        """Offsets whose owner fails."""

    def store(self, count: int) -> None:
        """All at once, so that they are sent together."""
        with self.letters._changed:
            for offset in range(count):
                self._store(offset)

    def _store(self, offset: int) -> None:
        odd = self.odd.get(offset, {})
        message = Message(b"%d" % offset, None, None, odd, offset=offset, stream="events-0")
        delivery = Delivery(b"%d" % offset, "k", "events-0", properties=message, offset=offset)
        dead = Dead(Why.FAILED, "ValueError: no", 5, lambda: self.let_go.append(offset))
        self.letters.store(delivery, dead, lambda: self._pass(offset), lambda: True)

    def _pass(self, offset: int) -> None:
        self.passed.append(offset)
        if offset in self.raises:
            raise RuntimeError("owner")

    def finish(self, count: int) -> None:
        wait_until(lambda: len(self.passed) == len(self.let_go) == count, PATIENCE)
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


class Unprintable:
    """A row of a database whose session is closed, say."""

    def __repr__(self) -> str:
        raise RuntimeError("detached")


class Unsizable(dict[str, Any]):
    """Written into while it is read."""

    def items(self) -> NoReturn:
        raise RuntimeError("dictionary changed size during iteration")


@pytest.mark.parametrize("odd", [{"x": Unprintable()}, Unsizable({"x": 1})])
def test_part_that_can_not_be_written_is_left_out_whatever_it_raises(
    odd: dict[str, Any], well: FakeProducer
) -> None:
    room = Room(well)
    room.odd[1] = odd
    room.store(3)
    room.finish(3)
    told = decode_message(well.letters[1]).application_properties
    assert str(told["x-warren-left-out"]).startswith("application properties: ")
    assert decode_message(well.letters[1]).body == b"1"


def test_letter_that_can_not_be_made_now_is_made_later_and_holds_up_no_other(
    well: FakeProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int | None] = []

    def fail_once(delivery: Delivery, *rest: Any) -> Letter:
        tries.append(delivery.offset)
        if tries == [0]:
            raise MemoryError
        return letter_of(delivery, *rest)

    monkeypatch.setattr(dead_letters, "letter_of", fail_once)
    room = Room(well)
    room.store(3)
    room.finish(3)
    assert room.passed == [1, 2, 0]


def test_nothing_that_is_raised_ends_the_thread(well: FakeProducer) -> None:
    well.raises = [RuntimeError("odd"), MemoryError()]
    room = Room(well, well, well)
    room.raises.add(1)
    room.store(3)
    room.finish(3)
    assert room.passed == [0, 1, 2], "and none is passed twice"


def test_letter_holds_the_message_as_it_came_whatever_the_handler_wrote(well: FakeProducer) -> None:
    def spoil(delivery: Delivery) -> NoReturn:
        message = delivery.properties
        assert delivery.headers is message.application_properties
        cast(dict[str, Any], delivery.headers).update(tenant="other", row=Unprintable())
        message.annotations["deep"]["in"] = "other"
        object.__setattr__(message.properties, "subject", "other")
        object.__setattr__(message, "body", b"other")
        raise ValueError("no")

    came = encode_message(
        b"body",
        key="k",
        properties=Properties(subject="acme"),
        application_properties={"tenant": "acme"},
        annotations={"deep": {"in": "acme"}},
    )
    room = Room(well)
    options = StreamGroupOptions(retry=Retry(attempts=2, max_delay=0.001))
    runner = HandlerThreads(spoil, options)
    turn = Turn(None, runner, room.letters, options, lambda _: None, time.monotonic)
    turn.submit(decode_message(came, offset=0), "events-0")
    wait_until(lambda: turn._watermark.mark == 0, PATIENCE)
    letter = decode_message(well.letters[0])
    assert (letter.body, letter.key) == (b"body", "k")
    assert letter.properties == Properties(subject="acme")
    assert letter.annotations["deep"] == {"in": "acme"}
    own = {n: v for n, v in letter.application_properties.items() if "x-warren" not in n}
    assert own == {"tenant": "acme"}
    assert runner.stop(PATIENCE)
    room.letters.close(PATIENCE)
