"""The mark of a stream group's worker and its dead letters, without a broker: what is bounded, and
what no moment at which a turn ends may leave behind (08, 24a, 24d)."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from sharding.groups import StreamGroupOptions
from sharding.groups.handling.delivery import Dead, Delivery, Done, Outcome, Why
from sharding.groups.streams.dead_letters import DeadLetters, _Letter
from sharding.groups.streams.progress import Counts, Turn
from sharding.outcomes import Report
from sharding.stream import Message, StreamEnvironment
from sharding.stream.protocol.constants import MIB
from tests.cluster import wait_until
from tests.cluster.waiting import PATIENCE


class AtOnce:
    """Handlers that are done at once, but for one message."""

    def __init__(self, hangs_at: int) -> None:
        self._hangs_at = hangs_at

    def submit(self, _: object, delivery: Delivery, then: Callable[[Outcome], None]) -> None:
        if delivery.offset != self._hangs_at:
            then(Done())


def test_message_that_is_never_settled_bounds_what_is_kept_and_repeated_behind_it() -> None:
    """08. One message that was not settled (poison without dead letters, a handler that hangs)
    stopped the mark, and every message handled behind it was remembered: 141 MiB for two million,
    all of which a restart repeated. What counted was only what was in hand."""
    many, options = 300_000, StreamGroupOptions()
    runner, letters = cast(Any, AtOnce(hangs_at=7)), cast(Any, None)
    turn = Turn(None, runner, letters, options, lambda _: None, lambda: 0.0)
    offset = 0
    tracemalloc.start()
    try:
        while turn.has_room and offset < many:  # as the partition's thread does
            for _ in range(turn.room):
                turn.submit(Message(b"", offset=offset), "s")
                offset += 1
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert turn.in_hand == 1, "all others are handled"
    assert turn.held_back_by() == 7
    assert turn.end() == 6, "a restart repeats what comes after"
    assert offset - 7 <= options.max_ahead
    assert held < 4 * MIB


class EndsWhenAsked:
    """A turn that ends right after the question whether it still goes on was answered so often."""

    def __init__(self, after: int) -> None:
        self._left = after

    def still(self) -> bool:
        self._left -= 1
        return self._left >= 0


class Settled:
    """How often each letter's message was let go of, and how often it counted as stored."""

    def __init__(self) -> None:
        self.let_go: Counter[int] = Counter()
        self.stored: Counter[int] = Counter()

    def letter(self, number: int, turn: EndsWhenAsked) -> _Letter:
        def let_go() -> None:
            self.let_go[number] += 1

        def stored() -> None:
            self.stored[number] += 1

        dead = Dead(Why.FAILED, "ValueError: never", 1, let_go)
        delivery = Delivery(b"", "", "s", properties=Message(b""), offset=number)
        return _Letter(delivery, dead, datetime.now(UTC), stored, turn.still)


@pytest.mark.parametrize("asked", range(6))
def test_turn_that_ends_between_two_looks_leaves_no_letter_behind(asked: int) -> None:
    """24a. Whether a letter was still wanted was asked twice. A turn that ended between the two
    left one that was neither stored nor let go of: its key was blocked in this worker for good."""
    settled, turn = Settled(), EndsWhenAsked(asked)
    letters = DeadLetters(cast(StreamEnvironment, None), "s.dead", "g", Counts(("dead_lettered",)))
    letters._waiting = [settled.letter(number, turn) for number in range(3)]
    # Where none is wanted it waits for more, and is closed.
    letters._changed.wait_for = lambda *_: setattr(letters, "_closed", not letters._waiting)  # type: ignore[method-assign,assignment]
    going_on = [letter.delivery.offset or 0 for letter in letters._next()]
    assert sorted([*going_on, *settled.let_go.elements()]) == [0, 1, 2]


class ConfirmsAtOnce:
    """The environment, and a producer of it."""

    largest_message = MIB

    def exists(self, _: str) -> bool:
        return True

    def producer(self, _: str) -> ConfirmsAtOnce:
        return self

    def send_encoded(self, messages: list[bytes]) -> range:
        return range(len(messages))

    def flush(self, _: float) -> Report:
        return Report()

    def close(self, _: float) -> Report:
        return Report()


def test_every_letter_is_stored_or_let_go_of_whenever_its_turn_ends() -> None:
    """24d: the same with the thread that stores letters. It was never seen by chance (0 of 3,406
    turns), so a turn ends here where it matters: at a random one of the looks."""
    rng, turns, in_a_turn = random.Random(24), 200, 20
    environment = cast(StreamEnvironment, ConfirmsAtOnce())
    letters = DeadLetters(environment, "s.dead", "g", Counts(("dead_lettered",)))
    settled = Settled()
    for number in range(turns):
        turn = EndsWhenAsked(rng.randrange(2 * in_a_turn))
        for each in range(in_a_turn):
            one = settled.letter(number * in_a_turn + each, turn)
            letters.store(one.delivery, one.dead, one.then, one.still)
    wait_until(
        lambda: len(settled.let_go) == turns * in_a_turn,
        PATIENCE,
        explain=lambda: f"{turns * in_a_turn - len(settled.let_go)} letters were left behind",
    )
    letters.close(PATIENCE)
    assert set(settled.let_go.values()) == {1}
    assert set(settled.stored.values()) == {1}
    assert 0 < len(settled.stored) < turns * in_a_turn, "some turns ended, some did not"
