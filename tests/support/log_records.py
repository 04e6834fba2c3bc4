"""A map log as a list of records, and writers of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from sharding.maps import map_log
from sharding.maps.map_log import State, changes_between
from sharding.maps.snapshots import LogReader, Read, snapshot_records

_numbers = itertools.count(1)


def begin_names() -> None:
    """Give the records of another log the same names: what is drawn of a log must not depend on
    those before it."""
    global _numbers
    _numbers = itertools.count(1)


def a_name(prefix: str = "r") -> str:
    """A name that no other record of the log has."""
    return f"{prefix}{next(_numbers)}"


def proposal(before: State, after: State, *, name: str = "", start: int = 0) -> bytes:
    """The record by which a writer that knows `before` proposes `after`."""
    changes = changes_between(before, after)
    return map_log.encode(changes, name=name or a_name(), log=before.log, start=start)


def parts_of(reader: LogReader, name: str = "") -> list[bytes]:
    """The snapshot that a writer appends which has read so far."""
    assert reader.state is not None
    covers = reader.next_offset - 1
    return snapshot_records(reader.state, covers, name=name or a_name("s"), start=reader.start)


def read_all(records: Iterable[bytes | None], reader: LogReader | None = None) -> LogReader:
    """A reader that has read all of these; None stands for a record that came another way."""
    reader = reader or LogReader()
    for record in records:
        feed(reader, record)
    return reader


def feed(reader: LogReader, record: bytes | None) -> Read | None:
    if record is None:
        reader.skip(reader.next_offset, b"ignored")
        return None
    return reader.read(reader.next_offset, record)


def replay(records: Sequence[bytes | None]) -> State:
    """The state after all `records`, read from the first."""
    state = read_all(records).state
    assert state is not None
    return state


def founded(*steps: State) -> list[bytes]:
    """Records that lead from one state to the next, the first of them from nothing."""
    log: list[bytes] = []
    before = State()
    for after in steps:
        log.append(proposal(before, after))
        before = replay(log)
    return log
