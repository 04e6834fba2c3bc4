"""Our wrappers, on a broker without the plugin, show the application what the plugin would.

The script is the same, and so is what it must show: the recording of the real plugin on 4.0, which
`test_plugin_transcript` keeps honest, but for the differences named in `recorded`. A kind of
channel is skipped until its wrapper exists.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.conformance import recorded
from tests.conformance.callers import CALLERS, Wrap
from tests.conformance.script import SCENARIOS
from tests.conformance.stage import Stage, wrapped_stage

pytestmark = pytest.mark.cluster

WRAPPERS = {
    "blocking": "ShardedChannel",
    "async": "AsyncShardedChannel",
    "aio": "AioShardedChannel",
    "robust": "AioShardedChannel",
}


def exported(package: str, name: str) -> Any:
    """A class of ours, or None while it is not written."""
    return getattr(importlib.import_module(package), name, None)


@pytest.fixture(scope="module")
def bare(any_version: str) -> Iterator[Cluster]:
    if not any(exported("interceptors", name) for name in WRAPPERS.values()):
        pytest.skip("interceptors has no wrapper yet")
    if exported("sharding", "Topology") is None:
        pytest.skip("sharding has no Topology yet")
    with Cluster.start(version=any_version) as running:
        yield running


@pytest.fixture(scope="module")
def stages(bare: Cluster) -> dict[str, Stage]:
    """One stage per kind, kept so that its shards are looked up once."""
    return {kind: wrapped_stage(bare, kind, partial(session, bare, kind)) for kind in CALLERS}


@contextmanager
def session(cluster: Cluster, kind: str) -> Iterator[Wrap]:
    """What a process of ours has: a topology of its own, which knows all nodes of the cluster."""
    wrapper = exported("interceptors", WRAPPERS[kind])
    endpoints = [node.endpoint for node in cluster]
    with exported("sharding", "Topology")(
        *(endpoint.amqp_url for endpoint in endpoints),
        management_urls=[endpoint.management.url for endpoint in endpoints],
    ) as topology:
        yield lambda raw: wrapper(raw, topology)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", CALLERS)
def test_wrapper_shows_what_the_plugin_shows(
    stages: dict[str, Stage], kind: str, scenario: str
) -> None:
    if exported("interceptors", WRAPPERS[kind]) is None:
        pytest.skip(f"interceptors has no {WRAPPERS[kind]} yet")
    assert stages[kind].play(SCENARIOS[scenario]) == recorded.wanted(kind, scenario)
