"""Any policy and any map is the same after it was written and read."""

from __future__ import annotations

import json
import pickle

from hypothesis import given, settings

from sharding import Policy, ShardMap, difference
from tests.property.strategies import policies, shard_maps
from tests.support.maps import owner_names


@given(policies)
def test_a_policy_is_the_same_after_writing_and_reading(policy: Policy) -> None:
    for copy in (
        Policy.from_json(json.loads(json.dumps(policy.to_json()))),
        pickle.loads(pickle.dumps(policy)),
    ):
        assert copy == policy
        assert hash(copy) == hash(policy)
        assert repr(copy) == repr(policy)  # 1, 1.0 and True are equal but not the same argument


@settings(max_examples=40)
@given(shard_maps())
def test_a_map_is_the_same_after_writing_and_reading(shard_map: ShardMap) -> None:
    for copy in (
        ShardMap.loads(shard_map.dumps()),
        ShardMap.loads(shard_map.dumps().encode()),
        pickle.loads(pickle.dumps(shard_map)),
    ):
        assert copy == shard_map
        assert hash(copy) == hash(shard_map)
        assert copy.dumps() == shard_map.dumps()
    assert owner_names(copy) == owner_names(shard_map)
    assert difference(shard_map, copy) == []
