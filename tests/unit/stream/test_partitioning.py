"""Keys go to the partitions where every other stream client puts them."""

from __future__ import annotations

import json
from pathlib import Path

from sharding.stream.producer.partitioning import by_hash

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "murmur3.json").read_text())


def test_published_vectors_hold() -> None:
    for key, partition in VECTORS["partition_of_3"].items():
        assert by_hash(key, 3) == by_hash(key.encode(), 3) == partition
