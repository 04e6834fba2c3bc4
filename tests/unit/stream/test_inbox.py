"""The hand-over between reading threads and the application: bounded, fair, and exact."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.errors import Unreachable
from sharding.stream.consumer.inbox import Inbox, Lane, Taken
from tests.cluster.waiting import PATIENCE

pytestmark = pytest.mark.timeout(PATIENCE)  # who waits for ever fails by this


def chunk(size: int = 10) -> memoryview:
    return memoryview(bytes(size))


def filled(inbox: Inbox, lane: Lane, source: object, *ranges: tuple[int, int]) -> None:
    for first, end in ranges:
        assert inbox.put(lane, source, first, end, chunk())


def take(inbox: Inbox) -> Taken:
    taken = inbox.take(0.0)
    assert taken is not None
    return taken


def listening(inbox: Inbox, stream: str = "s", position: int | None = 0) -> tuple[Lane, object]:
    lane, source = Lane(stream, position), object()
    inbox.listen(lane, source)
    return lane, source


def test_all_waiting_chunks_of_a_lane_are_taken_together() -> None:
    inbox = Inbox(10)
    lane, source = listening(inbox)
    filled(inbox, lane, source, (0, 5), (5, 9), (9, 10))
    taken = take(inbox)
    assert (taken.first, taken.end, len(taken.chunks), taken.gaps) == (0, 10, 3, ())
    assert lane.position == 10
    assert inbox.take(0.0) is None


@pytest.mark.parametrize(
    ("inbox", "expected"),
    [(Inbox(10, batch_chunks=2), [2, 2, 1]), (Inbox(10, batch_bytes=25), [2, 2, 1])],
)
def test_what_is_taken_at_once_is_bounded(inbox: Inbox, expected: list[int]) -> None:
    lane, source = listening(inbox)
    filled(inbox, lane, source, *((n, n + 1) for n in range(5)))
    assert [len(take(inbox).chunks) for _ in range(3)] == expected


def test_chunk_larger_than_the_bound_is_taken_alone() -> None:
    inbox = Inbox(10, batch_bytes=5)
    lane, source = listening(inbox)
    filled(inbox, lane, source, (0, 1), (1, 2))
    assert len(take(inbox).chunks) == 1


def test_lanes_take_turns() -> None:
    inbox = Inbox(10, batch_chunks=1)
    (a, of_a), (b, of_b) = listening(inbox, "a"), listening(inbox, "b")
    filled(inbox, a, of_a, (0, 1), (1, 2), (2, 3))
    filled(inbox, b, of_b, (0, 1), (1, 2))
    assert [take(inbox).lane.stream for _ in range(5)] == ["a", "b", "a", "b", "a"]


def test_lane_holds_no_more_than_its_capacity() -> None:
    inbox = Inbox(2)
    lane, source = listening(inbox)
    filled(inbox, lane, source, (0, 1), (1, 2))
    assert not inbox.put(lane, source, 2, 3, chunk())
    assert lane.waiting == 2


def test_chunks_of_an_old_source_are_not_let_in() -> None:
    inbox = Inbox(10)
    lane, old = listening(inbox)
    filled(inbox, lane, old, (0, 5), (5, 9))
    new = object()
    assert inbox.listen(lane, new) == 0, "what was not taken is sent again"
    filled(inbox, lane, old, (9, 12))
    assert lane.waiting == 0
    filled(inbox, lane, new, (0, 7))
    assert take(inbox).end == 7


def test_position_is_kept_when_the_source_changes() -> None:
    inbox = Inbox(10)
    lane, old = listening(inbox)
    filled(inbox, lane, old, (0, 5))
    take(inbox)
    filled(inbox, lane, old, (5, 9))
    assert inbox.listen(lane, object()) == 5


def test_chunk_that_begins_before_the_position_is_cut_there() -> None:
    inbox = Inbox(10)
    lane, source = listening(inbox, position=7)
    filled(inbox, lane, source, (0, 5), (5, 9))
    taken = take(inbox)
    assert (taken.first, taken.end, taken.gaps) == (7, 9, ())


def test_every_gap_is_told_with_the_offsets_it_spans() -> None:
    inbox = Inbox(10)
    lane, source = listening(inbox)
    filled(inbox, lane, source, (0, 5), (8, 9), (20, 21))
    assert take(inbox).gaps == ((5, 8), (9, 20))


def test_first_chunk_of_a_lane_without_a_position_is_no_gap() -> None:
    inbox = Inbox(10)
    lane, source = listening(inbox, position=None)
    filled(inbox, lane, source, (500, 510))
    taken = take(inbox)
    assert (taken.first, taken.gaps, lane.position) == (500, (), 510)


def test_failure_comes_after_what_came_before_it() -> None:
    inbox = Inbox(10)
    lane, source = listening(inbox)
    filled(inbox, lane, source, (0, 5))
    inbox.fail(Unreachable("gone"))
    inbox.fail(Unreachable("a later failure"))
    assert take(inbox).end == 5
    for _ in range(2):
        with pytest.raises(Unreachable, match="gone"):
            inbox.take(0.0)


def test_shut_lane_hands_nothing_out_and_makes_void_what_was_taken() -> None:
    inbox = Inbox(10)
    lane, source = listening(inbox)
    filled(inbox, lane, source, (0, 5))
    taken = take(inbox)
    filled(inbox, lane, source, (5, 9))
    inbox.shut(lane)
    assert taken.void
    assert inbox.take(0.0) is None


def test_opened_lane_goes_on_at_the_new_position_and_says_what_credit_is_owed() -> None:
    inbox = Inbox(10)
    lane, source = listening(inbox)
    filled(inbox, lane, source, (0, 5), (5, 9))
    inbox.shut(lane)
    tenure = lane.tenure
    filled(inbox, lane, source, (20, 40))  # sent before the broker was told where to go on
    assert inbox.take(0.0) is None
    assert inbox.open(lane, tenure, 30) == 3
    filled(inbox, lane, source, (20, 40))
    taken = take(inbox)
    assert (taken.first, taken.end, taken.void) == (30, 40, False)


def opened(inbox: Inbox, position: int | None) -> tuple[Lane, object]:
    lane, source = listening(inbox, position=None)
    inbox.shut(lane)
    inbox.open(lane, lane.tenure, position)
    return lane, source


def test_first_chunk_of_a_tenure_is_taken_alone_and_may_be_put_back() -> None:
    inbox = Inbox(10)
    lane, source = opened(inbox, 30)
    filled(inbox, lane, source, (50, 60), (20, 40), (40, 50), (50, 60))
    stray = take(inbox)
    assert (stray.gaps, stray.may_be_stray, len(stray.chunks)) == (((30, 50),), True, 1)
    inbox.put_back(stray)
    first, rest = take(inbox), take(inbox)
    assert (first.first, first.end, first.gaps, first.may_be_stray) == (30, 40, (), False)
    assert (rest.first, rest.end, rest.gaps) == (40, 60, ())


def test_chunks_before_the_place_of_a_tenure_prove_nothing() -> None:
    inbox = Inbox(10)
    lane, source = opened(inbox, 30)
    filled(inbox, lane, source, (20, 30), (50, 60))
    assert take(inbox).end == 30
    assert take(inbox).may_be_stray


def test_gap_in_the_middle_of_a_tenure_is_no_stray() -> None:
    inbox = Inbox(10)
    lane, source = opened(inbox, 30)
    filled(inbox, lane, source, (30, 40), (41, 50))
    assert take(inbox).gaps == ()
    taken = take(inbox)
    assert (taken.gaps, taken.may_be_stray) == (((40, 41),), False)


def test_what_was_put_back_too_late_moves_nothing() -> None:
    inbox = Inbox(10)
    lane, source = opened(inbox, 30)
    filled(inbox, lane, source, (50, 60))
    stray = take(inbox)
    inbox.shut(lane)
    inbox.open(lane, lane.tenure, 70)
    inbox.put_back(stray)
    assert lane.position == 70


def test_first_chunk_of_a_tenure_without_a_place_may_be_put_back_too() -> None:
    inbox = Inbox(10)
    lane, source = opened(inbox, None)
    filled(inbox, lane, source, (50, 60), (0, 5))
    stray = take(inbox)
    assert (stray.gaps, stray.may_be_stray, lane.position) == ((), True, 60)
    inbox.put_back(stray)
    assert (take(inbox).first, lane.position) == (0, 5)


def test_lane_that_was_shut_again_stays_shut() -> None:
    inbox = Inbox(10)
    lane, source = listening(inbox)
    inbox.shut(lane)
    tenure = lane.tenure
    inbox.shut(lane)
    assert inbox.open(lane, tenure, 30) == 0
    filled(inbox, lane, source, (30, 31))
    assert inbox.take(0.0) is None


def test_close_wakes_who_waits() -> None:
    inbox = Inbox(10)
    listening(inbox)
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.append(inbox.take(None)))
    waiter.start()
    inbox.close()
    waiter.join(PATIENCE)
    assert found == [None]


def test_waking_lets_one_wait_return_with_nothing_but_never_hides_a_chunk() -> None:
    inbox = Inbox(10)
    lane, source = listening(inbox)
    inbox.wake()
    filled(inbox, lane, source, (0, 5))
    assert take(inbox).end == 5
    assert inbox.take(None) is None
    waker = threading.Timer(0.05, inbox.wake)
    waker.start()
    assert inbox.take(None) is None, "it was waiting already, or is woken beforehand"
    waker.join()


def test_chunk_wakes_who_waits() -> None:
    inbox = Inbox(10)
    lane, source = listening(inbox)
    found: list[Taken | None] = []
    waiter = threading.Thread(target=lambda: found.append(inbox.take(None)))
    waiter.start()
    filled(inbox, lane, source, (0, 5))
    waiter.join(PATIENCE)
    assert found[0] is not None
    assert found[0].end == 5


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=20)


@settings(max_examples=50)
@given(SIZES, st.lists(st.sampled_from(["send", "take", "reconnect", "late"]), max_size=40))
def test_whatever_happens_every_offset_is_taken_once_and_in_order(
    sizes: list[int], steps: list[str]
) -> None:
    """A broker with these chunks, which a new source reads from the chunk with its position."""
    ranges: list[tuple[int, int]] = []
    for size in sizes:
        start = ranges[-1][1] if ranges else 0
        ranges.append((start, start + size))
    inbox = Inbox(4, batch_chunks=2)
    lane, source = listening(inbox)
    old: object = object()
    following = 0
    seen: list[int] = []

    def send(of: object) -> None:
        nonlocal following
        if following < len(ranges) and inbox.put(lane, of, *ranges[following], chunk()):
            following += 1 if of is source else 0

    def take_what_waits() -> None:
        taken = inbox.take(0.0)
        if taken is not None:
            assert not taken.gaps
            seen.extend(range(taken.first, taken.end))

    for step in [*steps, *["send", "take"] * len(ranges)]:
        if step == "send":
            send(source)
        elif step == "late":
            send(old)
        elif step == "take":
            take_what_waits()
        else:
            old, source = source, object()
            position = inbox.listen(lane, source)
            following = next(
                (n for n, (_, end) in enumerate(ranges) if end > (position or 0)), len(ranges)
            )
    while lane.waiting:
        take_what_waits()
    assert seen == list(range(ranges[-1][1]))


def test_nothing_that_comes_after_a_failure_is_handed_out() -> None:
    """A damaged chunk was passed over: what came behind it was handed out, and its offset stored;
    and while another partition had something waiting, nobody was told."""
    inbox = Inbox(10)
    lane, source = listening(inbox)
    other, elsewhere = listening(inbox, "other")
    filled(inbox, lane, source, (0, 5))
    inbox.fail(Unreachable("the chunk at 5 is damaged"))
    assert inbox.put(lane, source, 10, 15, chunk())
    assert inbox.put(other, elsewhere, 0, 5, chunk())
    assert take(inbox).end == 5
    with pytest.raises(Unreachable, match="damaged"):
        inbox.take(0.0)
