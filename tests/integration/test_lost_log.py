"""After the map log was lost: restored from a file, or made again from what is in the broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from interceptors import ShardedPublisher
from sharding import Policy, ShardMap, Topology
from sharding.maps.map_log import LOG
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.integration.test_commands import warren
from tests.support.sharded import fresh_queue, raw_channel, topology_of

pytestmark = pytest.mark.cluster
KEYS = [f"user-{number}" for number in range(100)]


@pytest.fixture
def topology(cluster: Cluster) -> Iterator[Topology]:
    with topology_of(cluster) as running:
        yield running


def shard(topology: Topology, shards: int = 2, **arguments: int) -> ShardMap:
    logical = fresh_queue()
    policy = Policy(logical, f"^{logical}$", shards, queue_arguments=arguments)
    topology.set_policy(policy)
    return topology.ensure(logical).shard_map


def lose_the_log(cluster: Cluster, topology: Topology) -> None:
    with raw_channel(cluster.nodes[0]) as channel:
        channel.queue_delete(LOG)
    wait_until(lambda: not topology.state.maps and not topology.state.policies)


def routes(shard_map: ShardMap | None) -> list[str]:
    assert shard_map is not None
    return [shard_map.shard_of(key).name for key in KEYS]


def test_a_log_is_restored_from_a_file_and_keys_keep_their_shards(
    cluster: Cluster, topology: Topology, tmp_path: Path
) -> None:
    node, file = cluster.nodes[0], tmp_path / "maps.json"
    images, invoices = shard(topology), shard(topology, 1)
    policies = topology.state.policies
    assert warren(node, "maps", "export", str(file))[0] == 0
    lose_the_log(cluster, topology)
    saved = file.read_bytes()
    code, said = warren(node, "maps", "export", str(file))  # what cron does the night after
    assert (code, "left as it is" in said) == (1, True), said
    assert file.read_bytes() == saved
    code, said = warren(node, "maps", "import", str(file))
    assert (code, "in the log" in said) == (0, True), said
    topology.refresh(PATIENCE)
    assert topology.state.policies == policies
    for before in (images, invoices):
        assert routes(topology.shard_map(before.logical)) == routes(before)
    with ShardedPublisher(topology, images.logical, confirm_timeout=PATIENCE) as publisher:
        for key in KEYS:
            publisher.publish(key, b"")
        assert publisher.flush(PATIENCE).stored == len(KEYS)
    code, said = warren(node, "maps", "import", str(file))
    assert (code, "were there already" in said) == (0, True), said
    other = shard(topology, 1).logical
    code, said = warren(node, "maps", "import", str(file))
    assert (code, "must be new" in said, other in said) == (1, True, True), said


def test_maps_are_made_again_from_queues_and_bindings(cluster: Cluster, topology: Topology) -> None:
    node = cluster.nodes[0]
    images, limited = shard(topology), shard(topology, 1, **{"x-max-length": 7})
    gone = shard(topology, 1).logical
    topology.forget(gone)
    with raw_channel(node) as channel:
        channel.exchange_delete(gone)
    lose_the_log(cluster, topology)
    code, said = warren(node, "maps", "rebuild")
    assert (code, "Nothing was written" in said) == (0, True), said
    assert f"{images.logical}: 6 shards on 3 nodes, 2 per node" in said
    assert f"{gone}: left alone, no exchange leads to its shards" in said
    assert not topology.state.maps
    code, said = warren(node, "maps", "rebuild", "--yes")
    assert (code, "Not known any more" in said) == (0, True), said
    topology.refresh(PATIENCE)
    for before in (images, limited):
        assert routes(topology.shard_map(before.logical)) == routes(before)
    found = topology.shard_map(limited.logical)
    assert found is not None
    assert found.policy.queue_arguments == {"x-max-length": 7}
    assert topology.shard_map(gone) is None
    assert "nothing to rebuild" in warren(node, "maps", "rebuild", "--yes")[1]
