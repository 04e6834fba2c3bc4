"""Which partition of a super stream a key belongs to.

* `by_hash`: murmur3, as the Java, .NET, Go and Rust clients do, so all agree on a key's partition.
* by the broker: the binding whose key is the message's (`Route`); for super streams that were made
  with binding keys.
* any function of the key and the number of partitions.
"""

from __future__ import annotations

from collections.abc import Callable

from sharding.maps.slots import Key, murmur3

PartitionFunction = Callable[[Key, int], int]
"""From a key and the number of partitions to a partition's number, from 0."""


def by_hash(key: Key, partitions: int) -> int:
    """
    >>> by_hash("hello1", 3)
    1
    """
    return murmur3(key) % partitions
