"""The rule of the map log: how a list of records becomes one history, the same for every reader.

Policies and shard maps live in a log in the broker. A record is `{base: n, state: …}`: its writer
saw epoch n and proposes the whole state of epoch n+1. Writers race, and nothing locks them out;
the log's own order decides:

* a reader starts at epoch 0, where nothing is known, with the first record of the log;
* a record whose `base` is the current epoch takes effect, and the epoch grows by one;
* every other record is void: somebody was faster, or it is no record of this format at all.

What a record does depends on the records before it and on nothing else, so all readers agree. That
holds only while they judge records alike: what format 1 accepts must never change, and whoever
needs other fields takes a new format number. A record of a newer format stops this reader with
`UnsupportedFormat`, because guessing at it would part it from the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from sharding.errors import InvalidInput
from sharding.maps.json_fields import JsonObject, check_format, parse
from sharding.maps.policy import Policy
from sharding.maps.shard_map import ShardMap

FORMAT = 1
T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """All that the clients agree on at one epoch. Do not change the mappings; make a new state."""

    epoch: int = 0
    policies: Mapping[str, Policy] = field(default_factory=dict)
    maps: Mapping[str, ShardMap] = field(default_factory=dict)

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

    def with_policy(self, policy: Policy) -> State:
        """The next state, with this policy set."""
        return replace(self, epoch=self.epoch + 1, policies={**self.policies, policy.name: policy})

    def without_policy(self, name: str) -> State:
        """The next state, with this policy gone. Maps it made stay: queues are not forgotten."""
        policies = {key: policy for key, policy in self.policies.items() if key != name}
        return replace(self, epoch=self.epoch + 1, policies=policies)

    def with_map(self, shard_map: ShardMap) -> State:
        """The next state, with this map in force from its epoch on."""
        current = replace(shard_map, epoch=self.epoch + 1)
        maps = {**self.maps, shard_map.logical: current}
        return replace(self, epoch=self.epoch + 1, maps=maps)

    def without_map(self, logical: str) -> State:
        """The next state, in which this logical queue is not sharded any more."""
        maps = {key: shard_map for key, shard_map in self.maps.items() if key != logical}
        return replace(self, epoch=self.epoch + 1, maps=maps)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reader made of one record: the state after it, and if it was void, why."""

    state: State
    void: str | None = None


def encode(state: State) -> bytes:
    """The record that proposes `state` as the successor of the epoch before it."""
    if state.epoch < 1:
        raise InvalidInput("state.epoch", "must be 1 or more to be proposed", state.epoch)
    record = {
        "format": FORMAT,
        "base": state.epoch - 1,
        "state": {
            "policies": [policy.to_json() for policy in state.policies.values()],
            "maps": [shard_map.to_json() for shard_map in state.maps.values()],
        },
    }
    return json.dumps(record, separators=(",", ":"), sort_keys=True).encode()


def apply(state: State, record: bytes) -> Verdict:
    """Judge the next record of the log."""
    try:
        base, proposed = _decode(record)
    except InvalidInput as error:
        return Verdict(state, f"not a record: {error}")
    if base != state.epoch:
        return Verdict(state, f"cites epoch {base}, but {state.epoch} is current")
    return Verdict(proposed)


def _decode(record: bytes) -> tuple[int, State]:
    fields = JsonObject(parse(record, "record"), "record")
    check_format(fields, FORMAT, "record")
    base = fields.integer("base")
    body = JsonObject(fields.mapping("state"), "record.state")
    fields.close()
    policies = [Policy.from_json(item, "record.policies") for item in body.array("policies")]
    maps = [ShardMap.from_json(item, "record.maps") for item in body.array("maps")]
    body.close()
    state = State(
        epoch=base + 1,
        policies=_by_name("record.policies", [(policy.name, policy) for policy in policies]),
        maps=_by_name("record.maps", [(shard_map.logical, shard_map) for shard_map in maps]),
    )
    return base, state


def _by_name(where: str, items: list[tuple[str, T]]) -> dict[str, T]:
    found = dict(items)
    if len(found) != len(items):
        raise InvalidInput(where, "must have different names", [name for name, _ in items])
    return found
