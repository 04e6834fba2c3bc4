"""All policies and maps as a file: nothing is lost on the way, and no log is made of two."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sharding import InvalidInput, Node, Policy, Shard, ShardMap, ShardName, UnsupportedFormat
from sharding.maps import map_log, state_file
from sharding.maps.map_log import MAP, POLICY, Entry, State, changes_between
from sharding.maps.snapshots import MAX_PART


def map_of(logical: str, shards: int = 3) -> ShardMap:
    hosts = [f"rabbit@rmq{number}" for number in range(shards)]
    return ShardMap(
        logical=logical,
        epoch=1,
        shards=tuple(Shard(str(ShardName(logical, host, 0)), host) for host in hosts),
        nodes=tuple(Node(host) for host in hosts),
        policy=Policy.exactly(logical, 1, name=logical),
    )


def state_of(*maps: ShardMap) -> State:
    state = State(log="first")
    for shard_map in maps:
        state = state.with_policy(shard_map.policy).with_map(shard_map).with_map(shard_map)
    return state


def taken_in(text: str, state: State) -> tuple[State, list[bytes]]:
    """The log that has taken a file in, and the records that it took."""
    held = state_file.loads(text.encode())
    records: list[bytes] = []
    while left := state_file.left_to_take_in(state, held):
        after = state_file.with_next(state, left)
        changes = changes_between(state, after)
        records.append(map_log.encode(changes, name=f"r{len(records)}", log=state.log))
        state = map_log.apply(state, map_log.read(records[-1]), len(records)).state
    return state, records


def test_another_log_has_the_same_policies_and_shards() -> None:
    state = state_of(map_of("images"), map_of("invoices", 5)).without_map("invoices")
    state = state.with_policy(Policy("all", "^x", 2, priority=3, queue_arguments={"x-y": 1}))
    again, _ = taken_in(state_file.dumps(state), State())
    assert again.policies == state.policies
    assert again.maps.keys() == {"images"}
    images = again.maps["images"]
    assert (images.epoch, images.log) == (1, again.log)
    assert images.shards == state.maps["images"].shards
    assert [images.shard_of(f"k{n}") for n in range(50)] == [
        state.maps["images"].shard_of(f"k{n}") for n in range(50)
    ]


def test_no_record_is_larger_than_any_store_takes() -> None:
    state = state_of(*(map_of(f"images-{number}", 30) for number in range(60)))
    again, records = taken_in(state_file.dumps(state), State())
    assert len(again.maps) == len(again.policies) == 60
    assert 2 < len(records) < 20
    assert max(map(len, records)) <= MAX_PART


def test_one_map_that_is_larger_than_that_is_taken_in_all_the_same() -> None:
    state = state_of(map_of("images", 2_000))
    again, records = taken_in(state_file.dumps(state), State())
    assert (set(again.maps), len(records)) == ({"images"}, 2)


def test_who_was_interrupted_goes_on() -> None:
    state = state_of(*(map_of(f"images-{number}", 30) for number in range(60)))
    held = state_file.loads(state_file.dumps(state).encode())
    half = state_file.with_next(State(), state_file.left_to_take_in(State(), held))
    again, _ = taken_in(state_file.dumps(state), half)
    assert again.maps.keys() == state.maps.keys()
    assert state_file.left_to_take_in(again, held) == {}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (State().with_policy(Policy("mine", "^x", 1)), Entry(POLICY, "mine")),
        (State().with_map(map_of("images", 2)), Entry(MAP, "images")),
        (State().with_map(map_of("gone")).without_map("gone"), Entry(MAP, "gone")),
    ],
)
def test_a_log_that_holds_something_else_is_refused(other: State, named: Entry) -> None:
    held = state_file.loads(state_file.dumps(state_of(map_of("images"))).encode())
    with pytest.raises(InvalidInput, match=named.name) as refused:
        state_file.left_to_take_in(other, held)
    assert str(named) in str(refused.value)


def test_what_is_not_understood_is_not_exported_by_half() -> None:
    state = state_of(map_of("images"))
    with pytest.raises(UnsupportedFormat, match="would not hold all: why"):
        state_file.dumps(replace(state, frozen={Entry(MAP, "images"): "why"}))
    with pytest.raises(UnsupportedFormat, match="would not hold all: stopped"):
        state_file.dumps(replace(state, stopped="stopped"))


def damaged(**changes: object) -> bytes:
    content = json.loads(state_file.dumps(state_of(map_of("images"))))
    return json.dumps(content | changes).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        damaged(format="1"),
        damaged(policies=None),
        damaged(more=1),
        damaged(maps=2 * json.loads(damaged())["maps"]),
    ],
)
def test_a_file_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidInput):
        state_file.loads(text)


def test_a_newer_file_is_refused() -> None:
    with pytest.raises(UnsupportedFormat):
        state_file.loads(damaged(format=2))
