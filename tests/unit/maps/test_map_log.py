"""One record after the other becomes one history; what is no record changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sharding import InvalidInput, Policy
from sharding.maps.map_log import (
    IS_FORMAT_1,
    MAP,
    POLICY,
    Entry,
    State,
    changes_between,
    dumps,
    encode,
)
from sharding.maps.snapshots import LogReader, Read
from tests.support.log_records import feed, founded, proposal, read_all, replay
from tests.support.maps import queue_map, stream_map

PICTURES = Policy("pictures", "^images$", 2)
FILMS = Policy("films", "^films$", 1)
FIRST = State().with_policy(PICTURES)


def log_of(*steps: State) -> tuple[list[bytes], State]:
    """Records, and the state that they lead to."""
    records = founded(*steps)
    return records, replay(records)


def judged(records: list[bytes], record: bytes) -> tuple[Read, State]:
    """What becomes of one more record."""
    reader = read_all(records)
    seen = feed(reader, record)
    assert seen is not None
    assert reader.state is not None
    return seen, reader.state


def changed(record: bytes, **fields: Any) -> bytes:
    return dumps({**json.loads(record), **fields})


def changed_in(record: bytes, **fields: Any) -> bytes:
    """With fields of the first change changed."""
    whole = json.loads(record)
    whole["changes"][0].update(fields)
    return dumps(whole)


def test_a_reader_begins_with_nothing() -> None:
    assert replay([]) == State()


def test_the_first_record_founds_the_log_and_is_its_identity() -> None:
    state = replay([proposal(State(), FIRST, name="the-first")])
    assert state == replace(FIRST, log="the-first")


def test_changes_of_different_entries_do_not_void_each_other() -> None:
    records, seen = log_of(FIRST)
    one = proposal(seen, seen.with_policy(FILMS))
    other = proposal(seen, seen.with_map(queue_map()))
    third = proposal(seen, seen.with_policy(replace(PICTURES, shards_per_node=9)))
    state = replay([*records, one, other, third])
    assert state == replay([*records, third, other, one])
    assert state.policies == {"films": FILMS, "pictures": replace(PICTURES, shards_per_node=9)}
    assert state.maps == {"images": queue_map()}
    assert state.epoch == 4


def test_of_two_records_that_cite_the_same_revision_the_first_counts() -> None:
    records, seen = log_of(FIRST)
    one = proposal(seen, seen.with_policy(replace(PICTURES, shards_per_node=3)))
    other = proposal(seen, seen.with_policy(replace(PICTURES, shards_per_node=4)))
    assert replay([*records, one, other]).policies["pictures"].shards_per_node == 3
    assert replay([*records, other, one]).policies["pictures"].shards_per_node == 4
    void, _ = judged([*records, one], other)
    assert void.void == "cites revision 1 of the policy 'pictures', but 2 is current"


def test_two_changes_in_one_record_count_both_or_not_at_all() -> None:
    records, seen = log_of(FIRST)
    both = proposal(seen, seen.with_policy(FILMS).without_policy("pictures"))
    assert replay([*records, both]).policies == {"films": FILMS}
    faster = proposal(seen, seen.with_policy(replace(FILMS, priority=3)))
    after = replay([*records, faster, both])
    assert after.policies == {"films": replace(FILMS, priority=3), "pictures": PICTURES}


def test_a_record_seen_twice_counts_once_though_all_of_it_is_gone_by_then() -> None:
    records, seen = log_of(FIRST)
    made = proposal(seen, seen.with_map(queue_map()))
    with_map = replay([*records, made])
    forgotten = proposal(with_map, with_map.without_map("images"))
    state = replay([*records, made, forgotten, made, records[0]])
    assert state.maps == {}
    assert state.revisions[Entry(MAP, "images")] == 2


def test_the_epoch_of_a_map_goes_on_growing_when_it_is_made_again() -> None:
    records, seen = log_of(State().with_map(queue_map()))
    gone = [*records, proposal(seen, seen.without_map("images"))]
    again = replay(gone)
    assert replay([*gone, proposal(again, again.with_map(queue_map()))]).maps["images"].epoch == 3


def test_a_record_for_another_log_is_void_whatever_it_cites() -> None:
    records, seen = log_of(FIRST)
    strange = replace(seen, log="another")
    void, state = judged(records, proposal(strange, strange.with_policy(FILMS)))
    assert str(void.void).startswith("cites the log another, and this is ")
    assert state == seen
    void, state = judged(records, proposal(State(), State().with_policy(FILMS)))
    assert str(void.void).startswith("cites the log None, and this is ")
    void, state = judged([], proposal(strange, strange.with_policy(FILMS)))
    assert state == State()


def test_maps_say_which_log_they_are_from() -> None:
    _, state = log_of(FIRST.with_map(queue_map()))
    assert state.log
    assert state.maps["images"].log == state.log


def test_a_record_cut_off_anywhere_is_void() -> None:
    records, seen = log_of(FIRST)
    whole = proposal(seen, seen.with_map(queue_map()))
    for length in range(len(whole)):
        void, state = judged(records, whole[:length])
        assert state == seen
        assert str(void.void).startswith("not a record: record: must be whole JSON")


RECORDS, SEEN = log_of(FIRST)
POLICY_RECORD = proposal(SEEN, SEEN.with_policy(FILMS))
MAP_RECORD = proposal(SEEN, SEEN.with_map(queue_map()))


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\x00",
        b"null",
        b"[1]",
        b"[" * 100_000,
        b"9" * 10_000,
        b"\xef\xbb\xbf" + POLICY_RECORD,
        POLICY_RECORD.decode().encode("utf-16"),
        POLICY_RECORD[:-1] + b',"x-note":NaN}',
        POLICY_RECORD[:-1] + b',"x-note":1e999}',
        POLICY_RECORD[:-1] + b',"x-note":' + b"9" * 30 + b"}",
        POLICY_RECORD[:-1] + b',"x-note":' + b"[" * 20 + b"]" * 20 + b"}",
        POLICY_RECORD[:-1] + b',"log":"twice"}',
        changed(POLICY_RECORD, format="2"),
        changed(POLICY_RECORD, format=0),
        changed(POLICY_RECORD, format=1),
        changed(POLICY_RECORD, format=True),
        changed(POLICY_RECORD, id=""),
        changed(POLICY_RECORD, id=7),
        changed(POLICY_RECORD, id="\ud800"),
        changed(POLICY_RECORD, log=7),
        changed(POLICY_RECORD, start=-1),
        changed(POLICY_RECORD, start=None),
        changed(POLICY_RECORD, changes=[]),
        changed(POLICY_RECORD, changes={}),
        changed(POLICY_RECORD, changes=["policy-set"]),
        changed(POLICY_RECORD, changes=[{"kind": "policy-set", "base": 0}]),
        changed(POLICY_RECORD, changes=[{"name": "films", "base": 0}]),
        changed(POLICY_RECORD, changes=json.loads(POLICY_RECORD)["changes"] * 2),
        changed(POLICY_RECORD, snapshot={}),
        changed_in(POLICY_RECORD, base=None),
        changed_in(POLICY_RECORD, base=0.0),
        changed_in(POLICY_RECORD, name="others"),
        changed_in(POLICY_RECORD, policy=None),
        changed_in(POLICY_RECORD, policy={**FILMS.to_json(), "pattern": ""}),
        changed_in(POLICY_RECORD, policy={**FILMS.to_json(), "priority": 2**63}),
        changed_in(POLICY_RECORD, policy={**FILMS.to_json(), "on_unavailable": "wait"}),
        changed_in(MAP_RECORD, map={}),
        changed_in(MAP_RECORD, map=queue_map(epoch=2).to_json()),
        changed_in(MAP_RECORD, map=stream_map().to_json()),
    ],
)
def test_what_is_no_record_of_this_format_is_void_for_everybody(garbage: bytes) -> None:
    void, state = judged(RECORDS, garbage)
    assert state == SEEN
    assert str(void.void).startswith("not a record: ")
    assert replay([*RECORDS, garbage, POLICY_RECORD]) == replay([*RECORDS, POLICY_RECORD])


def test_remarks_are_not_looked_at() -> None:
    remarked = changed_in(changed(POLICY_RECORD, **{"x-who": {"me": [1]}}), **{"x-why": None})
    assert replay([*RECORDS, remarked]) == replay([*RECORDS, POLICY_RECORD])


@pytest.mark.parametrize(
    ("record", "entry", "field"),
    [
        (
            changed_in(POLICY_RECORD, policy={**FILMS.to_json(), "order": "strict"}),
            Entry(POLICY, "films"),
            "record.changes[0].policy.order",
        ),
        (
            changed_in(POLICY_RECORD, policy={**FILMS.to_json(), "pattern": "("}),
            Entry(POLICY, "films"),
            "record.changes[0].policy.pattern",
        ),
        (changed_in(POLICY_RECORD, until=7), Entry(POLICY, "films"), "record.changes[0].until"),
        (
            changed_in(MAP_RECORD, map={**queue_map().to_json(), "tokens": {}}),
            Entry(MAP, "images"),
            "record.changes[0].map.tokens",
        ),
        (
            changed_in(MAP_RECORD, map={**queue_map().to_json(), "format": 2}),
            Entry(MAP, "images"),
            "record.changes[0].map.format",
        ),
        (
            changed_in(MAP_RECORD, kind="proposed", base="the change", slots=[1, 2]),
            Entry(MAP, "images"),
            "record.changes[0].kind",
        ),
    ],
)
def test_what_is_not_understood_freezes_what_it_concerns_and_nothing_else(
    record: bytes, entry: Entry, field: str
) -> None:
    reader = read_all([*RECORDS, record])
    frozen = reader.state
    assert frozen is not None
    why = frozen.why_frozen(entry)
    assert f"record {len(RECORDS)} of the map log" in why
    assert str(entry) in why
    assert field in why
    assert "upgrade" in why
    assert frozen.policies == SEEN.policies
    other = frozen.with_policy(replace(PICTURES, shards_per_node=7))
    after = replay([*RECORDS, record, proposal(frozen, other)])
    assert after.policies["pictures"].shards_per_node == 7
    # What is behind it in the log may or may not have counted, for those who understand it.
    behind = MAP_RECORD if entry.kind == MAP else POLICY_RECORD
    assert replay([*RECORDS, record, behind]) == frozen


def test_what_cites_an_old_revision_freezes_nothing_though_it_is_not_understood() -> None:
    old = changed_in(proposal(State(log=SEEN.log), FIRST), until=7)
    void, state = judged(RECORDS, old)
    assert state == SEEN
    assert "cites revision 0" in str(void.void)


def test_a_record_with_something_frozen_freezes_all_that_it_names() -> None:
    frozen = changed_in(MAP_RECORD, kind="proposed")
    both = proposal(SEEN, SEEN.with_map(queue_map()).with_policy(FILMS))
    state = replay([*RECORDS, frozen, both])
    assert set(state.frozen) == {Entry(MAP, "images"), Entry(POLICY, "films")}


@pytest.mark.parametrize(
    "newer",
    [b'{"format": 3}', changed(POLICY_RECORD, format=3), changed(POLICY_RECORD, zones=[])],
)
def test_what_may_concern_everything_stops_all_changes(newer: bytes) -> None:
    state = replay([*RECORDS, newer, POLICY_RECORD])
    assert state.policies == SEEN.policies
    assert "nothing is changed any more: record." in state.stopped
    assert "upgrade rabbit-warren" in state.why_frozen(Entry(MAP, "anything"))
    assert state.log == SEEN.log


@pytest.mark.parametrize("name", ["a\nERROR all is lost", "\x1b[31mred", "n" * 50_000])
def test_the_name_of_a_field_that_others_chose_is_said_on_one_line(name: str) -> None:
    records, state = log_of(FIRST)
    record = proposal(state, state.with_policy(FILMS))
    for written in (changed(record, **{name: 1}), changed_in(record, **{name: 1})):
        state = replay([*records, written])
        (said,) = {state.stopped, *state.frozen.values()} - {""}
        assert said.isprintable()
        assert len(said) < 400


def test_a_newer_record_for_another_log_stops_nobody() -> None:
    strange = changed(POLICY_RECORD, zones=[], log="another")
    assert replay([*RECORDS, strange]) == SEEN


FORMAT_1 = b'{"base":0,"format":1,"state":{"maps":[],"policies":[]}}'


@pytest.mark.parametrize("came_through_the_exchange", [True, False])
def test_a_log_of_format_1_is_refused(came_through_the_exchange: bool) -> None:
    reader = LogReader()
    if came_through_the_exchange:
        reader.read(0, FORMAT_1)
    else:
        reader.skip(0, FORMAT_1)
    feed(reader, RECORDS[0])
    assert reader.state == State(stopped=IS_FORMAT_1)
    assert "delete the queue 'warren.shard-maps'" in IS_FORMAT_1


def test_a_record_of_format_1_in_a_log_of_format_2_is_void() -> None:
    reader = read_all([*RECORDS, FORMAT_1])
    reader.skip(reader.next_offset, FORMAT_1)
    assert reader.state == SEEN


def test_every_change_leaves_the_old_state_alone() -> None:
    state = FIRST.with_map(queue_map()).with_policy(FILMS).without_policy("pictures")
    assert (state.epoch, state.policies) == (4, {"films": FILMS})
    assert state.maps.keys() == {"images"}
    assert state.without_map("images").maps == {}
    assert {policy.name for policy in FIRST.policies.values()} == {"pictures"}


def test_a_map_survives_the_policy_that_made_it() -> None:
    state = FIRST.with_map(queue_map())
    assert state.without_policy("pictures").maps == state.maps


def test_nothing_has_to_be_proposed_where_nothing_changed() -> None:
    assert changes_between(FIRST, FIRST.with_policy(PICTURES)) == ()


def test_the_record_of_a_founder_cites_no_log() -> None:
    record = json.loads(encode(changes_between(State(), FIRST), name="a", log=""))
    assert record["log"] is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"epoch": 1, "policies": {"other": PICTURES}}, "state.policies"),
        ({"epoch": 1, "maps": {"other": queue_map()}}, "state.maps"),
        ({"epoch": 1, "maps": {"images": queue_map(epoch=2)}}, "state.maps"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        State(**fields)
    assert caught.value.field == field


# Who founds a log


@pytest.mark.parametrize(
    "founder",
    [
        changed_in(RECORDS[0], kind="policy-tuned"),
        changed_in(RECORDS[0], policy={**PICTURES.to_json(), "order": "strict"}),
        changed_in(RECORDS[0], policy={**PICTURES.to_json(), "pattern": "("}),
        changed_in(RECORDS[0], policy={**PICTURES.to_json(), "shards_per_node": 0}),
        changed_in(RECORDS[0], base=3),
        changed(RECORDS[0], changes=["no change"]),
    ],
)
def test_a_log_is_founded_by_its_first_record_whatever_becomes_of_the_changes(
    founder: bytes,
) -> None:
    founder = changed(founder, id="first")
    rival = changed(RECORDS[0], id="rival")
    reader = read_all([founder, rival])
    assert reader.state is not None
    assert (reader.log, reader.founded_at, reader.state.epoch) == ("first", 0, 0)
    assert not reader.state.stopped
    films = proposal(reader.state, reader.state.with_policy(FILMS))
    assert replay([founder, rival, films]).policies == {"films": FILMS}


def test_a_founder_with_an_unknown_field_gives_the_log_its_identity_and_stops_all_changes() -> None:
    state = replay([changed(RECORDS[0], id="first", zones=[]), RECORDS[0]])
    assert state.log == "first"
    assert "record.zones" in state.stopped
    assert state.policies == {}


@pytest.mark.parametrize(
    "first", [{"format": 2, "id": "s", "log": None, "start": 0, "snapshot": {}, "zones": 1}]
)
def test_no_snapshot_founds_a_log(first: dict[str, Any]) -> None:
    void, state = judged([], dumps(first))
    assert void.void is not None
    assert state == State()


# What is void for everybody, though one may not see it at once

HALF = "\ud83d"


@pytest.mark.parametrize(
    "record",
    [
        POLICY_RECORD[:-1] + b',"x-note":18446744073709551616}',
        POLICY_RECORD[:-1] + b',"x-note":9223372036854775808}',
        changed(POLICY_RECORD, **{"x-note": {"deep": [HALF]}}),
        changed(POLICY_RECORD, **{"x-note": {HALF: 1}}),
        b'{"format":3,"x-note":"\\ud800"}',
        dumps({k: v for k, v in json.loads(POLICY_RECORD).items() if k != "log"}),
        changed(POLICY_RECORD, note="nothing"),
        changed_in(
            POLICY_RECORD,
            policy={k: v for k, v in FILMS.to_json().items() if k != "routing_key"},
        ),
        changed_in(MAP_RECORD, map={**queue_map().to_json(), "exchange": ""}),
        changed_in(
            MAP_RECORD,
            map={
                **queue_map().to_json(),
                "nodes": [
                    {"name": each["name"], "addresses": []}
                    for each in queue_map().to_json()["nodes"]
                ],
            },
        ),
    ],
)
def test_what_is_void_stops_and_freezes_nothing(record: bytes) -> None:
    void, state = judged(RECORDS, record)
    assert state == SEEN
    assert str(void.void).startswith("not a record: ")


def test_a_note_that_came_as_a_change_is_void() -> None:
    void, state = judged(RECORDS, b'{"format":2,"note":"nothing"}')
    assert state == SEEN
    assert void.void is not None
