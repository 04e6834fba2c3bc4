"""Attempts at a shard are spaced; one that is away, refused or left over is treated as such."""

from __future__ import annotations

from sharding.groups.sharing.assignment import REFUSALS_WORTH_A_WARNING, Attempts


def test_attempts_keep_their_distance_until_one_succeeds() -> None:
    attempts = Attempts(interval=2, patience=9)
    assert attempts.is_due("s", 10)
    attempts.begin("s", 10)
    assert not attempts.is_due("s", 11.9)
    assert attempts.is_due("s", 12)
    attempts.begin("s", 12)
    attempts.taken("s")
    assert attempts.is_due("s", 12)


def test_what_does_not_answer_is_away_until_it_is_tried_again() -> None:
    attempts = Attempts(interval=2, patience=9)
    attempts.begin("s", 10)
    assert not attempts.is_away("s", 11)
    attempts.not_answered("s")
    assert attempts.is_away("s", 11)
    assert not attempts.is_away("s", 12)  # counted in, and dealt to somebody who tries
    attempts.begin("s", 12)
    assert not attempts.is_away("s", 12)


def test_a_shard_refused_for_long_is_said_once() -> None:
    attempts = Attempts(interval=2, patience=9)
    said = [attempts.refused("s") for _ in range(3 * REFUSALS_WORTH_A_WARNING)]
    assert said.count(True) == 1
    attempts.taken("s")
    assert [attempts.refused("s") for _ in range(REFUSALS_WORTH_A_WARNING)].count(True) == 1


def test_a_shard_that_nobody_takes_is_anybodys() -> None:
    attempts = Attempts(interval=2, patience=9)
    assert attempts.overdue({"s", "t"}, 10) == []
    assert attempts.overdue({"s"}, 15) == []
    assert attempts.overdue({"s", "t"}, 19.5) == ["s"]  # t was held in between
