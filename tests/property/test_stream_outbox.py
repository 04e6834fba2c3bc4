"""The outbox against a model that keeps a plain set of ids, over any order of events."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from sharding.callers import Caller
from sharding.outcomes import Outcome, Result
from sharding.stream.producer.outbox import Batch, Failing, Outbox, Owned, outstanding

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


@given(counts, gaps, steps, st.booleans(), st.lists(st.sampled_from([0, 0, 1, 2])))
def test_every_message_gets_one_outcome_and_its_caller_is_told(
    sizes: list[int],
    gap: int,
    events: list[tuple[object, ...]],
    keep: bool,
    whose: list[int],
) -> None:
    """Of the messages some are a caller's, by `whose`: 0 for the producer's own."""
    outbox = Outbox(keep=keep)
    made = batches(sizes, gap)
    callers = {1: Caller(1000), 2: Caller(1000)}
    owned_ids: dict[Caller, set[int]] = {caller: set() for caller in callers.values()}
    failed: dict[Caller, set[int]] = {caller: set() for caller in callers.values()}
    for batch in made:
        batch.owned = [
            Owned(at, at + 1, callers[one])
            for at in range(len(batch.ids))
            if (one := whose.pop() if whose else 0)
        ]
        for at, _, caller in batch.owned:
            owned_ids[caller].add(batch.ids[at])
            caller.pending += 1
        outbox.add(batch)

    def settle(messages: Iterable[Failing]) -> set[int]:
        """As the producer does with what is not stored."""
        found = list(messages)
        for number, publishing_id, caller in found:
            assert number == publishing_id
            if caller is not None:
                assert number in owned_ids[caller]
                failed[caller].add(number)
                caller.not_stored(Result(number, Outcome.UNKNOWN))
        return {each.number for each in found}

    open_ids = [number for batch in made for number in batch.ids]
    flying: set[int] = set()
    for event in events:
        match event:
            case ("take",):
                batch_taken = outbox.take(0.0)
                if batch_taken is not None:
                    flying |= set(batch_taken.ids) & set(open_ids)
            case ("lost",):
                given_up = settle(outstanding(outbox.lost()))
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
                assert settle(outbox.refuse(one)) == ({one} if is_open else set())
                open_ids = [each for each in open_ids if each != one] if is_open else open_ids
        assert [each.number for each in outstanding(outbox.batches)] == open_ids
        for caller, own in owned_ids.items():
            assert caller.pending == len(own & set(open_ids))
            assert caller.tally.stored + len(failed[caller]) == len(own - set(open_ids))
        assert outbox.owned == sum(caller.pending for caller in owned_ids)
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
