"""The format of the map log is pinned: a naive second reader and committed vectors say the same.

`tests/vectors/map_log.json` has logs, record by record, and what a reader of format 2 makes of
them. If a test here fails, this Warren and those that run already would read one log differently:
repair the code, not the file. The naive reader below follows docs/map-log.md and shares no code
with `sharding.maps`; it reads logs of what writers do from the first record, and passes snapshots
over. The logs that try one rule each are in `tests.support.log_rules`.
To add cases run `python -m tests.unit.maps.test_log_vectors`, and see that no old line changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sharding import Policy
from sharding.maps import snapshots
from sharding.maps.map_log import LOG, NOTES, NOTHING, State, changes_between, dumps, encode
from sharding.maps.snapshots import LogReader, snapshot_records
from tests.support.log_rules import rules
from tests.support.maps import queue_map, stream_map

FILE = Path(__file__).parents[2] / "vectors" / "map_log.json"
RULES = ("rules: ", "snapshots: ", "lost: ")
CASES = json.loads(FILE.read_text())["cases"] if FILE.exists() else []


def bodies(records: list[dict[str, Any]]) -> list[tuple[str, bytes]]:
    """The records as they lie in the log, with the exchanges that they came through."""
    found = []
    for each in records:
        body = each["body"].encode("latin-1") + b" " * each.get("spaces", 0)
        found += [(each["exchange"], body)] * each.get("times", 1)
    return found


def read(records: list[dict[str, Any]], start: int = 0, log: str = "", first: int = 0) -> LogReader:
    reader = LogReader(log, start)
    for offset, (exchange, body) in enumerate(bodies(records), first):
        if offset >= start:
            if exchange == LOG:
                reader.read(offset, body)
            else:
                reader.skip(offset, body)
    return reader


def as_json(reader: LogReader) -> dict[str, Any] | None:
    state = reader.state
    if state is None:
        return None
    return {
        "log": state.log,
        "epoch": state.epoch,
        "policies": {name: each.to_json() for name, each in sorted(state.policies.items())},
        "maps": {name: each.to_json() for name, each in sorted(state.maps.items())},
        "revisions": sorted([*entry, revision] for entry, revision in state.revisions.items()),
        "frozen": sorted(list(entry) for entry in state.frozen),
        "stopped": bool(state.stopped),
        "start": reader.start,
    }


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_log_is_read_as_the_vectors_say(case: dict[str, Any]) -> None:
    assert as_json(read(case["records"], first=case["first"])) == case["state"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_who_starts_later_knows_the_same_or_nothing(case: dict[str, Any]) -> None:
    assert late_starts(case) == case["known_from"]


def late_starts(case: dict[str, Any]) -> list[int]:
    """From which records on, behind the founder, a reader knows the state at the end."""
    records, first = case["records"], case["first"]
    end, known = first + len(bodies(records)), []
    founded_at = read(records, first=first).founded_at
    for start in range((first if founded_at is None else founded_at) + 1, end):
        if start > first + 30 and start < end - 30:
            continue  # one of many records that are alike
        reader = read(records, start, (case["state"] or {}).get("log", ""), first)
        if (said := as_json(reader)) is not None and reader.log:
            assert agreed(said) == agreed(case["state"])
            known.append(start)
    return known


def agreed(said: dict[str, Any]) -> dict[str, Any]:
    """Without the last values of what a reader can't follow, which are its own."""
    if said["stopped"]:
        return {name: said[name] for name in ("log", "stopped", "start")}
    frozen = {tuple(each) for each in said["frozen"]}
    held = {
        plural: {name: value for name, value in said[plural].items() if (kind, name) not in frozen}
        for kind, plural in (("policy", "policies"), ("map", "maps"))
    }
    revisions = [each for each in said["revisions"] if tuple(each[:2]) not in frozen]
    return {**said, **held, "revisions": revisions}


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if not case["name"].startswith(RULES)
        and not case["state"]["frozen"]
        and not case["state"]["stopped"]
    ],
    ids=lambda case: case["name"],
)
def test_a_naive_reader_says_the_same(case: dict[str, Any]) -> None:
    naive, wanted = naively(case["records"]), case["state"]
    assert naive == {name: wanted[name] for name in naive}


def test_records_are_written_as_the_vectors_say() -> None:
    assert [(each["name"], each["first"]) for each in CASES] == [
        (name, first) for name, _, first in all_logs()
    ]
    for case, (_, records, _) in zip(CASES, all_logs(), strict=True):
        assert case["records"] == records, case["name"]


def naively(records: list[dict[str, str]]) -> dict[str, Any]:
    """The state that docs/map-log.md gives a log of which everything is understood."""
    log, epoch = "", 0
    revisions: dict[tuple[str, str], int] = {}
    values: dict[tuple[str, str], Any] = {}
    for record in records:
        try:
            fields = json.loads(record["body"].encode("latin-1").decode("utf-8"))
        except ValueError:
            continue
        if record["exchange"] != "warren.shard-maps" or not isinstance(fields, dict):
            continue
        changes = fields.get("changes")
        if fields.get("format") != 2 or not changes or fields["log"] != (log or None):
            continue
        named = [(each["kind"].split("-")[0], each["name"], each) for each in changes]
        if any(revisions.get((kind, name), 0) != each["base"] for kind, name, each in named):
            continue
        if any((each.get("policy") or {}).get("shards_per_node", 1) < 1 for *_, each in named):
            continue
        log = log or fields["id"]
        epoch += len(changes)
        for kind, name, each in named:
            revisions[kind, name] = each["base"] + 1
            values[kind, name] = each.get(kind)
    found: dict[str, Any] = {"log": log, "epoch": epoch}
    for kind, plural in (("policy", "policies"), ("map", "maps")):
        held = {name: value for (of, name), value in values.items() if of == kind and value}
        found[plural] = dict(sorted(held.items()))
    found["revisions"] = sorted([*entry, revision] for entry, revision in revisions.items())
    return found


# The logs


class Writer:
    """Writes a log as one process would, with names that are the same each time."""

    def __init__(self) -> None:
        self.records: list[dict[str, str]] = []

    @property
    def state(self) -> State:
        state = read(self.records).state
        assert state is not None
        return state

    def add(self, body: bytes, exchange: str = LOG) -> bytes:
        self.records.append({"exchange": exchange, "body": body.decode("latin-1")})
        return body

    def change(self, before: State, after: State, **fields: Any) -> bytes:
        """What a writer appends that knows `before`; with fields of its first change replaced."""
        name, start = f"record-{len(self.records)}", read(self.records).start
        body = encode(changes_between(before, after), name=name, log=before.log, start=start)
        if fields:
            record = json.loads(body)
            record["changes"][0].update(fields)
            body = dumps(record)
        return self.add(body)

    def snapshot(self, parts: int | None = None) -> None:
        reader = read(self.records)
        covers = reader.next_offset - 1
        for part in snapshot_records(self.state, covers, name=f"snapshot-{covers}")[:parts]:
            self.add(part)


IMAGES = Policy("images", "^images$", 2, queue_arguments={"x-max-length": 1000, "x-lazy": True})
FILMS = Policy("films", "^(films|gr\u00fc\u00dfe)$", 1, priority=-3, routing_key="", durable=False)


def founded() -> Writer:
    writer = Writer()
    writer.change(State(), State().with_policy(IMAGES))
    writer.change(writer.state, writer.state.with_map(queue_map("ab", per_node=2)))
    return writer


def logs() -> Iterator[tuple[str, list[dict[str, str]]]]:
    yield "nothing", []
    writer = founded()
    yield "a policy and a map", list(writer.records)
    writer.change(writer.state, writer.state.with_policy(FILMS).with_map(stream_map(3)))
    writer.change(writer.state, writer.state.without_policy("films"))
    writer.change(writer.state, writer.state.without_map("images"))
    writer.change(writer.state, writer.state.with_map(queue_map("abc")))
    yield "set, cleared, forgotten, and made again", writer.records

    writer = founded()
    seen = writer.state
    writer.change(seen, seen.with_policy(FILMS))
    writer.change(seen, seen.with_map(queue_map("abc")))
    writer.change(seen, seen.with_map(queue_map("a")))
    writer.change(seen, seen.with_policy(FILMS).without_policy("images"))
    yield (
        "races: of those that cite the same, the first; both changes of a record or none",
        (writer.records),
    )

    writer = founded()
    seen = writer.state
    once = writer.change(seen, seen.without_map("images"))
    writer.add(once)
    writer.add(once, "")
    writer.add(once, NOTES)
    writer.add(NOTHING, NOTES)
    for garbage in (
        b"",
        b"\xff",
        b"{}",
        b"[]",
        once[:-1],
        b'{"format":2}',
        b'{"format":1,"base":3}',
    ):
        writer.add(garbage)
    writer.change(State(), State().with_policy(FILMS))
    strange = State(log="another")
    writer.change(strange, strange.with_policy(FILMS))
    refused = {**FILMS.to_json(), "shards_per_node": 0}
    writer.change(writer.state, writer.state.with_policy(FILMS), policy=refused)
    yield "what came another way, twice, for another log, or is no record", writer.records

    writer = founded()
    writer.change(writer.state, writer.state.with_policy(FILMS), **{"x-who": "a remark"})
    yield "a remark", writer.records

    writer = founded()
    writer.snapshot(parts=1)
    writer.change(writer.state, writer.state.without_policy("images"))
    writer.snapshot()
    writer.change(writer.state, writer.state.with_policy(FILMS))
    yield "a snapshot that was not finished, and one that was", writer.records

    for kind in ("proposed", "open", "sealed", "plain", "abort", "override"):
        writer = founded()
        seen = writer.state
        writer.change(seen, seen.without_map("images"), kind=kind)
        writer.change(seen, seen.with_policy(FILMS))
        yield f"a change of the reserved kind {kind}", writer.records

    for name in ("order", "foreign", "queue_type", "consumers"):
        writer = founded()
        policy = {**FILMS.to_json(), name: "any"}
        writer.change(writer.state, writer.state.with_policy(FILMS), policy=policy)
        writer.change(writer.state, writer.state.without_map("images"))
        yield f"a policy with the reserved field {name}", writer.records

    writer = founded()
    writer.add(b'{"format":3}')
    writer.change(writer.state, writer.state.with_policy(FILMS))
    yield "a newer format", writer.records
    writer = Writer()
    writer.add(b'{"base":0,"format":1,"state":{"maps":[],"policies":[]}}', "")
    yield "format 1", writer.records


def all_logs() -> Iterator[tuple[str, list[dict[str, Any]], int]]:
    for name, records in logs():
        yield name, records, 0
    yield from rules()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_PIECE", 600)


if __name__ == "__main__":
    snapshots._PIECE = 600
    cases: list[dict[str, Any]] = [
        {"name": name, "records": records, "first": first} for name, records, first in all_logs()
    ]
    for case in cases:
        case["state"] = as_json(read(case["records"], first=case["first"]))
        case["known_from"] = late_starts(case)
    FILE.write_text(json.dumps({"cases": cases}, indent=1, sort_keys=True) + "\n")
