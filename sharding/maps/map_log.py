"""The rule of the map log: how a list of records becomes one history, the same for every reader.

Policies and shard maps live in a log in the broker. A record holds changes, each of one *entry*
(a policy, or the map of one logical queue), and each cites the revision that its writer saw.
Writers race, and nothing locks them out; the log's own order decides:

* Every entry has a revision: 0 if it never was, one more with each change of it. It goes on
  growing when the entry is gone and made again, so a revision names one value for ever.
* A record counts if every revision that it cites is the current one, and then all of its changes
  take effect; otherwise none does: somebody was faster. Changes of different entries never void
  each other.
* The first record of changes that cites no log *founds* the log: its own name is the identity of
  the log, whatever becomes of its changes. That is judged by its envelope alone, which readers of
  all versions understand alike; by its changes, a reader that does not understand them would find
  another founder. Every later record cites that identity; one that cites another was meant for
  another log and is void, whatever else it says.
* Only what came through the exchange of changes is looked at (`snapshots` sees to it).
* What this format does not allow is void. What this reader does not understand, though others may,
  it does not guess at: from there on it freezes what the record concerns (the entries that it
  names, or all, if that can't be told), goes on with the last values of these, and changes them no
  more. Records that name something frozen freeze all that they name.

What a record does depends on the records before it and on nothing else, so all readers agree. That
holds only while they judge records alike: what format 2 accepts must never change. docs/map-log.md
has all of it, for other languages too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from sharding.errors import InvalidInput, UnsupportedFormat, shown
from sharding.maps.json_fields import INT64, JsonObject, is_text, is_whole, named, parse_strictly
from sharding.maps.policy import Policy
from sharding.maps.shard_map import ShardMap

FORMAT = 2
LOG = "warren.shard-maps"
"""The stream queue, and the exchange through which changes come."""
NOTES = "warren.shard-maps.notes"
"""The exchange for what workers have to note; to write there changes no map."""

POLICY, MAP = "policy", "map"
POLICY_SET, POLICY_CLEARED = "policy-set", "policy-cleared"
MAP_SET, MAP_FORGOTTEN = "map-set", "map-forgotten"
# Each kind of change, what it is a change of, and the field that holds the new value.
_KINDS = {
    POLICY_SET: (POLICY, "policy"),
    POLICY_CLEARED: (POLICY, None),
    MAP_SET: (MAP, "map"),
    MAP_FORGOTTEN: (MAP, None),
}
REMARK = "x-"
"""A field that begins so says nothing that a reader has to know."""

_FIELDS_OF_POLICY = frozenset(each.name for each in fields(Policy))
_FIELDS_OF_MAP = frozenset(
    ("format", "logical", "epoch", "kind", "exchange", "shards", "nodes", "policy")
)
_FIELDS_OF_SHARD = frozenset(("name", "node", "available"))
_FIELDS_OF_NODE = frozenset(("name", "addresses", "reply_token"))

IS_FORMAT_1 = (
    f"the map log is of format 1, which no release ever wrote; delete the queue {LOG!r}, and set "
    "the policies again ('warren policy set')"
)


class Entry(NamedTuple):
    """What a change is a change of: a policy, or the map of a logical queue."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"the {'policy' if self.kind == POLICY else 'map of'} {self.name!r}"


@dataclass(frozen=True)
class State:
    """All that the clients agree on. Do not change the mappings; make a new state."""

    epoch: int = 0
    """How many changes took effect."""
    policies: Mapping[str, Policy] = field(default_factory=dict)
    maps: Mapping[str, ShardMap] = field(default_factory=dict)
    revisions: Mapping[Entry, int] = field(default_factory=dict)
    """Of all that ever was, also of what is gone. That of a map is its epoch."""
    log: str = ""
    """The identity of the log that says so; none before its first record."""
    frozen: Mapping[Entry, str] = field(default_factory=dict)
    """What this reader can't follow any more, and why; its last values stay in force."""
    stopped: str = ""
    """Why it can't follow anything any more."""

    def __post_init__(self) -> None:
        for name, policy in self.policies.items():
            if name != policy.name:
                raise InvalidInput(
                    "state.policies", f"must hold {policy.name!r} under its name", name
                )
        for name, shard_map in self.maps.items():
            if name != shard_map.logical:
                raise InvalidInput(
                    "state.maps", f"must hold {shard_map.logical!r} under its name", name
                )
            if shard_map.epoch > self.epoch:
                raise InvalidInput(
                    "state.maps", f"must be of epoch {self.epoch} or older", shard_map.epoch
                )

    def revision(self, entry: Entry) -> int:
        return self.revisions.get(entry, 0)

    def value(self, entry: Entry) -> Policy | ShardMap | None:
        held: Mapping[str, Mapping[str, Policy | ShardMap]]
        held = {POLICY: self.policies, MAP: self.maps}
        return held.get(entry.kind, {}).get(entry.name)

    def why_frozen(self, entry: Entry) -> str:
        """Why an entry can't be changed by this reader; empty if it can."""
        return self.stopped or self.frozen.get(entry, "")

    def with_policy(self, policy: Policy) -> State:
        """The next state, with this policy set."""
        return self._with(Entry(POLICY, policy.name), policy)

    def without_policy(self, name: str) -> State:
        """The next state, with this policy gone. Maps it made stay: queues are not forgotten."""
        return self._with(Entry(POLICY, name), None)

    def with_map(self, shard_map: ShardMap) -> State:
        """The next state, with this map in force under its next epoch."""
        return self._with(Entry(MAP, shard_map.logical), shard_map)

    def without_map(self, logical: str) -> State:
        """The next state, in which this logical queue is not sharded any more."""
        return self._with(Entry(MAP, logical), None)

    def _with(self, entry: Entry, value: Policy | ShardMap | None) -> State:
        revision = self.revision(entry) + 1
        policies, maps = dict(self.policies), dict(self.maps)
        (policies if entry.kind == POLICY else maps).pop(entry.name, None)
        if isinstance(value, Policy):
            policies[entry.name] = value
        elif value is not None:
            maps[entry.name] = replace(value, epoch=revision, log=self.log)
        return replace(
            self,
            epoch=self.epoch + 1,
            policies=policies,
            maps=maps,
            revisions={**self.revisions, entry: revision},
        )


@dataclass(frozen=True, slots=True)
class Change:
    """One entry's new value, None if it is to be gone, and the revision that its writer saw."""

    entry: Entry
    base: int
    value: Policy | ShardMap | None

    def to_json(self) -> dict[str, Any]:
        kind, name = self.entry
        if self.value is None:
            word = POLICY_CLEARED if kind == POLICY else MAP_FORGOTTEN
            return {"kind": word, "name": name, "base": self.base}
        word = POLICY_SET if kind == POLICY else MAP_SET
        return {"kind": word, "name": name, "base": self.base, kind: self.value.to_json()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reader made of one record: the state after it, and if it was void, why."""

    state: State
    void: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A record's envelope, which is judged before what is in it."""

    name: str
    log: str | None
    start: int
    """Where a reader may start that knows nothing: a snapshot is complete from there on. A hint."""
    changes: tuple[Any, ...] | None
    snapshot: Any
    unknown: str
    """The first field that is not of this format; the record is then not understood."""


def changes_between(before: State, after: State) -> tuple[Change, ...]:
    """What has to be changed so that `before` becomes `after`."""
    names = {Entry(POLICY, name) for name in {*before.policies, *after.policies}}
    names |= {Entry(MAP, name) for name in {*before.maps, *after.maps}}
    changed = (each for each in sorted(names) if before.value(each) != after.value(each))
    found = []
    for entry in changed:
        value, base = after.value(entry), before.revision(entry)
        if isinstance(value, ShardMap):
            value = replace(value, epoch=base + 1)
        found.append(Change(entry, base, value))
    return tuple(found)


def encode(changes: Iterable[Change], *, name: str, log: str, start: int = 0) -> bytes:
    """The record that proposes these changes to a log; to one that is not founded, if `log` is
    empty."""
    return dumps(
        {
            "format": FORMAT,
            "id": name,
            "log": log or None,
            "start": start,
            "changes": [change.to_json() for change in changes],
        }
    )


def dumps(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":"), sort_keys=True).encode()


NOTHING = dumps({"format": FORMAT, "note": "nothing"})
"""What is noted only to be read back."""


def read(body: bytes) -> Record:
    """The envelope of a record. `InvalidInput`: it is none; `UnsupportedFormat`: a newer one."""
    value = parse_strictly(body, "record")
    envelope = JsonObject(value, "record")
    number = envelope.integer("format")
    if number < 1:
        raise InvalidInput("record.format", "must be a whole number from 1", number)
    if number > FORMAT:
        raise UnsupportedFormat(
            f"record.format: this Warren reads format {FORMAT}, found {number}; upgrade "
            "rabbit-warren here"
        )
    if number < FORMAT:
        raise InvalidInput("record.format", f"must be {FORMAT}", number)
    name = short_text("record.id", envelope.text("id"))
    log = envelope.text_or_null("log")
    if log is not None:
        short_text("record.log", log)
    start = whole("record.start", envelope.integer("start"))
    changes = envelope.optional_array("changes")
    snapshot = envelope.optional_mapping("snapshot")
    left = envelope.left()
    if "note" in left:
        raise InvalidInput("record.note", f"must come through {NOTES!r}", left["note"])
    if log is None and snapshot is not None:
        raise InvalidInput("record.log", "must be there in a part of a snapshot", log)
    unknown = unknown_field(left, frozenset(), "record")
    if not unknown and (changes is None) == (snapshot is None):
        raise InvalidInput("record", "must have either changes or a part of a snapshot", value)
    if changes == []:
        raise InvalidInput("record.changes", "must have one at least", changes)
    return Record(name, log, start, None if changes is None else tuple(changes), snapshot, unknown)


def is_format_1(body: bytes) -> bool:
    try:
        value = parse_strictly(body, "record")
    except InvalidInput:
        return False
    return isinstance(value, dict) and value.get("format") == 1 and "base" in value


def apply(state: State, record: Record, offset: int) -> Verdict:
    """Judge the next record of the log that holds changes."""
    if state.stopped:
        return Verdict(state, f"not judged: {state.stopped}")
    if record.log != (state.log or None):
        return Verdict(state, f"cites the log {record.log}, and this is {state.log or 'a new one'}")
    state = replace(state, log=state.log or record.name)
    try:
        return _judge(state, record, offset)
    except InvalidInput as error:
        return Verdict(state, f"not a record: {error}")
    except UnsupportedFormat as error:
        return Verdict(stop(state, offset, str(error)))


def stop(state: State, offset: int, why: str) -> State:
    """The state of a reader that met something which may concern everything."""
    told = f"record {offset} of the map log can't be understood, and nothing is changed any more: "
    return replace(state, stopped=told + why)


def _judge(state: State, record: Record, offset: int) -> Verdict:
    if record.unknown:
        raise UnsupportedFormat(record.unknown)
    claims = [_claim(item, f"record.changes[{n}]") for n, item in enumerate(record.changes or ())]
    entries = [claim.entry for claim in claims]
    if len(set(entries)) < len(entries):
        raise InvalidInput("record.changes", "must be of different entries", entries)
    for claim in claims:
        current = state.revision(claim.entry)
        if claim.base not in (None, current) and claim.entry not in state.frozen:
            cited = f"cites revision {claim.base} of {claim.entry}, but {current} is current"
            return Verdict(state, cited)
    why = next((state.frozen[each] for each in entries if each in state.frozen), "")
    after = state
    for claim in claims:
        try:
            after = after._with(claim.entry, claim.value(state.log))
        except UnsupportedFormat as error:
            why = why or (
                f"record {offset} of the map log can't be understood, and {claim.entry} is "
                f"changed no more: {error}"
            )
    if not why:
        return Verdict(after)
    return Verdict(replace(state, frozen={**state.frozen, **dict.fromkeys(entries, why)}))


@dataclass(frozen=True, slots=True)
class _Claim:
    """One change as it is written: whose it is and what it cites, before its value is looked at."""

    entry: Entry
    base: int | None
    """None of a kind that this reader does not know, which may cite something else."""
    item: JsonObject
    field: str | None
    where: str
    unknown: str

    def value(self, log: str) -> Policy | ShardMap | None:
        if self.unknown:
            raise UnsupportedFormat(self.unknown)
        if self.field is None:
            return None
        content = self.item.mapping(self.field)
        return decode_value(self.entry, (self.base or 0) + 1, content, self.where, log)


def _claim(value: object, where: str) -> _Claim:
    item = JsonObject(value, where)
    kind, name = item.text("kind"), item.text("name")
    if kind not in _KINDS:
        concerned = concerned_by(kind, short_text(where, name))
        return _Claim(concerned, None, item, None, where, unknown_kind(where, kind))
    what, content = _KINDS[kind]
    known = frozenset((content,)) if content else frozenset()
    base = whole(f"{where}.base", item.integer("base"))
    unknown = unknown_field(item.left(), known, where)
    return _Claim(Entry(what, short_text(where, name)), base, item, content, where, unknown)


def concerned_by(kind: str, name: str) -> Entry:
    """What something of a kind is about that this reader does not know."""
    return Entry(POLICY if kind.startswith("policy-") else MAP, name)


def decode_value(
    entry: Entry, revision: int, content: dict[str, Any], where: str, log: str
) -> Policy | ShardMap:
    """A policy or a map as the log holds it. What is unknown is found before what is wrong."""
    kind, name = entry
    where = f"{where}.{kind}"
    found: Policy | ShardMap
    if kind == POLICY:
        _refuse_unknown(content, _FIELDS_OF_POLICY, where)
        found = Policy.from_json(content, where)
        if found.name != name:
            raise InvalidInput(f"{where}.name", f"must be {name!r}", found.name)
        return found
    _refuse_unknown(content, _FIELDS_OF_MAP, where)
    for part, known in (("shards", _FIELDS_OF_SHARD), ("nodes", _FIELDS_OF_NODE)):
        for item in _items(content.get(part)):
            _refuse_unknown(item, known, f"{where}.{part}")
    _refuse_unknown(content.get("policy"), _FIELDS_OF_POLICY, f"{where}.policy")
    found = ShardMap.from_json(content, where)
    if found.logical != name or found.epoch != revision:
        raise InvalidInput(where, f"must be of {name!r} and of epoch {revision}", found)
    return replace(found, log=log)


def unknown_kind(where: str, kind: str) -> str:
    return f"{where}.kind: this Warren does not know {shown(kind)}; upgrade rabbit-warren here"


def unknown_field(value: object, known: frozenset[str], where: str) -> str:
    """What to say of the first field that is neither known nor a remark; empty if there is none."""
    if not isinstance(value, dict):
        return ""
    unknown = sorted(name for name in value if name not in known and not name.startswith(REMARK))
    if not unknown:
        return ""
    return _not_known(where, unknown[0])


def _refuse_unknown(value: object, known: frozenset[str], where: str) -> None:
    if isinstance(value, dict):
        # A remark has its place in records and changes. What is in force has none.
        for name in sorted(value.keys() - known):
            raise UnsupportedFormat(_not_known(where, name))


def _not_known(where: str, name: str) -> str:
    return f"{named(where, name)}: this Warren does not know it; upgrade rabbit-warren here"


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def short_text(where: str, value: str) -> str:
    """A name as AMQP can carry it."""
    if not is_text(value) or not 1 <= len(value.encode()) <= 255:
        raise InvalidInput(where, "must be text of 1 to 255 bytes of UTF-8", value)
    return value


def whole(where: str, value: int) -> int:
    """A number of records or changes."""
    if not is_whole(value) or value < 0 or value not in INT64:
        raise InvalidInput(where, "must be a whole number from 0 that fits in 64 bits", value)
    return value
