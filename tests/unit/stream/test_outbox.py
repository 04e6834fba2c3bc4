"""The outbox: what is settled, what is sent again, and what is given up."""

from __future__ import annotations

from array import array

from sharding.callers import Caller
from sharding.stream.producer.outbox import Batch, Failing, Outbox, Owned
from sharding.stream.producer.outbox import outstanding as outstanding_in


def batch(first: int, count: int) -> Batch:
    """Messages with publishing ids from `first` on, whose numbers are ten times as high."""
    ids = range(first, first + count)
    numbers = [each * 10 for each in ids]
    return Batch([b"x"] * count, ids, numbers, first - 1, count)


def flying(*batches: Batch, keep: bool = True) -> Outbox:
    outbox = Outbox(keep=keep)
    for each in batches:
        outbox.add(each)
    while outbox.take(now=1.0) is not None:
        pass
    return outbox


def outstanding(outbox: Outbox) -> list[int]:
    return [each.publishing_id or 0 for each in outstanding_in(outbox.batches)]


def test_a_confirm_may_span_batches_and_end_inside_one() -> None:
    outbox = flying(batch(1, 3), batch(4, 3), batch(7, 3))
    assert outbox.confirm(range(1, 6)) == 5
    assert (outbox.messages, outbox.size, outstanding(outbox)) == (4, 6, [6, 7, 8, 9])
    assert outbox.confirm((6, 7, 8, 9)) == 4
    assert (outbox.messages, outbox.size, outbox.batches) == (0, 0, [])


def test_confirms_out_of_turn_count_once() -> None:
    outbox = flying(batch(1, 4), batch(5, 4))
    assert outbox.confirm((6, 2, 7)) == 3
    assert outbox.confirm((2, 6)) == 0
    assert outstanding(outbox) == [1, 3, 4, 5, 8]
    assert outbox.confirm((1, 3, 4, 8, 5)) == 5
    assert (outbox.messages, outbox.size) == (0, 0)


def test_a_run_with_the_right_ends_but_other_ids_inside_is_not_taken_as_whole() -> None:
    given = Batch([b"x"] * 3, array("Q", [5, 7, 9]), [0, 1, 2], 0, 3)
    outbox = flying(given)
    assert outbox.confirm((5, 6, 9)) == 2
    assert outstanding(outbox) == [7]
    outbox = flying(batch(1, 6), batch(7, 2))
    assert outbox.confirm((1, 2, 7, 8, 5, 6)) == 6
    assert outstanding(outbox) == [3, 4]


def test_confirms_of_unknown_ids_change_nothing() -> None:
    outbox = flying(batch(10, 2))
    assert outbox.confirm((1, 9, 12, 2**63)) == 0
    assert outbox.refuse(3) == ()
    assert outbox.messages == 2


def test_a_refusal_names_the_message() -> None:
    outbox = flying(batch(1, 3))
    assert outbox.refuse(2) == [Failing(20, 2)]
    assert outbox.refuse(2) == ()
    assert outbox.confirm((1, 2, 3)) == 2
    assert (outbox.messages, outbox.size) == (0, 0)


def test_a_named_producer_sends_what_is_unconfirmed_again_before_the_rest() -> None:
    outbox = flying(batch(1, 3), batch(4, 3))
    outbox.add(batch(7, 3))
    outbox.confirm((1, 2, 3, 4))
    assert outbox.lost() == []
    taken = [outbox.take(2.0), outbox.take(2.0)]
    assert [each.ids[0] for each in taken if each] == [4, 7]
    assert taken[0] is not None
    frames = b"".join(content for _, content in taken[0].frames(0, 10_000))
    assert frames.count(b"x") == 2  # 5 and 6; 4 is stored


def test_an_unnamed_producer_gives_up_what_flew_and_only_that() -> None:
    outbox = flying(batch(1, 3), batch(4, 3), keep=False)
    outbox.add(batch(7, 3))
    outbox.confirm((1, 2, 3, 4))
    assert list(outstanding_in(outbox.lost())) == [Failing(50, 5), Failing(60, 6)]
    assert (outbox.messages, outbox.size, outstanding(outbox)) == (3, 3, [7, 8, 9])


def test_an_unnamed_producer_frees_messages_when_they_are_written() -> None:
    for keep in (True, False):
        sent = batch(1, 3)
        outbox = flying(sent, keep=keep)
        outbox.written(sent)
        assert bool(sent.messages) is keep


def test_a_batch_that_is_complete_out_of_turn_is_not_sent_again() -> None:
    outbox = flying(batch(1, 2), batch(3, 2))
    outbox.confirm((3, 4))
    outbox.lost()
    assert outstanding(outbox) == [1, 2]
    assert (outbox.messages, outbox.size) == (2, 2)


def test_a_sub_entry_batch_settles_as_one() -> None:
    groups = [range(3), range(3, 5)]
    outbox = flying(Batch([b"x"] * 5, [3, 5], [10, 11, 12, 13, 14], 0, 5, groups=groups))
    assert outbox.confirm((5,)) == 2
    assert outbox.refuse(3) == [Failing(number, 3) for number in (10, 11, 12)]
    assert (outbox.messages, outbox.size) == (0, 0)


def test_each_caller_is_told_of_his_own_messages() -> None:
    first, second = Caller(10), Caller(10)
    groups = [range(2), range(2, 5), range(5, 9)]
    shared = Batch(
        [b"x"] * 9,
        [2, 5, 9],
        range(90, 99),
        0,
        9,
        groups=groups,
        owned=[Owned(1, 4, first), Owned(4, 5, second), Owned(6, 8, first)],
    )
    first.pending, second.pending = 5, 1
    outbox = flying(shared, keep=False)
    assert outbox.owned == 6
    assert outbox.confirm((2,)) == 2  # the producer's own, and the first one's
    assert (first.pending, first.tally.stored, outbox.owned) == (4, 1, 5)
    assert outbox.refuse(5) == [
        Failing(92, 5, first),
        Failing(93, 5, first),
        Failing(94, 5, second),
    ]
    assert outbox.owned == 2
    assert [each.caller for each in outstanding_in(outbox.lost())] == [None, first, first, None]
    assert (outbox.owned, outbox.messages, first.tally.stored) == (0, 0, 1)


def test_the_oldest_batch_tells_age_and_position() -> None:
    outbox = Outbox(keep=True)
    assert (outbox.oldest_sent_at, outbox.oldest_position) == (None, None)
    outbox.add(batch(1, 2))
    outbox.add(batch(3, 2))
    assert (outbox.oldest_sent_at, outbox.oldest_position) == (None, 0)
    outbox.take(5.0)
    outbox.take(6.0)
    outbox.confirm((1, 2))
    assert (outbox.oldest_sent_at, outbox.oldest_position) == (6.0, 2)
