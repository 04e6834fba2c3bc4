"""What may be stored as handled, in whatever order handlers finish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.errors import InvalidInput
from sharding.groups.streams.progress import Watermark


def test_mark_waits_for_the_slowest_and_passes_offsets_that_were_no_messages() -> None:
    watermark = Watermark()
    for offset in (10, 11, 12, 14, 15):
        watermark.begin(offset)
    for offset, mark in ((11, None), (10, 11), (14, 11), (12, 14), (15, 15)):
        watermark.handled(offset)
        assert watermark.mark == mark


def test_what_was_given_back_is_never_passed() -> None:
    watermark = Watermark(mark=4)
    for offset in (5, 6, 7):
        watermark.begin(offset)
    watermark.given_back(6)
    watermark.handled(7)
    watermark.handled(5)
    assert (watermark.mark, watermark.in_hand) == (5, 0)


@pytest.mark.parametrize("offset", [3, 4, 5])
def test_beginning_twice_is_a_mistake(offset: int) -> None:
    watermark = Watermark(mark=4)
    watermark.begin(5)
    with pytest.raises(InvalidInput, match="must be above 5"):
        watermark.begin(offset)


@st.composite
def days(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Beginnings in order, each ending at some time after its beginning or never."""
    steps = draw(st.lists(st.integers(1, 3), min_size=1, max_size=30))
    begun, offset = 0, -1
    waiting: list[int] = []
    story: list[tuple[str, int]] = []
    while begun < len(steps) or (waiting and draw(st.booleans())):
        if begun < len(steps) and (not waiting or draw(st.booleans())):
            offset += steps[begun]
            begun += 1
            waiting.append(offset)
            story.append(("begin", offset))
        else:
            ended = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            story.append((draw(st.sampled_from(("handled", "handled", "given_back"))), ended))
    return story


@given(days())
def test_everything_up_to_the_mark_is_handled_and_the_next_is_not(
    story: list[tuple[str, int]],
) -> None:
    watermark = Watermark()
    begun: list[int] = []
    handled: set[int] = set()
    moved = 0
    for what, offset in story:
        if what == "begin":
            begun.append(offset)
            watermark.begin(offset)
        elif what == "handled":
            handled.add(offset)
            moved += watermark.handled(offset)
        else:
            watermark.given_back(offset)
        expected = None
        for each in begun:
            if each not in handled:
                break
            expected = each
        assert watermark.mark == expected
    ended = sum(what != "begin" for what, _ in story)
    assert watermark.in_hand == len(begun) - ended
    assert moved == (0 if watermark.mark is None else begun.index(watermark.mark) + 1)
