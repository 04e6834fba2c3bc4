"""One record after the other becomes one history; what is no record changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sharding import InvalidInput, Policy, UnsupportedFormat
from sharding.maps.map_log import State, apply, encode
from tests.support.log_records import replay
from tests.support.maps import queue_map, stream_map

POLICY = Policy("pictures", "^images$", 2)
FIRST = State().with_policy(POLICY)
SECOND = FIRST.with_map(queue_map())


def record(**changes: Any) -> bytes:
    """A good first record with some fields changed."""
    return json.dumps({**json.loads(encode(FIRST)), **changes}).encode()


def body(**changes: Any) -> bytes:
    """A good second record with some fields of its state changed."""
    fields = json.loads(encode(SECOND))
    fields["state"].update(changes)
    return json.dumps(fields).encode()


def test_a_reader_begins_with_nothing() -> None:
    assert replay([]) == State(epoch=0, policies={}, maps={})


def test_a_record_that_cites_the_current_epoch_takes_effect() -> None:
    verdict = apply(State(), encode(FIRST))
    assert (verdict.state, verdict.void) == (FIRST, None)
    verdict = apply(FIRST, encode(SECOND))
    assert (verdict.state, verdict.void) == (SECOND, None)


def test_the_second_record_that_cites_an_epoch_is_void() -> None:
    rival = State().with_policy(replace(POLICY, shards_per_node=3))
    assert replay([encode(FIRST), encode(rival)]) == FIRST
    assert replay([encode(rival), encode(FIRST)]) == rival
    assert apply(FIRST, encode(rival)).void == "cites epoch 0, but 1 is current"


def test_a_record_seen_twice_counts_once() -> None:
    assert replay([encode(FIRST), encode(FIRST), encode(SECOND), encode(FIRST)]) == SECOND


@pytest.mark.parametrize("base", [-1, 1, 2, 2**70])
def test_a_record_that_cites_another_epoch_is_void(base: int) -> None:
    verdict = apply(State(), record(base=base))
    assert (verdict.state, verdict.void) == (State(), f"cites epoch {base}, but 0 is current")


def test_a_record_cut_off_anywhere_is_void() -> None:
    whole = encode(SECOND)
    for length in range(len(whole)):
        verdict = apply(FIRST, whole[:length])
        assert verdict.state is FIRST
        assert str(verdict.void).startswith("not a record: record: must be whole JSON")


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\x00",
        b"null",
        b"[1]",
        b"[" * 100_000,
        b"9" * 10_000,
        record(base="0"),
        record(base=True),
        record(base=0.0),
        record(format="1"),
        record(state=[]),
        record(author="me"),
        record(state={"policies": []}),
        record(state={"policies": [], "maps": [], "zones": []}),
        record(state={"policies": [{"name": "p"}], "maps": []}),
        record(format=0),
        record(state={"policies": [{**POLICY.to_json(), "pattern": ""}], "maps": []}),
        record(state={"policies": [{**POLICY.to_json(), "priority": 2**63}], "maps": []}),
        record(state={"policies": [POLICY.to_json()] * 2, "maps": []}),
        record(state={"policies": [], "maps": [replace(queue_map(), epoch=2).to_json()]}),
        record(state={"policies": [], "maps": [queue_map().to_json()] * 2}),
    ],
)
def test_what_is_no_record_of_this_format_is_void(garbage: bytes) -> None:
    verdict = apply(State(), garbage)
    assert verdict.state == State()
    assert str(verdict.void).startswith("not a record: ")
    assert replay([garbage, encode(FIRST), garbage, encode(SECOND)]) == SECOND


@pytest.mark.parametrize(
    "newer",
    [
        record(format=2),
        b'{"format": 2}',
        record(format=2, base=17, zones=[]),
        body(maps=[{**queue_map().to_json(), "format": 2}]),
    ],
)
def test_a_record_of_a_newer_format_stops_the_reader(newer: bytes) -> None:
    with pytest.raises(UnsupportedFormat, match="reads format 1, found 2; upgrade"):
        replay([encode(FIRST), newer])


def test_a_pattern_that_another_python_might_compile_stops_the_reader() -> None:
    strange = record(state={"policies": [{**POLICY.to_json(), "pattern": "("}], "maps": []})
    with pytest.raises(UnsupportedFormat, match=r"record.policies.pattern: must be a regular"):
        replay([strange])


def test_every_change_makes_the_next_epoch_and_leaves_the_old_state_alone() -> None:
    other = Policy("films", "^films$", 1)
    state = SECOND.with_policy(other).without_policy("pictures").with_map(stream_map())
    assert state.epoch == 5
    assert state.policies == {"films": other}
    assert {name: shard_map.epoch for name, shard_map in state.maps.items()} == {
        "images": 2,  # the epoch since which a map is in force stays with it
        "invoices": 5,
    }
    assert state.without_map("images").maps.keys() == {"invoices"}
    assert FIRST.with_map(queue_map()) == SECOND


def test_a_map_survives_the_policy_that_made_it() -> None:
    assert SECOND.without_policy("pictures").maps == SECOND.maps


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"epoch": 1, "policies": {"other": POLICY}}, "state.policies"),
        ({"epoch": 1, "maps": {"other": queue_map()}}, "state.maps"),
        ({"epoch": 1, "maps": {"images": queue_map(epoch=2)}}, "state.maps"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        State(**fields)
    assert caught.value.field == field


def test_the_state_before_the_first_can_not_be_proposed() -> None:
    with pytest.raises(InvalidInput, match="must be 1 or more"):
        encode(State())
