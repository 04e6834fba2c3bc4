"""All policies and maps as a file, and how a file comes into a log.

A file says what was in force, not how it came to be: revisions, and with them the epochs of maps,
begin anew in the log that takes it in. Keys keep their shards, as a slot's owner depends on the
names of the shards and on nothing else.

It is taken in by several records, none larger than any store takes. Who was interrupted takes it in
again: what is there already and is the same is passed over, anything else is refused. So a log is
never made of two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sharding.errors import InvalidInput, UnsupportedFormat
from sharding.maps.json_fields import JsonObject, check_format, parse_strictly
from sharding.maps.map_log import MAP, POLICY, Entry, State
from sharding.maps.policy import Policy
from sharding.maps.shard_map import ShardMap

FORMAT = 1
MOST_BYTES = 80_000
"""Of the changes of one record, so that the whole stays under 100 kB."""


@dataclass(frozen=True, slots=True)
class StateFile:
    policies: Mapping[str, Policy] = field(default_factory=dict)
    maps: Mapping[str, ShardMap] = field(default_factory=dict)

    def entries(self) -> dict[Entry, Policy | ShardMap]:
        """Policies first: a map without the policy that made it could not be kept in step."""
        found: dict[Entry, Policy | ShardMap] = {
            Entry(POLICY, name): self.policies[name] for name in sorted(self.policies)
        }
        found |= {Entry(MAP, name): self.maps[name] for name in sorted(self.maps)}
        return found


def dumps(state: State) -> str:
    """The text of a file; `UnsupportedFormat` where this reader does not know all that it holds."""
    if why := state.stopped or next(iter(state.frozen.values()), ""):
        raise UnsupportedFormat(f"a file would not hold all: {why}")
    content = {
        "format": FORMAT,
        "policies": [state.policies[name].to_json() for name in sorted(state.policies)],
        "maps": [state.maps[name].to_json() for name in sorted(state.maps)],
    }
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def loads(text: bytes) -> StateFile:
    fields = JsonObject(parse_strictly(text, "file"), "file")
    check_format(fields, FORMAT, "file")
    policies = [Policy.from_json(each, "file.policies") for each in fields.array("policies")]
    maps = [ShardMap.from_json(each, "file.maps") for each in fields.array("maps")]
    fields.close()
    held = StateFile({each.name: each for each in policies}, {each.logical: each for each in maps})
    if len(held.policies) < len(policies) or len(held.maps) < len(maps):
        raise InvalidInput("file", "must hold each policy and each map once", len(held.entries()))
    return held


def left_to_take_in(state: State, wanted: StateFile) -> dict[Entry, Policy | ShardMap]:
    """What of a file the log has not yet; `InvalidInput` if it has something else."""
    entries = wanted.entries()
    for entry in sorted(state.revisions):
        if entry not in entries or not _is_same(state.value(entry), entries[entry]):
            raise InvalidInput(
                "map log", "must be new, or hold nothing but what the file holds", str(entry)
            )
    return {entry: value for entry, value in entries.items() if entry not in state.revisions}


def with_next(state: State, left: Mapping[Entry, Policy | ShardMap]) -> State:
    """The state with as much of what is left as one record takes, one entry at least."""
    size = 0
    for count, value in enumerate(left.values()):
        size += len(json.dumps(value.to_json()))
        if count and size > MOST_BYTES:
            break
        state = state.with_policy(value) if isinstance(value, Policy) else state.with_map(value)
    return state


def _is_same(held: Policy | ShardMap | None, wanted: Policy | ShardMap) -> bool:
    if isinstance(held, ShardMap) and isinstance(wanted, ShardMap):
        return replace(held, epoch=wanted.epoch, log=wanted.log) == wanted
    return held == wanted
