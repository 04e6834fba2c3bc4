"""The Python examples of the operations guide run, on a real cluster."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from interceptors import ShardedChannel
from sharding import InvalidInput, Policy, ShardMap, ShardUnavailable
from sharding.stream import StreamEnvironment
from tests.cluster import Cluster
from tests.machine import PROJECT
from tests.support.sharded import connection_to, fresh_queue, topology_of

pytestmark = pytest.mark.cluster

PAGE = (PROJECT / "docs" / "operations.md").read_text()


def example(mark: str) -> str:
    """The one example in which `mark` stands."""
    (found,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if mark in block
    )
    return str(found)


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "docs/operations.md", "exec"), names)
    return names


def test_every_example_is_run_here() -> None:
    marks = ("create_stream(", "def publish_surely", ".map.json")
    assert {example(mark) for mark in marks} == set(re.findall(r"```python\n(.*?)```", PAGE, re.S))


def test_stream_is_made_as_the_guide_sizes_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, stream = cluster.nodes[0], fresh_queue()
    monkeypatch.setenv("WARREN_STREAM_URL", node.endpoint.stream_url)
    run(example("create_stream(").replace('"invoices"', f'"{stream}"'))
    made = node.management.get("queues", node.endpoint.vhost, stream)["arguments"]
    assert made["x-max-age"] == "604800s"
    assert made["x-max-length-bytes"] == 20_000_000_000
    assert made["x-stream-max-segment-size-bytes"] == 100_000_000
    with StreamEnvironment(node.endpoint.stream_url) as environment:
        environment.delete_stream(stream)


def test_publishing_waits_for_a_shard_that_is_away_and_for_nothing_else(cluster: Cluster) -> None:
    publish_surely = run(example("def publish_surely"))["publish_surely"]
    node, logical = cluster.nodes[0], fresh_queue()
    with topology_of(cluster) as topology, connection_to(node) as connection:
        topology.set_policy(Policy.exactly(logical, 1, name=logical))
        shard = topology.ensure(logical).shard_map.shard_of("user-42").name
        connection.channel().queue_delete(shard)
        channel = ShardedChannel(connection.channel(), topology)
        channel.confirm_delivery()
        with pytest.raises(ShardUnavailable):
            publish_surely(channel, logical, "user-42", b"picture", patience=0)

        mending = threading.Timer(1, topology.ensure, [logical])
        mending.start()
        publish_surely(channel, logical, "user-42", b"picture")
        mending.join()
        found = topology.look_at([shard])[shard]
        assert found is not None
        assert found.messages == 1

        with pytest.raises(InvalidInput):  # at once: this test has no minute to wait
            publish_surely(channel, logical, shard, b"a shard's name as key", patience=3600)


def test_maps_are_kept_and_read_back(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logical = fresh_queue()
    with topology_of(cluster) as topology:
        topology.set_policy(Policy.exactly(logical, 1, name=logical))
        shard_map = topology.ensure(logical).shard_map
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WARREN_URL", cluster.nodes[0].endpoint.amqp_url)
    run(example(".map.json"))
    assert ShardMap.loads((tmp_path / f"{logical}.map.json").read_text()) == shard_map
