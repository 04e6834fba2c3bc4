"""However writers race, and wherever readers start, all readers of the log agree.

Each example is a log that several writers wrote: a writer knows the log up to some point, often not
to the end, and appends changes or a snapshot, whose parts other records come between, or whose last
ones never come. Between them lie records cut off, damaged, repeated, forged, of newer formats, ones
that came another way, and plain garbage. What counts is worked out a second time here, from what
the writers did, without reading the records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from hypothesis import event, given
from hypothesis import strategies as st

from sharding import Policy
from sharding.maps import map_log, snapshots
from sharding.maps.map_log import Change, Entry, State, changes_between, dumps
from sharding.maps.snapshots import LogReader, newest_start, snapshot_records
from tests.support.log_records import a_name, begin_names, feed, parts_of, read_all, replay
from tests.support.maps import queue_map, stream_map

GARBAGE = st.binary(max_size=20) | st.sampled_from(
    [b"{}", b"null", b'{"format":2}', b'{"format":2,"id":"a"}', b'{"format":2,"changes":[]}']
)
MAPS = [queue_map("ab"), queue_map("abc"), stream_map(2)]
HONEST = ("change", "change", "change", "change", "snapshot", "part", "part", "read", "ignored")
HARMED = (*HONEST, "garbage", "cut", "damage", "repeat", "forge", "lie")
STRANGE = (*HARMED, "newer", "odd")


_read_once = lru_cache(maxsize=1_000)(map_log.read)


@contextmanager
def small() -> Iterator[None]:
    """Snapshots of many parts, a window that logs of this size go beyond, and no record parsed
    again for each reader."""
    with (
        patch.object(snapshots, "_PIECE", 500),
        patch.object(snapshots, "WINDOW", 12),
        patch.object(map_log, "read", _read_once),
    ):
        yield


@dataclass(frozen=True)
class Written:
    """One record of a log; `changes` are what its writer meant, if it is a proposal."""

    record: bytes | None
    changes: tuple[Change, ...] = ()
    log: str = ""
    name: str = ""


class Writers:
    """Some processes that write one log, each of which has read it up to some point."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.log: list[Written] = []
        self._draw = draw
        self._readers = [LogReader() for _ in range(draw(st.integers(1, 3)))]
        self._parts: list[bytes] = []

    def act(self, kind: str) -> None:
        reader = self._draw(st.sampled_from(self._readers))
        if kind == "read":
            behind = len(self.log) - reader.next_offset
            for _ in range(self._draw(st.integers(0, behind))):
                feed(reader, self.log[reader.next_offset].record)
        elif kind == "change":
            self._change(reader)
        elif kind == "snapshot" and reader.state is not None and reader.log:
            if not reader.state.frozen and not reader.state.stopped:
                self._parts += parts_of(reader)
        elif kind == "odd" and reader.state is not None and reader.log:
            self._parts += self._odd(reader)
        elif kind == "part" and self._parts:
            keep = self._draw(st.integers(0, 9))  # one in ten writers dies in the middle
            self.log.append(Written(self._parts.pop(0)))
            self._parts = self._parts if keep else []
        elif kind == "ignored":
            self.log.append(Written(None))
        elif kind not in ("snapshot", "odd", "part"):
            self.log.append(Written(self._harmed(kind)))

    def _change(self, reader: LogReader) -> None:
        before = reader.state
        assert before is not None
        after = before
        for _ in range(self._draw(st.sampled_from([1, 1, 1, 2]))):
            after = self._draw(next_states(after))
        changes = changes_between(before, after)
        if changes and not any(before.why_frozen(change.entry) for change in changes):
            name = a_name()
            record = map_log.encode(changes, name=name, log=before.log, start=reader.start)
            self.log.append(Written(record, changes, before.log, name))

    def _harmed(self, kind: str) -> bytes:
        draw = self._draw
        old = [each.record for each in self.log if each.record]
        if kind == "garbage" or not old:
            return draw(GARBAGE)
        record = draw(st.sampled_from(old))
        if kind == "cut":
            return record[: draw(st.integers(0, len(record) - 1))]
        if kind == "damage":
            return damaged(record, draw(st.integers(0, len(record) - 1)), draw(st.integers(1, 255)))
        if kind == "forge":
            entry = draw(st.sampled_from([Entry("policy", "a"), Entry("map", "images")]))
            change = Change(entry, draw(st.integers(0, 5)), None)
            logs = [each.name for each in self.log if each.name] or ["another"]
            return map_log.encode([change], name=a_name("f"), log=draw(st.sampled_from(logs)))
        if kind == "lie":
            return self._lie()
        return self._newer(record)

    def _lie(self) -> bytes:
        """A snapshot, in one part, of something that never was."""
        log = next((each.name for each in self.log if each.name), "another")
        state = replace(State().with_policy(Policy("lie", ".", 1)), log=log)
        covers = self._draw(st.integers(0, len(self.log)))
        (record,) = snapshot_records(state, covers, name=a_name("l"))
        return record

    def _odd(self, reader: LogReader) -> list[bytes]:
        """A snapshot in the text of which something is not understood, or not true."""
        assert reader.state is not None
        text = json.loads(snapshots._text_of(reader.state))
        where = self._draw(st.sampled_from([text, *text["entries"]]))
        which = self._draw(st.sampled_from(["order", "x-remark", "kind", "revision", "epoch"]))
        where[which] = 1 if which in ("revision", "epoch") else "policy-new"
        with patch.object(snapshots, "_text_of", lambda _: dumps(text).decode()):
            return parts_of(reader)

    def _newer(self, record: bytes) -> bytes:
        """Something that others may understand."""
        fields: Any = {"format": 3}
        if self._draw(st.booleans()):
            try:
                fields = json.loads(record)
            except ValueError:
                return b'{"format":4}'
        if not isinstance(fields, dict):
            return b'{"format":5}'
        where = fields
        for change in fields.get("changes") or []:
            where = self._draw(st.sampled_from([where, change, change.get("policy") or change]))
        where[self._draw(st.sampled_from(["order", "x-remark", "kind", "pattern"]))] = "("
        return dumps(fields)


def damaged(record: bytes, place: int, by: int) -> bytes:
    return record[:place] + bytes([record[place] ^ by]) + record[place + 1 :]


@st.composite
def next_states(draw: st.DrawFn, seen: State) -> State:
    """What a writer that knows `seen` may want next."""
    policy = Policy(draw(st.sampled_from("ab")), "^images$", draw(st.integers(1, 1000)))
    shard_map = draw(st.sampled_from(MAPS))
    return draw(
        st.sampled_from(
            [
                seen.with_policy(policy),
                seen.without_policy(policy.name),
                seen.with_map(shard_map),
                seen.without_map(shard_map.logical),
            ]
        )
    )


@st.composite
def logs(draw: st.DrawFn, kinds: tuple[str, ...] = HARMED) -> list[Written]:
    begin_names()
    with small():
        writers = Writers(draw)
        for kind in draw(st.lists(st.sampled_from(kinds), min_size=5, max_size=35)):
            writers.act(kind)
    return writers.log


def records(log: list[Written]) -> list[bytes | None]:
    return [written.record for written in log]


def seen_of(state: State | None) -> Any:
    """What readers have to agree on: the last values of what they can't follow are their own."""
    if state is None or (state.stopped and not state.log):
        return None
    if state.stopped:
        return state.log, "stopped"
    frozen = state.frozen.keys()
    return (
        state.log,
        state.epoch,
        set(frozen),
        {k: v for k, v in state.revisions.items() if k not in frozen},
        {k: v for k, v in state.policies.items() if Entry("policy", k) not in frozen},
        {k: v for k, v in state.maps.items() if Entry("map", k) not in frozen},
    )


def check_that_all_agree(log: list[bytes | None]) -> None:
    """A reader that starts anywhere knows nothing, or what the one knows that read everything."""
    with small():
        first = LogReader()
        later: list[LogReader] = []
        identity = read_all(log).log
        for record in log:
            feed(first, record)
            for reader in later:
                feed(reader, record)
                if (known := seen_of(reader.state)) is not None:
                    event("a late reader knows the state")
                    assert known == seen_of(first.state)
                    assert reader.start == first.start
            if first.log:  # who starts has read the log's identity at its beginning
                later.append(LogReader(identity, first.next_offset))


@given(logs())
def test_readers_that_start_anywhere_agree_with_those_that_read_everything(
    log: list[Written],
) -> None:
    check_that_all_agree(records(log))


@given(logs(STRANGE))
def test_readers_agree_on_what_they_can_not_understand(log: list[Written]) -> None:
    check_that_all_agree(records(log))


@given(logs(), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_byte_anywhere_parts_no_readers(
    log: list[Written], which: int, where: int, by: int
) -> None:
    """In a log that lies there already, also of what records behind it build on."""
    bodies = records(log)
    whole = [n for n, record in enumerate(bodies) if record]
    if whole:
        place = whole[which % len(whole)]
        record = bodies[place] or b""
        bodies[place] = damaged(record, where % len(record), by)
    check_that_all_agree(bodies)


@given(logs(HONEST))
def test_who_starts_where_the_newest_record_says_knows_everything(log: list[Written]) -> None:
    with small():
        bodies = records(log)
        whole = read_all(bodies)
        start = newest_start([record for record in bodies if record], whole.log)
        assert start is not None or not whole.log
        if start:
            event("there is a snapshot to start at")
        late = LogReader(whole.log, start or 0)
        assert read_all(bodies[start or 0 :], late).state == whole.state


@given(logs(HONEST))
def test_a_snapshot_of_a_true_writer_changes_nothing(log: list[Written]) -> None:
    with small():
        with_them = replay(records(log))
    without = [each.record if each.changes else None for each in log]
    assert replay(without) == with_them


@given(logs(HONEST))
def test_of_the_changes_that_cite_the_same_the_first_counts(log: list[Written]) -> None:
    identity, revisions, values, epoch = "", dict[Entry, int](), dict[Entry, Any](), 0
    for written in log:
        cited = all(revisions.get(each.entry, 0) == each.base for each in written.changes)
        if written.changes and written.log == identity and cited:
            identity = identity or written.name
            epoch += len(written.changes)
            for change in written.changes:
                revisions[change.entry] = change.base + 1
                values[change.entry] = change.value
    state = replay(records(log))
    assert (state.log, state.epoch, state.revisions) == (identity, epoch, revisions)
    assert {entry: state.value(entry) for entry in values} == values
    assert {shard_map.log for shard_map in state.maps.values()} <= {identity}


@given(logs(HONEST), st.data())
def test_a_writer_that_has_read_everything_always_wins(
    log: list[Written], data: st.DataObject
) -> None:
    with small():
        reader = read_all(records(log))
        before = reader.state
        assert before is not None
        after = data.draw(next_states(before))
        changes = changes_between(before, after)
        if not changes:
            return
        own = map_log.encode(changes, name=a_name(), log=before.log)
        rival = map_log.encode(changes, name=a_name(), log=before.log)
        seen, late = feed(reader, own), feed(reader, rival)
        assert seen is not None
        assert seen.void is None
        assert late is not None
        assert late.void is not None
        assert reader.state is not None
        for change in changes:
            assert reader.state.value(change.entry) == change.value
