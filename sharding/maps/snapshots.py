"""Reading a map log from anywhere: snapshots, and the reader that makes one history of it all.

A snapshot says what the state was after some record, so that a reader who starts there needs
nothing from before. The rules, all of them decided by what lies in the log:

* A snapshot comes in parts, records of at most `MAX_PART` bytes. All cite its name, the offset that
  it *covers* (the state was this after that record), and the digest of its text, which the parts
  hold piece by piece, in order. Name and offset together say which one it is: under one name alone,
  who started later would not know of parts that others have seen. A part out of order, a text with
  another digest or one that this format does not allow, and a last part further than `WINDOW`
  behind what is covered: then it counts as none. So does one whose parts begin before what it
  covers.
* One that covers no more than an earlier one that was accepted counts as none.
* Any other is *accepted* with its last part, and the state is then what it says, and what the
  records behind the covered one make of that. For a reader that has the state this changes nothing,
  as long as writers are true; but it takes it over all the same. So nobody has to judge whether a
  snapshot is right, and readers who come later can't be told something else than those who were
  there.
* A reader may start at any record. It knows nothing until the first snapshot is accepted that
  covers the record before its start, or a later one. Every record says where such a start is, which
  is a hint: who finds no snapshot there starts at the first record.
* If the first record of the log is gone (somebody set a retention), nothing is known of it but what
  the first snapshot says that is accepted, whichever log that is of: the records left may have been
  meant for another one.
* Who does not understand something (see `map_log`) writes no snapshot.

That all readers agree follows: parts lie behind what they cover, so of a snapshot that covers more
than the one accepted, whoever accepted that has seen every part, wherever he started.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sharding.errors import InvalidInput, UnsupportedFormat
from sharding.maps import map_log
from sharding.maps.json_fields import JsonObject, parse_strictly
from sharding.maps.map_log import (
    IS_FORMAT_1,
    MAP,
    POLICY,
    Entry,
    Record,
    State,
    concerned_by,
    decode_value,
    short_text,
    unknown_field,
    unknown_kind,
    whole,
)
from sharding.maps.policy import Policy
from sharding.maps.shard_map import ShardMap

MAX_PART = 100_000
WINDOW = 1_000
# A piece is put into JSON a second time, where each of its characters may become two, and in ASCII.
_PIECE = 45_000
# A snapshot is due when what follows the last one is longer than this, and than twice that one.
_WORTH_A_SNAPSHOT = 64_000


def snapshot_records(state: State, covers: int, *, name: str, start: int = 0) -> list[bytes]:
    """The parts that say what the state was after the record at the offset `covers`.

    The last part says that one may start there, as all others lie before it: who comes next need
    not read what came before the snapshot.
    """
    text = _text_of(state)
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    return [
        map_log.dumps(
            {
                "format": map_log.FORMAT,
                "id": name,
                "log": state.log,
                "start": covers + 1 if number == len(pieces) else start,
                "snapshot": {
                    "covers": covers,
                    "part": number,
                    "parts": len(pieces),
                    "sha256": _digest(text),
                    "text": piece,
                },
            }
        )
        for number, piece in enumerate(pieces, 1)
    ]


def newest_start(records: Iterable[bytes], log: str) -> int | None:
    """Where the newest of these records says that a reader may start; None if none of them does.

    Not only one that counts: who wrote it has read the log, and it is only a hint.
    """
    for body in reversed(list(records)):
        try:
            record = map_log.read(body)
        except (InvalidInput, UnsupportedFormat):
            continue
        if (record.log or record.name) == log:
            return record.start
    return None


@dataclass(frozen=True, slots=True)
class Read:
    """What became of one record."""

    name: str = ""
    void: str | None = None
    is_due: bool = False
    """Whether its writer should append a snapshot: for each that is due there is one writer."""


class LogReader:
    """All that one reader knows of a log. `state` is None before it knows anything.

    It does no I/O: who reads gives it one record after the other that came through the exchange of
    changes, and says of the others that they were there.
    """

    def __init__(self, log: str = "", start: int = 0) -> None:
        self.log = log if start else ""
        """The identity of the log, as far as it is known. Who begins at the first record is told of
        it there: what cites it before the record that founds is for another log."""
        self.state: State | None = None if start else State()
        self.next_offset = start
        self.founded_at: int | None = None
        """The offset of the record that founded the log, if it was read."""
        self.start = 0
        """Where the newest snapshot that was accepted allows to start."""
        self._covered = start - 2 if start else -1
        self._recent: deque[tuple[int, Record | str, int]] = deque()
        self._pending: dict[tuple[str, str, int], _Pending] = {}
        self._bytes = 0
        self._asked = 0
        self._snapshot_bytes = 0

    def skip(self, offset: int, body: bytes) -> None:
        """A record that came another way: it says nothing, but takes space."""
        self._arrive_at(offset)
        self._bytes += len(body)
        if self.state is not None and not self.log and not self.state.stopped:
            self._look_for_format_1(body)

    def read(self, offset: int, body: bytes) -> Read:
        """The next record of the log."""
        self._arrive_at(offset)
        self._bytes += len(body)
        try:
            record = map_log.read(body)
        except InvalidInput as error:
            if self.state is not None and not self.log:
                self._look_for_format_1(body)
            return Read(void=f"not a record: {error}")
        except UnsupportedFormat as error:
            self._stop(offset, str(error), len(body))
            return Read()
        if record.snapshot is not None and not record.unknown:
            return self._read_part(offset, record, len(body))
        return self._read_changes(offset, record, len(body))

    def _arrive_at(self, offset: int) -> None:
        # Only the first record is known to have been there. Between others a stream keeps things of
        # its own (offsets that readers stored, say), and to store one takes no right but read.
        if offset > self.next_offset == 0:
            self.state, self._covered = None, max(self._covered, offset - 2)
            self._recent.clear()
            self._pending.clear()
        self.next_offset = offset + 1

    def _look_for_format_1(self, body: bytes) -> None:
        if self.state is not None and map_log.is_format_1(body):
            self.state = replace(self.state, stopped=IS_FORMAT_1)

    def _read_changes(self, offset: int, record: Record, size: int) -> Read:
        if self.state is None:
            self._keep(offset, record, size)
            return Read(record.name, "nothing is known yet")
        verdict = map_log.apply(self.state, record, offset)
        counts = verdict.void is None and verdict.state.epoch > self.state.epoch
        void = None if counts else verdict.void or "this Warren does not understand it"
        if not self.log and verdict.state.log:
            self.founded_at = offset
        self.state, self.log = verdict.state, verdict.state.log
        self._keep(offset, record, size)
        return Read(record.name, void, counts and self._is_snapshot_due())

    def _stop(self, offset: int, why: str, size: int) -> None:
        if self.state is not None and not self.state.stopped:
            self.state = map_log.stop(self.state, offset, why)
        self._keep(offset, why, size)

    def _keep(self, offset: int, record: Record | str, size: int) -> None:
        """Remember a record for as long as a snapshot may come that does not cover it."""
        self._recent.append((offset, record, size))
        while self._recent[0][0] <= offset - WINDOW:
            self._recent.popleft()

    def _is_snapshot_due(self) -> bool:
        if self.state is None or self.state.frozen or self.state.stopped:
            return False
        if self._bytes - self._asked <= max(_WORTH_A_SNAPSHOT, 2 * self._snapshot_bytes):
            return False
        self._asked = self._bytes
        return True

    # Snapshots

    def _read_part(self, offset: int, record: Record, size: int) -> Read:
        is_any_welcome = self.state is None and not self.log
        if record.log != self.log and not is_any_welcome:
            told = f"cites the log {record.log}, and this is {self.log or 'a new one'}"
            return Read(record.name, told)
        try:
            part = _Part.of(record.snapshot)
            why = self._why_no_part(offset, record, part, size)
        except InvalidInput as error:
            return Read(record.name, f"not a record: {error}")
        except UnsupportedFormat as error:
            self._stop(offset, str(error), size)
            return Read(record.name)
        assert record.log  # see `map_log.read`
        key = record.log, record.name, part.covers
        if why:
            self._pending.pop(key, None)
            return Read(record.name, why)
        if part.number == 1:
            self._pending[key] = _Pending(part)
        pending = self._pending[key]
        pending.pieces.append(part.text)
        pending.size += size
        if part.number == part.parts:
            del self._pending[key]
            return Read(record.name, self._accept(offset, record.log, pending))
        return Read(record.name)

    def _why_no_part(self, offset: int, record: Record, part: _Part, size: int) -> str:
        if size > MAX_PART:
            return f"is a part of {size} bytes, more than {MAX_PART}"
        if not self._covered < part.covers < offset or offset - part.covers > WINDOW:
            return f"covers {part.covers}, which is not wanted at {offset}"
        pending = self._pending.get((record.log or "", record.name, part.covers))
        if part.number == 1:
            return "" if pending is None else "begins a snapshot again"
        if pending is None or not pending.goes_on_with(part):
            return f"is part {part.number} of a snapshot, out of order"
        return ""

    def _accept(self, offset: int, log: str, pending: _Pending) -> str | None:
        """Take a whole snapshot over, unless it is none."""
        text, covers = "".join(pending.pieces), pending.first.covers
        if _digest(text) != pending.first.sha256:
            return "is the last part of a snapshot with another digest"
        try:
            state = _state_of(text, log, offset, self.state or State())
        except InvalidInput as error:
            return f"is the last part of no snapshot: {error}"
        except UnsupportedFormat as error:
            state = map_log.stop(self.state or State(log=log), offset, str(error))
        behind = [each for each in self._recent if each[0] > covers]
        for at, record, _ in behind:
            if isinstance(record, Record):
                state = map_log.apply(state, record, at).state
            elif not state.stopped:
                state = map_log.stop(state, at, record)
        self.log, self.state, self._recent = log, state, deque(behind)
        self.start, self._covered = covers + 1, covers
        self._pending = {
            key: each for key, each in self._pending.items() if each.first.covers > covers
        }
        self._bytes, self._asked = sum(size for _, _, size in behind), 0
        self._snapshot_bytes = pending.size
        return None


@dataclass(frozen=True, slots=True)
class _Part:
    covers: int
    number: int
    parts: int
    sha256: str
    text: str

    @classmethod
    def of(cls, value: object) -> _Part:
        item = JsonObject(value, "record.snapshot")
        part = cls(
            whole("record.snapshot.covers", item.integer("covers")),
            whole("record.snapshot.part", item.integer("part")),
            whole("record.snapshot.parts", item.integer("parts")),
            item.text("sha256"),
            item.text("text"),
        )
        if unknown := unknown_field(item.left(), frozenset(), "record.snapshot"):
            raise UnsupportedFormat(unknown)
        if not 1 <= part.number <= part.parts:
            raise InvalidInput("record.snapshot.part", f"must be 1 to {part.parts}", part.number)
        return part


class _Pending:
    """A snapshot whose parts are coming."""

    def __init__(self, first: _Part) -> None:
        self.first = first
        self.pieces: list[str] = []
        self.size = 0

    def goes_on_with(self, part: _Part) -> bool:
        expected = replace(self.first, number=len(self.pieces) + 1, text=part.text)
        return part == expected


def _text_of(state: State) -> str:
    entries = []
    for entry in sorted(state.revisions):
        kind, name = entry
        item: dict[str, Any] = {"kind": kind, "name": name}
        item["revision"] = state.revisions[entry]
        value = state.value(entry)
        if value is not None:
            item[kind] = value.to_json()
        entries.append(item)
    whole_state = {"epoch": state.epoch, "entries": entries}
    return json.dumps(whole_state, separators=(",", ":"), sort_keys=True)


def _state_of(text: str, log: str, offset: int, last: State) -> State:
    """The state that a snapshot's text says; what this reader does not understand of it is frozen,
    with the last value that it had."""
    content = JsonObject(parse_strictly(text.encode(), "snapshot"), "snapshot")
    epoch = whole("snapshot.epoch", content.integer("epoch"))
    entries = content.array("entries")
    if unknown := unknown_field(content.left(), frozenset(), "snapshot"):
        raise UnsupportedFormat(unknown)
    policies: dict[str, Policy] = {}
    maps: dict[str, ShardMap] = {}
    revisions: dict[Entry, int] = {}
    frozen: dict[Entry, str] = {}
    named: set[tuple[str, str]] = set()
    for number, each in enumerate(entries):
        where = f"snapshot.entries[{number}]"
        item = JsonObject(each, where)
        kind, name = item.text("kind"), short_text(where, item.text("name"))
        if (kind, name) in named:
            raise InvalidInput(where, "must be of different entries", [kind, name])
        named.add((kind, name))
        try:
            entry, revision, value = _entry(kind, name, item, epoch, where, log)
        except _NotUnderstood as error:
            frozen[error.entry] = (
                f"the snapshot at record {offset} of the map log can't be understood, and "
                f"{error.entry} is changed no more: {error}"
            )
            continue
        revisions[entry] = revision
        if isinstance(value, Policy):
            policies[name] = value
        elif value is not None:
            maps[name] = value
    for entry in frozen.keys() - revisions.keys():
        if entry in last.revisions:
            revisions[entry] = last.revision(entry)
        value = last.value(entry)
        if isinstance(value, Policy):
            policies[entry.name] = value
        elif value is not None and value.epoch <= epoch:
            # What this reader had must not decide whether it is a snapshot.
            maps[entry.name] = value
    return State(epoch, policies, maps, revisions, log, frozen)


class _NotUnderstood(UnsupportedFormat):
    def __init__(self, entry: Entry, why: str) -> None:
        super().__init__(why)
        self.entry = entry


def _entry(
    kind: str, name: str, item: JsonObject, epoch: int, where: str, log: str
) -> tuple[Entry, int, Policy | ShardMap | None]:
    if kind not in (POLICY, MAP):
        raise _NotUnderstood(concerned_by(kind, name), unknown_kind(where, kind))
    entry, revision = Entry(kind, name), whole(f"{where}.revision", item.integer("revision"))
    if not 1 <= revision <= epoch:
        raise InvalidInput(f"{where}.revision", f"must be 1 to {epoch}, the epoch", revision)
    content = item.optional_mapping(kind)
    if unknown := unknown_field(item.left(), frozenset(), where):
        raise _NotUnderstood(entry, unknown)
    try:
        value = None if content is None else decode_value(entry, revision, content, where, log)
    except UnsupportedFormat as error:
        raise _NotUnderstood(entry, str(error)) from None
    return entry, revision, value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
