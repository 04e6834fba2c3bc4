"""From a key to the node that holds its shard: Warren's routing core."""

from sharding.cluster.topology import Topology, TopologyOptions
from sharding.errors import (
    InvalidInput,
    LocalError,
    MissingRight,
    OutcomeUnknown,
    RemoteError,
    ShardUnavailable,
    StaleMap,
    TryLater,
    Unreachable,
    UnsupportedFormat,
    WarrenError,
    is_retryable,
)
from sharding.maps.differences import difference
from sharding.maps.naming import ShardName
from sharding.maps.policy import OnUnavailable, Policy, policy_for
from sharding.maps.shard_map import Address, Node, Route, Shard, ShardKind, ShardMap
from sharding.maps.slots import QUEUE_SLOTS, Key, SlotTable, murmur3

__version__ = "0.1.0"

__all__ = [
    "QUEUE_SLOTS",
    "Address",
    "InvalidInput",
    "Key",
    "LocalError",
    "MissingRight",
    "Node",
    "OnUnavailable",
    "OutcomeUnknown",
    "Policy",
    "RemoteError",
    "Route",
    "Shard",
    "ShardKind",
    "ShardMap",
    "ShardName",
    "ShardUnavailable",
    "SlotTable",
    "StaleMap",
    "Topology",
    "TopologyOptions",
    "TryLater",
    "Unreachable",
    "UnsupportedFormat",
    "WarrenError",
    "difference",
    "is_retryable",
    "murmur3",
    "policy_for",
]
