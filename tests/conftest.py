"""Clusters that tests share, and the broker versions they run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack

import pytest

from tests.cluster import DEFAULT_VERSION, Cluster, NotOurs
from tests.cluster.docker import engine_answers

OLDEST_VERSION = "3.10"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--broker-version",
        default=os.environ.get("WARREN_BROKER_VERSION", DEFAULT_VERSION),
        help="the RabbitMQ version that the suite runs on: 3.10, 4.0 or 4.3",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What depends on the broker's version also runs on the oldest one we promise to work with."""
    if "any_version" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--broker-version")
        versions = dict.fromkeys([chosen, OLDEST_VERSION])
        metafunc.parametrize("any_version", list(versions), scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wants_docker = [item for item in items if item.get_closest_marker("docker")]
    if wants_docker and not engine_answers():
        reason = pytest.mark.skip(reason="no Docker engine answers on this machine")
        for item in wants_docker:
            item.add_marker(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A test that would harm brokers which somebody else runs is skipped, and says so."""
    try:
        return (yield)
    except NotOurs as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def broker_version(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--broker-version"))


@pytest.fixture(scope="session")
def shared_clusters() -> Iterator[Callable[[str], Cluster]]:
    """Three nodes of a version, started once: every test may use them and none may harm them."""
    running: dict[str, Cluster] = {}
    with ExitStack() as stack:

        def of_version(version: str) -> Cluster:
            if version not in running:
                running[version] = stack.enter_context(Cluster.start(version=version))
            return running[version]

        yield of_version


@pytest.fixture(scope="session")
def cluster(shared_clusters: Callable[[str], Cluster], broker_version: str) -> Cluster:
    """Three nodes of the version that the suite runs on, shared by all."""
    return shared_clusters(broker_version)


@pytest.fixture(scope="module")
def nodes(shared_clusters: Callable[[str], Cluster], any_version: str) -> Cluster:
    """Three nodes of that version and of the oldest one in turn, shared by all."""
    return shared_clusters(any_version)
