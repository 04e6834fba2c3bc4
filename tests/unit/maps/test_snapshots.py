"""What a snapshot has to be to count, and that one which counts is the same for everybody."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from sharding import Policy
from sharding.maps import snapshots
from sharding.maps.map_log import MAP, POLICY, Entry, State, dumps
from sharding.maps.snapshots import MAX_PART, LogReader, snapshot_records
from tests.support.log_records import feed, founded, parts_of, proposal, read_all, replay
from tests.support.maps import queue_map

PICTURES = Policy("pictures", "^images$", 2)
FIRST = State().with_policy(PICTURES)
SECOND = FIRST.with_map(queue_map())
RECORDS = founded(FIRST, SECOND, SECOND.without_policy("pictures"))


@pytest.fixture(autouse=True)
def of_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_PIECE", 200)


def late(records: list[bytes], start: int) -> State | None:
    """What a reader knows that starts there."""
    reader = LogReader(read_all(records).log, start)
    return read_all(records[start:], reader).state


def test_who_starts_behind_what_a_snapshot_covers_knows_everything() -> None:
    parts = parts_of(read_all(RECORDS))
    assert len(parts) > 2
    records = [*RECORDS, *parts]
    assert late(records, 3) == replay(RECORDS)
    assert late(records, 2) == replay(RECORDS)
    assert late(records, 4) is None  # the first part is missing


def test_tombstones_are_kept() -> None:
    state = late([*RECORDS, *parts_of(read_all(RECORDS))], 3)
    assert state is not None
    assert state.revisions == {Entry(POLICY, "pictures"): 2, Entry(MAP, "images"): 1}
    assert "pictures" not in state.policies


def test_changes_between_the_parts_take_effect() -> None:
    reader = read_all(RECORDS)
    parts = parts_of(reader)
    assert reader.state is not None
    between = proposal(reader.state, reader.state.with_policy(Policy("films", ".", 1)))
    records = [*RECORDS, parts[0], between, *parts[1:]]
    state = late(records, 3)
    assert state == replay(records)
    assert state is not None
    assert "films" in state.policies


def test_a_snapshot_says_where_to_start_once_it_is_whole() -> None:
    reader = read_all(RECORDS)
    *parts, last = parts_of(reader)
    for part in parts:
        feed(reader, part)
    assert reader.start == 0
    feed(reader, last)
    assert reader.start == 3


def edited(record_: bytes, /, **fields: Any) -> bytes:
    record = json.loads(record_)
    record["snapshot"].update(fields)
    return dumps(record)


def without_the_last(parts: list[bytes]) -> list[bytes]:
    return parts[:-1]


def out_of_order(parts: list[bytes]) -> list[bytes]:
    return [parts[0], *reversed(parts[1:])]


def begun_again(parts: list[bytes]) -> list[bytes]:
    return [parts[0], parts[0], *parts[1:]]


def damaged(parts: list[bytes]) -> list[bytes]:
    text = json.loads(parts[1])["snapshot"]["text"]
    return [parts[0], edited(parts[1], text=f"{text[:-1]}~"), *parts[2:]]


def cut_off(parts: list[bytes]) -> list[bytes]:
    return [parts[0], parts[1][:-5], *parts[2:]]


def of_another_log(parts: list[bytes]) -> list[bytes]:
    return [dumps({**json.loads(part), "log": "another"}) for part in parts]


def of_what_is_to_come(parts: list[bytes]) -> list[bytes]:
    return [edited(part, covers=50) for part in parts]


def of_two_counts(parts: list[bytes]) -> list[bytes]:
    return [*parts[:-1], edited(parts[-1], parts=len(parts) + 1)]


def of_two_coverings(parts: list[bytes]) -> list[bytes]:
    return [*parts[:-1], edited(parts[-1], covers=1)]


def too_large(parts: list[bytes]) -> list[bytes]:
    return [dumps({**json.loads(parts[0]), "x-room": "r" * MAX_PART}), *parts[1:]]


def too_far_away(parts: list[bytes]) -> list[bytes]:
    return [*[b"{}"] * snapshots.WINDOW, *parts]


def not_the_form(parts: list[bytes]) -> list[bytes]:
    text = '{"epoch":3,"entries":[{"kind":"policy","name":"p"}]}'
    digest = hashlib.sha256(text.encode()).hexdigest()
    return [edited(parts[0], part=1, parts=1, sha256=digest, text=text)]


@pytest.mark.parametrize(
    "harm",
    [
        without_the_last,
        out_of_order,
        begun_again,
        damaged,
        cut_off,
        of_another_log,
        of_what_is_to_come,
        of_two_counts,
        of_two_coverings,
        too_large,
        too_far_away,
        not_the_form,
    ],
)
def test_what_is_no_whole_snapshot_counts_as_none(
    harm: Callable[[list[bytes]], list[bytes]],
) -> None:
    parts = parts_of(read_all(RECORDS))
    reader = read_all([*RECORDS, *harm(parts)])
    assert reader.state == replay(RECORDS)
    assert reader.start == 0
    assert late([*RECORDS, *harm(parts)], 3) is None


def test_of_two_snapshots_the_one_that_covers_less_counts_as_none() -> None:
    reader = read_all(RECORDS[:2])
    old = parts_of(reader)
    feed(reader, RECORDS[2])
    new = parts_of(reader)
    reader = read_all([*RECORDS, *new, *old])
    assert reader.start == 3
    assert reader.state == replay(RECORDS)


def test_a_wrong_snapshot_is_the_state_for_everybody() -> None:
    """Those who read everything are not told something else than those who start there."""
    log = read_all(RECORDS).log
    wrong = State(7, {}, {}, {Entry(MAP, "images"): 5}, log)
    records = [*RECORDS, *snapshot_records(wrong, 2, name="wrong")]
    assert replay(records) == wrong
    assert late(records, 3) == wrong


def test_what_is_not_understood_of_a_snapshot_freezes_its_entry_with_its_last_value() -> None:
    reader = read_all(RECORDS)
    assert reader.state is not None
    text = snapshots._text_of(reader.state).replace('"logical"', '"tokens":{},"logical"')
    piece = {"covers": 2, "part": 1, "parts": 1, "sha256": snapshots._digest(text), "text": text}
    newer = {"format": 2, "id": "s", "log": reader.log, "start": 0, "snapshot": piece}
    records = [*RECORDS, dumps(newer)]
    whole = replay(records)
    assert whole.maps == replay(RECORDS).maps
    assert "snapshot.entries[0].map.tokens" in whole.why_frozen(Entry(MAP, "images"))
    new = late(records, 3)
    assert new is not None
    assert new.maps == {}
    assert new.frozen == whole.frozen


def test_a_snapshot_of_those_who_understand_thaws_what_was_frozen() -> None:
    reader = read_all(RECORDS)
    assert reader.state is not None
    state = replay(RECORDS)
    strange = json.loads(proposal(state, state.without_map("images")))
    strange["changes"][0]["kind"] = "proposed"
    records = [*RECORDS, dumps(strange), b'{"format":3}']
    assert read_all(records).state != state
    records += snapshot_records(state, 4, name="s")
    assert replay(records) == state


def test_parts_are_small_whatever_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    state = State(log="log")
    for number in range(300):
        name = f'"\\"\\\\{number}ü'
        policy = Policy(name, "^" + "\\\\" * 200 + '"' * 200 + "ü" * 100, 1)
        state = state.with_policy(policy)
    parts = snapshot_records(state, 300, name="s")
    assert len(parts) > 3
    assert max(map(len, parts)) <= MAX_PART
    reader = LogReader("log", 301)
    assert read_all(parts, reader).state == state


def test_a_snapshot_under_a_name_that_was_used_before_counts_for_everybody_alike() -> None:
    reader = read_all(RECORDS)
    begun = parts_of(reader, "twice")[0]
    assert reader.state is not None
    change = proposal(reader.state, reader.state.with_policy(Policy("films", ".", 1)))
    before = [*RECORDS, begun, change]
    records = [*before, *parts_of(read_all(before), "twice")]
    assert read_all(records).start == len(before)
    assert late(records, len(before)) == replay(records)


def a_snapshot_of(reader: LogReader, entries: list[dict[str, Any]], epoch: int) -> bytes:
    text = json.dumps({"epoch": epoch, "entries": entries})
    digest = hashlib.sha256(text.encode()).hexdigest()
    (part,) = snapshot_records(State(log=reader.log), reader.next_offset - 1, name="s")[:1]
    return edited(part, part=1, parts=1, text=text, sha256=digest)


def test_an_entry_of_an_unknown_kind_brings_back_no_map_of_its_name() -> None:
    reader = read_all(founded(FIRST, SECOND))
    gone = {"kind": MAP, "name": "images", "revision": 2}
    unknown = {"kind": "token", "name": "images"}
    feed(reader, a_snapshot_of(reader, [gone, unknown], 9))
    assert reader.state is not None
    assert reader.start == 2
    assert reader.state.maps == {}
    assert reader.state.frozen.keys() == {Entry(MAP, "images")}


def test_what_a_reader_knew_does_not_decide_whether_it_is_a_snapshot() -> None:
    reader = read_all(founded(FIRST, SECOND))
    newer = {"kind": MAP, "name": "images", "revision": 1, "order": "strict"}
    feed(reader, a_snapshot_of(reader, [newer], 1))
    assert reader.start == 2


def test_a_change_of_what_is_frozen_is_void_for_its_writer() -> None:
    reader = read_all(founded(FIRST))
    assert reader.state is not None
    own = proposal(reader.state, reader.state.with_policy(Policy("pictures", "^images$", 5)))
    tuned = {"kind": "policy-tuned", "name": "pictures", "base": 1}
    envelope = {"format": 2, "id": "new", "log": reader.log, "start": 0, "changes": [tuned]}
    feed(reader, dumps(envelope))
    seen = feed(reader, own)
    assert seen is not None
    assert seen.void is not None
    assert reader.state.policies["pictures"].shards_per_node == 2


@pytest.mark.parametrize(
    ("kind", "concerned"),
    [("token", Entry(MAP, "images")), ("policy-tuned", Entry(POLICY, "images"))],
)
def test_an_entry_of_an_unknown_kind_concerns_what_a_change_of_that_kind_would(
    kind: str, concerned: Entry
) -> None:
    reader = read_all(founded(FIRST, SECOND))
    feed(reader, a_snapshot_of(reader, [{"kind": kind, "name": "images", "steps": [1]}], 2))
    assert reader.start == 2
    assert reader.state is not None
    assert reader.state.frozen.keys() == {concerned}
    assert ("images" in reader.state.maps) == (concerned.kind == MAP)


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": POLICY, "name": "gone", "revision": 0},
        {"kind": POLICY, "name": "gone", "revision": 4},
        {"kind": MAP, "name": "images", "revision": 4, "order": "strict"},
        {"kind": POLICY, "name": "gone", "order": "strict"},
    ],
)
def test_a_snapshot_whose_revisions_can_not_be_is_none(entry: dict[str, Any]) -> None:
    reader = read_all(founded(FIRST, SECOND))
    before = reader.state
    feed(reader, a_snapshot_of(reader, [entry], 3))
    assert (reader.start, reader.state) == (0, before)


# The first record is gone


def test_where_the_first_record_is_gone_an_accepted_snapshot_says_which_log_it_is() -> None:
    whole = read_all(RECORDS)
    state = whole.state
    assert state is not None
    meant_for_another = proposal(State(log="another"), State(log="another").with_policy(PICTURES))
    would_found = proposal(State(), FIRST, name="late founder")
    records = [meant_for_another, would_found, *parts_of(whole)]
    reader = LogReader()
    for offset, record in enumerate(records, 3):
        if offset == 4:
            assert reader.state is None
        reader.read(offset, record)
    assert reader.log == whole.log
    assert reader.state == state


def test_where_the_first_record_is_gone_nothing_is_known_without_a_snapshot() -> None:
    reader = LogReader()
    for offset, record in enumerate(RECORDS, 3):
        reader.read(offset, record)
    assert (reader.state, reader.log) == (None, "")
    ways = LogReader()
    ways.skip(3, b"through another exchange")
    assert ways.state is None


def test_a_snapshot_that_ended_may_begin_again_and_text_has_no_halves() -> None:
    parts = parts_of(read_all(RECORDS))
    again = read_all([*RECORDS, parts[0], parts[0], *parts])
    assert again.start == len(RECORDS)
    half = edited(parts[0], text="\ud83d" + json.loads(parts[0])["snapshot"]["text"])
    seen = feed(read_all(RECORDS), half)
    assert seen is not None
    assert seen.void is not None


def test_a_reader_from_the_first_record_that_is_gone_knows_nothing_until_a_snapshot() -> None:
    whole = read_all(RECORDS)
    reader = LogReader()
    reader.read(3, b"those before are gone")
    assert reader.state is None
    for part in snapshot_records(replay(RECORDS), 2, name="s"):
        reader.read(reader.next_offset, part)
    assert reader.state == whole.state
    assert reader.start == 3


def test_offsets_that_no_record_has_say_nothing() -> None:
    """A stream keeps what readers stored, and writers' names, between the records."""
    reader = LogReader()
    for offset, body in enumerate(RECORDS):
        reader.read(2 * offset, body)
    assert reader.state == read_all(RECORDS).state
