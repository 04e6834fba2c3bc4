"""Our wrappers, on a broker without the plugin, show the application what the plugin would.

The script is the same, and so is what it must show: the recording of the real plugin on 4.0, which
`test_plugin_transcript` keeps honest, but for the differences named in `recorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from interceptors import AioShardedChannel, AsyncShardedChannel, ShardedChannel
from sharding import Topology
from tests.cluster import Cluster
from tests.conformance import recorded
from tests.conformance.callers import CALLERS, Wrap
from tests.conformance.script import SCENARIOS
from tests.conformance.stage import Stage, wrapped_stage
from tests.support.sharded import topology_of

pytestmark = pytest.mark.cluster

WRAPPERS: dict[str, Callable[[Any, Topology], Any]] = {
    "blocking": ShardedChannel,
    "async": AsyncShardedChannel,
    "aio": AioShardedChannel,
    "robust": AioShardedChannel,
}


@pytest.fixture(scope="module")
def stages(nodes: Cluster) -> dict[str, Stage]:
    """One stage per kind, kept so that its shards are looked up once."""
    return {kind: wrapped_stage(nodes, kind, partial(session, nodes, kind)) for kind in CALLERS}


@contextmanager
def session(cluster: Cluster, kind: str) -> Iterator[Wrap]:
    """What a process of ours has: a topology of its own, which knows all nodes of the cluster."""
    with topology_of(cluster) as topology:
        yield lambda raw: WRAPPERS[kind](raw, topology)


# On the older broker a channel of pika and one of aio-pika stay: what differs there is the broker,
# and what differs between the channels of a client is seen on the newer one.
on_the_newer = pytest.mark.twin(
    "conformance/test_conformance.py::test_wrapper_shows_what_the_plugin_shows", on="3.10"
)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[on_the_newer] if kind in ("async", "aio") else [])
        for kind in CALLERS
    ],
)
def test_wrapper_shows_what_the_plugin_shows(
    stages: dict[str, Stage], kind: str, scenario: str
) -> None:
    assert stages[kind].play(SCENARIOS[scenario]) == recorded.wanted(kind, scenario)
