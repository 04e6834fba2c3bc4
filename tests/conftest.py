"""Clusters that tests share, the broker versions they run on, and what belongs to which run."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from sharding import Topology
from tests.cluster import DEFAULT_VERSION, Cluster, NotOurs, boots, foreign
from tests.cluster.docker import engine_answers
from tests.cluster.pool import Pool
from tests.cluster.secured import Secured
from tests.cluster.sources import choose
from tests.cluster.waiting import PATIENCE
from tests.support import run_report
from tests.support.run_report import POOL, is_worker
from tests.support.scheduling import ByGroup, in_order
from tests.support.sharded import topology_of
from tests.support.spark_home import spark_home

OLDEST_VERSION = "3.10"
KEPT_BY_SPARK = {
    "spark.write.queue_targets": ("_links", "_topologies"),
    "spark.process": ("_environments",),
}

# JVMs of tests live for a minute: compiling for speed would take half of their time on the CPU.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
if "SPARK_HOME" not in os.environ and (home := spark_home()) is not None:
    os.environ["SPARK_HOME"] = str(home)

# A command that a test runs gives up no sooner than the test; see tests/support/patient.py.
os.environ.setdefault("WARREN_ANSWER_TIMEOUT", str(PATIENCE))

# The same examples in every run, however slow the machine: a failure is a change of the code.
settings.register_profile(
    "the same every time",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("the same every time")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--broker-version",
        default=os.environ.get("WARREN_BROKER_VERSION", DEFAULT_VERSION),
        help="the RabbitMQ version that the suite runs on: 3.10, 4.0 or 4.3",
    )
    parser.addoption(
        "--all", action="store_true", help="with the tests that are twins of others (`twin`)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What depends on the broker's version also runs on the oldest one we promise to work with.

    `any_version` does so always. `chosen_version` is for what would need one more cluster for it:
    the second version is a twin there, and runs with `--all`.
    """
    chosen = metafunc.config.getoption("--broker-version")
    both = list(dict.fromkeys([chosen, OLDEST_VERSION]))
    if "any_version" in metafunc.fixturenames:
        metafunc.parametrize("any_version", both, scope="module")
    if "chosen_version" in metafunc.fixturenames:
        versions = both if metafunc.config.getoption("--all") else [chosen]
        metafunc.parametrize("chosen_version", versions, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        chosen = config.getoption("--broker-version")
        twins = [item for item in items if _is_twin(item, chosen)]
        config.hook.pytest_deselected(items=twins)
        items[:] = [item for item in items if item not in twins]
    wants_docker = [item for item in items if item.get_closest_marker("docker")]
    if wants_docker and not engine_answers():
        reason = pytest.mark.skip(reason="no Docker engine answers on this machine")
        for item in wants_docker:
            item.add_marker(reason)


def _is_twin(item: pytest.Item, chosen: str) -> bool:
    """Whether a mark says so: everywhere, or `on` the version that comes second here."""
    call = getattr(item, "callspec", None)
    runs_on = call.params.get("any_version") if call else None
    versions = [mark.kwargs.get("on") for mark in item.iter_markers("twin")]
    return None in versions or (runs_on != chosen and runs_on in versions)


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: no collection of garbage need look at them again."""
    gc.collect()
    gc.freeze()


class _Order:
    """Comes after pytest has put tests together that share a parameter of a module."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        in_order(items, config.stash[POOL])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByGroup:
    return ByGroup(config, log, config.stash[POOL])


def pytest_configure(config: pytest.Config) -> None:
    config.stash[POOL] = Pool.join() if is_worker(config) else Pool.open()
    config.pluginmanager.register(_Order())
    config.pluginmanager.register(run_report)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not is_worker(config):
        config.stash[POOL].close()


def _skip_what_is_not_ours() -> Generator[None, object, object]:
    """A test that would harm brokers which somebody else runs is skipped, and says so."""
    try:
        return (yield)
    except NotOurs as reason:
        pytest.skip(str(reason))


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_skip_what_is_not_ours)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_skip_what_is_not_ours)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a log hold anything: xdist ends the whole run at text that UTF-8 can't express."""
    report = yield
    report.sections = [(name, _printable(text)) for name, text in report.sections]
    if report.longrepr is not None and not isinstance(report.longrepr, tuple):
        text = str(report.longrepr)
        if text != _printable(text):
            report.longrepr = _printable(text)
    return report


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_open() -> Iterator[None]:
    """A socket or file that was not closed is an error of its own module, and not of whichever
    one happens to run when it is collected.

    What Spark's tasks leave would try for ever to reach a virtual host that has gone.
    """
    yield
    for module, names in KEPT_BY_SPARK.items():
        if module in sys.modules:
            for name in names:
                getattr(sys.modules[module], name).close_all()
    gc.collect()


@pytest.fixture(scope="session")
def broker_version(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--broker-version"))


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Pool:
    """The clusters of the run."""
    return request.config.stash[POOL]


def _label(request: pytest.FixtureRequest) -> str:
    """Names who uses a virtual host, in URLs too."""
    return re.sub(r"[^a-z0-9_]+", "-", request.node.name.rpartition("/")[2].lower())[:60]


@pytest.fixture(scope="module")
def cluster(pool: Pool, broker_version: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes of the version that the suite runs on, that nobody may harm."""
    with pool.shared("healthy", broker_version, _label(request)) as running:
        yield running


@pytest.fixture(scope="module")
def topology(cluster: Cluster) -> Iterator[Topology]:
    """With every right and the management API, for what a module does to its own virtual host."""
    with topology_of(cluster) as running:
        yield running


@pytest.fixture(scope="module")
def nodes(pool: Pool, any_version: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes of that version and of the oldest one in turn, that nobody may harm."""
    with pool.shared("healthy", any_version, _label(request)) as running:
        yield running


@pytest.fixture(scope="module")
def with_plugin(
    pool: Pool, chosen_version: str, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """Three nodes with the sharding plugin, that nobody may harm."""
    if choose(chosen_version) == "environment":
        pytest.skip("the brokers named in the environment are not known to have the plugin")
    with pool.shared("plugin", chosen_version, _label(request)) as running:
        yield running


@pytest.fixture
def harmed(pool: Pool, chosen_version: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes that may be killed, frozen, parted, added and removed."""
    with pool.harmed(chosen_version, _label(request)) as running:
        yield running


@pytest.fixture(scope="module")
def secured(
    pool: Pool, chosen_version: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    """A node with TLS, and an authority that it trusts."""
    if choose(chosen_version) in ("docker", "environment"):
        pytest.skip("the broker can't be given the certificates of the test")
    with pool.undivided("secured", chosen_version) as running:
        folder = tmp_path_factory.mktemp("secured")
        yield Secured.of(running, chosen_version, pool.folder, folder)


@pytest.fixture
def boots_clusters() -> Iterator[None]:
    """For tests of clusters themselves, which can't do with those of the pool."""
    if foreign.named():
        raise NotOurs("the brokers named in the environment are used, and no others started")
    with boots.expected():
        yield
