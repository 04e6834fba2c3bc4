"""A checkpoint's offsets: a batch that is repeated reads the same, whatever happened meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.errors import UnsupportedFormat
from spark.read.planning import (
    Extent,
    Offsets,
    Seen,
    StreamGone,
    check_gone,
    plan,
    share_out,
    up_to_target,
)


def test_offsets_survive_the_checkpoint() -> None:
    offsets = Offsets(
        {"a-1": 5, "a-0": 2**60},
        {"a-1": 3},
        seen={"a-1": Seen(9, 7, 1_700)},
        lost={"a-0": 4},
        numbers={"a-1": 1, "a-0": 0},
    )
    assert Offsets.from_json(json.loads(json.dumps(offsets.to_json()))) == offsets
    assert Offsets.from_json(Offsets({}, initial=True).to_json()).initial


@pytest.mark.parametrize(
    "value",
    [
        {}, {"version": 2, "next": {}}, {"version": 1, "next": 3},
        {"version": 1, "next": {"a": -1}}, {"version": 1, "next": {"a": "7"}},
        {"version": 1, "next": {}, "seen": 3}, {"version": 1, "next": {}, "seen": {"a": ["x"]}},
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_kind_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(UnsupportedFormat):
        Offsets.from_json(value)


def test_a_batch_begins_where_the_last_one_ended() -> None:
    start = Offsets({"a": 5, "b": 7})
    batch = plan(start, {"a": Extent(0, 9), "b": Extent(0, 7)}, fail_on_data_loss=True)
    end = batch.up_to(None)
    assert (batch.waiting, end) == (4, Offsets({"a": 9, "b": 7}))
    assert end.starts_after(start) == {"a": 5, "b": 7}


def test_nothing_new_is_no_batch() -> None:
    start = Offsets({"a": 5}, began={"a": 1})
    assert plan(start, {"a": Extent(0, 5)}, fail_on_data_loss=True).up_to(None) is start


def test_the_first_batch_is_planned_though_empty_and_keeps_its_start() -> None:
    start = Offsets({"a": 5}, initial=True)
    end = plan(start, {"a": Extent(0, 5)}, fail_on_data_loss=True).up_to(None)
    assert end == Offsets({"a": 5}, began={"a": 5})
    later = Offsets({"a": 900}, initial=True)  # "latest", asked for again after a restart
    assert end.starts_after(later) == {"a": 5}


def test_a_stream_that_is_found_later_is_read_from_its_beginning_also_when_repeated() -> None:
    start = Offsets({"a": 5})
    extents = {"a": Extent(0, 5), "b": Extent(3, 8)}
    end = plan(start, extents, fail_on_data_loss=True).up_to(None)
    assert end == Offsets({"a": 5, "b": 8}, began={"b": 3})
    assert end.starts_after(start) == {"a": 5, "b": 3}


def test_a_limit_is_kept_exactly_and_the_rest_is_read_later() -> None:
    offsets = Offsets({"a": 0, "b": 0})
    extents = {"a": Extent(0, 900), "b": Extent(0, 100)}
    sizes = []
    for _ in range(20):
        end = plan(offsets, extents, fail_on_data_loss=True).up_to(300)
        if end is offsets:
            break
        sizes.append(sum(end.next.values()) - sum(offsets.next.values()))
        offsets = end
    assert sizes == [300, 300, 300, 100]


def test_a_stream_that_was_made_anew_is_a_loss() -> None:
    start, extents = Offsets({"a": 50}), {"a": Extent(2, 10)}
    with pytest.raises(StreamGone, match="'a' ends at offset 10, but was read up to 50"):
        plan(start, extents, fail_on_data_loss=True)
    end = plan(start, extents, fail_on_data_loss=False).up_to(None)
    assert end.starts_after(start) == {"a": 2}
    assert end.next == {"a": 10}


def test_a_stream_that_is_empty_now_is_waited_for() -> None:
    start = Offsets({"a": 50})
    assert plan(start, {"a": Extent()}, fail_on_data_loss=True).up_to(None) is start


def test_where_a_loss_is_allowed_reading_goes_on_at_what_is_left() -> None:
    start, extents = Offsets({"a": 5}), {"a": Extent(8, 10)}
    strict = plan(start, extents, fail_on_data_loss=True).up_to(None)
    assert strict.starts_after(start) == {"a": 5}  # the task will find it missing, or only a gap
    assert plan(start, extents, fail_on_data_loss=False).up_to(None).starts_after(start) == {"a": 8}


def test_a_stream_that_was_read_to_its_end_may_go() -> None:
    start = Offsets({"a": 5, "b": 7})
    check_gone(start, {"b": Extent(0, 7)})
    end = plan(start, {"a": Extent(0, 5)}, fail_on_data_loss=True).up_to(None)
    assert end == Offsets({"a": 5})
    with pytest.raises(StreamGone, match="2 offsets that were not read"):
        check_gone(start, {"b": Extent(0, 9)})
    with pytest.raises(StreamGone, match="is deleted"):
        check_gone(start, {"b": None})
    check_gone(replace(start, seen={"b": Seen(7)}), {"b": None})
    with pytest.raises(StreamGone, match="is deleted and has 2 offsets that were not read"):
        check_gone(replace(start, seen={"b": Seen(9)}), {"b": None})


def test_available_now_ends_where_the_streams_ended_when_it_began() -> None:
    start = Offsets({"a": 5, "late": 9})
    extents = {"a": Extent(0, 50), "late": Extent(0, 12), "new": Extent(0, 3)}
    limited = up_to_target(extents, {"a": 20}, start)
    assert limited == {"a": Extent(0, 20), "late": Extent(0, 9)}
    end = plan(start, limited, fail_on_data_loss=True).up_to(None)
    assert end.next == {"a": 20, "late": 9}
    assert plan(end, limited, fail_on_data_loss=True).up_to(None) is end


@given(
    st.integers(1, 10_000),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 10**12), max_size=8),
)
def test_shares_are_exact_and_never_more_than_there_is(limit: int, sizes: dict[str, int]) -> None:
    shares = share_out(limit, sizes)
    assert list(shares) == list(sizes)
    assert sum(shares.values()) == min(limit, sum(sizes.values()))
    assert all(0 <= shares[stream] <= size for stream, size in sizes.items())
    if limit >= len(sizes):
        assert all(shares[stream] >= 1 for stream, size in sizes.items() if size)
