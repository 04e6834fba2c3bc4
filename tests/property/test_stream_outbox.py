"""The outbox against a model that keeps a plain set of ids, over any order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sharding.stream.producer.outbox import Batch, Outbox

counts = st.lists(st.integers(1, 9), min_size=1, max_size=12)
gaps = st.sampled_from([0, 0, 0, 1, 5])
steps = st.lists(
    st.one_of(
        st.just(("take",)),
        st.just(("lost",)),
        st.tuples(st.just("confirm"), st.integers(0, 60), st.integers(1, 40)),
        st.tuples(st.just("some"), st.lists(st.integers(0, 90), max_size=12)),
        st.tuples(st.just("refuse"), st.integers(0, 90)),
    ),
    max_size=30,
)


def batches(sizes: list[int], gap: int) -> list[Batch]:
    made = []
    first = 1
    position = 0
    for size in sizes:
        ids = range(first, first + size)
        made.append(Batch([b"x"] * size, ids, ids, position, size))
        position += size
        first += size + gap
    return made


@given(counts, gaps, steps, st.booleans())
def test_every_message_gets_one_outcome(
    sizes: list[int], gap: int, events: list[tuple[object, ...]], keep: bool
) -> None:
    outbox = Outbox(keep=keep)
    made = batches(sizes, gap)
    for batch in made:
        outbox.add(batch)
    open_ids = [number for batch in made for number in batch.ids]
    flying: set[int] = set()
    for event in events:
        match event:
            case ("take",):
                batch_taken = outbox.take(0.0)
                if batch_taken is not None:
                    flying |= set(batch_taken.ids) & set(open_ids)
            case ("lost",):
                given_up = {each for b in outbox.lost() for _, each in b.outstanding()}
                assert given_up == (set() if keep else flying & set(open_ids))
                open_ids = [each for each in open_ids if each not in given_up]
                flying = set()
            case ("confirm", int(at), int(count)):
                settled = [each for each in open_ids[at : at + count] if each in flying]
                assert outbox.confirm(tuple(settled)) == len(settled)
                open_ids = [each for each in open_ids if each not in settled]
            case ("some", list(ids)):
                expected = {each for each in ids if each in flying and each in open_ids}
                assert outbox.confirm(ids) == len(expected)
                open_ids = [each for each in open_ids if each not in expected]
            case ("refuse", int(one)):
                is_open = one in flying and one in open_ids
                assert list(outbox.refuse(one)) == ([one] if is_open else [])
                open_ids = [each for each in open_ids if each != one] if is_open else open_ids
        left = [each for batch in outbox.batches for _, each in batch.outstanding()]
        assert left == open_ids
        assert outbox.messages == len(open_ids)
        assert outbox.size >= len(open_ids)
    for batch in outbox.drain():
        open_ids = [each for each in open_ids if each not in batch.ids]
    assert (open_ids, outbox.messages, outbox.size) == ([], 0, 0)


@given(counts, st.integers(60, 400))
def test_frames_hold_every_unsettled_message_once_and_fit(sizes: list[int], frame_max: int) -> None:
    for batch in batches([size * 4 for size in sizes], 0):
        half = len(batch.ids) // 2
        batch.confirm(batch.ids[:half], 0) if half else None
        found: list[int] = []
        for header, content in batch.frames(1, frame_max):
            assert len(header) + len(content) <= frame_max
            found += [
                int.from_bytes(content[at : at + 8], "big") for at in range(0, len(content), 13)
            ]
        assert found == list(batch.ids[half:])
