"""From a key to the node that holds its shard: Warren's routing core."""

from sharding.errors import (
    InvalidInput,
    LocalError,
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
from sharding.hashing import Key, murmur3
from sharding.map_difference import difference
from sharding.naming import ShardName
from sharding.policy import OnUnavailable, Policy, policy_for
from sharding.shard_map import (
    Address,
    Node,
    Route,
    Shard,
    ShardKind,
    ShardMap,
)
from sharding.slots import QUEUE_SLOTS, SlotTable
from sharding.topology import Topology, TopologyOptions

__version__ = "0.1.0"

__all__ = [
    "QUEUE_SLOTS",
    "Address",
    "InvalidInput",
    "Key",
    "LocalError",
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
