"""What a process keeps across tasks: made once, dropped when dead, never a parent's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spark.process import ProcessCache


class Thing:
    made = 0

    def __init__(self, key: str) -> None:
        Thing.made += 1
        self.key = key
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class Process:
    """A clock and a process id that can be set."""

    now = 0.0
    pid = 1


class Died(Exception):
    pass


@pytest.fixture
def process() -> Process:
    Thing.made = 0
    return Process()


@pytest.fixture
def kept(process: Process) -> Iterator[ProcessCache[str, Thing]]:
    found = ProcessCache(
        Thing, Thing.close, lambda error: isinstance(error, Died), most=2, idle=100,
        clock=lambda: process.now, pid=lambda: process.pid,
    )  # fmt: skip
    yield found
    found.close_all()


def use(kept: ProcessCache[str, Thing], key: str, error: Exception | None = None) -> Thing:
    with kept.lend(key) as thing:
        if error is not None:
            raise error
    return thing


def test_equal_keys_get_the_same_thing_task_after_task(kept: ProcessCache[str, Thing]) -> None:
    assert use(kept, "a") is use(kept, "a")
    assert use(kept, "b") is not use(kept, "a")
    assert Thing.made == 2


def test_a_dead_one_is_closed_and_made_anew(kept: ProcessCache[str, Thing]) -> None:
    first = use(kept, "a")
    with pytest.raises(Died):
        use(kept, "a", Died())
    assert first.closed == 1
    assert use(kept, "a") is not first


def test_a_task_that_fails_for_its_own_reasons_costs_no_connection(
    kept: ProcessCache[str, Thing],
) -> None:
    first = use(kept, "a")
    with pytest.raises(ZeroDivisionError):
        use(kept, "a", ZeroDivisionError())
    assert use(kept, "a") is first


def test_a_dead_one_is_closed_only_when_its_last_user_is_done(
    kept: ProcessCache[str, Thing],
) -> None:
    with kept.lend("a") as thing:
        with pytest.raises(Died):
            use(kept, "a", Died())
        assert thing.closed == 0
        assert use(kept, "a") is not thing
    assert thing.closed == 1


def test_too_many_or_too_old_ones_are_closed_but_none_in_use(
    kept: ProcessCache[str, Thing], process: Process
) -> None:
    with kept.lend("in use") as in_use:
        first = use(kept, "a")
        process.now = 1
        second = use(kept, "b")
        assert (first.closed, len(kept)) == (1, 2)
        process.now = 200
        use(kept, "in use")
        assert (second.closed, in_use.closed) == (1, 0)


def test_a_forked_child_neither_uses_nor_closes_what_its_parent_has(
    kept: ProcessCache[str, Thing], process: Process
) -> None:
    first = use(kept, "a")
    process.pid = 2
    assert len(kept) == 0
    kept.close_all()
    assert use(kept, "a") is not first
    assert first.closed == 0


def test_all_are_closed_at_the_end(kept: ProcessCache[str, Thing]) -> None:
    things = [use(kept, "a"), use(kept, "b")]
    kept.close_all()
    assert [thing.closed for thing in things] == [1, 1]


def test_one_that_can_not_be_made_is_not_remembered(process: Process) -> None:
    def refuse(key: str) -> Thing:
        raise Died(key)

    kept = ProcessCache(refuse, Thing.close, lambda _: True, pid=lambda: process.pid)
    for _ in range(2):
        with pytest.raises(Died), kept.lend("a"):
            pass
    assert len(kept) == 0
