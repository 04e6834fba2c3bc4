"""Clusters that all tests of a run share, by what is asked of them.

Booting is what costs most in a run, so there is one cluster of each kind and version. It is booted
by the first test that asks, used by the processes of the run side by side, and ends with the run.
What keeps tests out of each other's way:

* Each module has a virtual host of its own (`Pool.shared`): maps, policies, queues and streams
  are kept for each virtual host.
* Tests that harm nodes take one cluster in turn (`Pool.harmed`). It must be proved healthy
  afterwards; one that is not is discarded, and the next test boots another.

The process that opens the pool owns the clusters: when it is dead, the next start of any cluster
takes them down.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster import boots, folders, foreign, processes, secured
from tests.cluster.cluster import Cluster
from tests.cluster.health import prove_health
from tests.cluster.nodes import NotOurs
from tests.support.priority import first_in_line

VARIABLE = "WARREN_POOL"
"""Names the pool of a run to its processes."""


@dataclass(frozen=True)
class Kind:
    """What the clusters of a kind have that others have not."""

    nodes: int = 3
    plugins: tuple[str, ...] = ()
    extra_ports: tuple[str, ...] = ()
    config: Callable[[Path, str], str] = lambda _folder, _version: ""
    """The configuration, for a version; it may put files for the brokers into the folder."""


KINDS = {
    "healthy": Kind(),
    "harmed": Kind(),
    "plugin": Kind(plugins=("rabbitmq_sharding",)),
    "secured": Kind(
        nodes=1,
        plugins=("rabbitmq_auth_mechanism_ssl",),
        extra_ports=("stream_tls",),
        config=secured.configuration,
    ),
    # It advertises a name that nobody knows.
    "lonely": Kind(nodes=1, config=lambda *_: "stream.advertised_host = nowhere.invalid"),
}


@dataclass(frozen=True)
class Discarded:
    """A cluster that could not be healed, and the test that left it so."""

    cluster: str
    test: str
    reason: str


class Pool:
    """Opened by the process that a run begins with, joined by its others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_use: list[Cluster] = []
        """The clusters that this process uses now: those whose logs explain a failure."""
        self.failed: list[Cluster] = []
        """Those that could not be made ready, or whole again: their logs explain that."""

    @classmethod
    def open(cls) -> Pool:
        _remove_abandoned()
        pid, since = processes.identity()
        pool = cls(f"pool-{pid}-{since}")
        pool.folder.mkdir()
        os.environ[VARIABLE] = pool.name
        os.environ[boots.VARIABLE] = str(pool.folder / "boots")
        return pool

    @classmethod
    def join(cls) -> Pool:
        return cls(os.environ[VARIABLE])

    @property
    def folder(self) -> Path:
        """Files that outlive a process of the run and end with it; brokers see them."""
        return folders.clusters_folder() / f".{self.name}"

    def close(self) -> None:
        """End all clusters of the run."""
        for name in folders.names():
            if name.startswith(f"{self.name}-"):
                _stop(name)
        shutil.rmtree(self.folder, ignore_errors=True)
        del os.environ[VARIABLE], os.environ[boots.VARIABLE]

    @contextmanager
    def shared(self, kind: str, version: str, label: str) -> Iterator[Cluster]:
        """A virtual host on a cluster that nobody harms; `label` becomes part of its name."""
        with self._used(self._cluster(kind, version)) as cluster:
            view = cluster.new_vhost(label)
            try:
                yield view
            finally:
                cluster.delete_vhost(view.vhost)

    @contextmanager
    def harmed(self, version: str, label: str) -> Iterator[Cluster]:
        """A virtual host on the cluster whose nodes may be harmed, for one test at a time."""
        with (
            folders.locked(f"harm-{version}", self.folder),
            first_in_line(),
            self._used(self._cluster("harmed", version)) as cluster,
        ):
            try:
                view = cluster.new_vhost(label)
            except BaseException as problem:
                self._discard(cluster, label, problem)
                raise
            try:
                yield view
            finally:
                if cluster.source == "environment":  # it is not ours to heal
                    cluster.delete_vhost(view.vhost)
                else:
                    self._heal_or_discard(view, label)

    @contextmanager
    def undivided(self, kind: str, version: str) -> Iterator[Cluster]:
        """A cluster as a whole, for tests that need none of their own virtual host."""
        with self._used(self._cluster(kind, version)) as cluster:
            yield cluster

    def _cluster(self, kind: str, version: str) -> Cluster:
        """Booted if this is the first time that somebody asks."""
        if kind == "lonely" and foreign.named():
            raise NotOurs("the brokers named in the environment advertise what they do")
        name = f"{self.name}-{kind}-{version}"
        with folders.locked(name, self.folder):
            if name in folders.names():
                return Cluster.attach(name)
            wanted = KINDS[kind]
            with boots.expected():
                booted = Cluster.start(
                    name,
                    nodes=wanted.nodes,
                    version=version,
                    plugins=wanted.plugins,
                    extra_ports=wanted.extra_ports,
                    config=wanted.config(self.folder, version),
                    one_core_each=True,
                    owner=_owner(self.name),
                )
            if kind == "harmed" and booted.source != "environment":
                prove_health(booted)  # before it is harmed for the first time
            return booted

    def discarded(self) -> list[Discarded]:
        if not self._discarded.exists():
            return []
        return [Discarded(**json.loads(line)) for line in self._discarded.read_text().splitlines()]

    @property
    def _discarded(self) -> Path:
        return self.folder / "discarded"

    @contextmanager
    def _used(self, cluster: Cluster) -> Iterator[Cluster]:
        self.in_use.append(cluster)
        try:
            yield cluster
        except BaseException:  # of a fixture: what a test raises does not come here
            self.failed.append(cluster)
            raise
        finally:
            self.in_use.remove(cluster)

    def _heal_or_discard(self, view: Cluster, test: str) -> None:
        try:
            healed = _made_whole(view.name)
            healed.delete_vhost(view.vhost)
            prove_health(healed)
        except BaseException as problem:  # an end by pytest-timeout too: it was not proved
            self._discard(view, test, problem)
            if not isinstance(problem, Exception):
                raise

    def _discard(self, cluster: Cluster, test: str, problem: BaseException) -> None:
        if cluster.source == "environment":  # somebody else's
            return
        note = Discarded(cluster.name, test, str(problem))
        with self._discarded.open("a") as file:
            file.write(json.dumps(asdict(note)) + "\n")
        _stop(cluster.name)


def _made_whole(name: str) -> Cluster:
    """All nodes up, as many as at first."""
    cluster = Cluster.attach(name)
    for node in cluster:
        node.thaw()
        if not node.driver.running():
            node.driver.start()
    cluster.wait_until_whole()
    for surplus in cluster.nodes[KINDS["harmed"].nodes :]:
        cluster.remove_node(surplus)
    while len(cluster.nodes) < KINDS["harmed"].nodes:
        cluster.add_node()
    return cluster


def _stop(name: str) -> None:
    try:
        Cluster.attach(name).stop()
    except (FileNotFoundError, TypeError, ValueError):
        folders.remove(name)  # its record was never finished


def _owner(pool: str) -> list[int]:
    _, pid, since = pool.lstrip(".").split("-")
    return [int(pid), int(since)]


def _remove_abandoned() -> None:
    for folder in folders.clusters_folder().glob(".pool-*"):
        if not processes.alive(*_owner(folder.name)):
            shutil.rmtree(folder, ignore_errors=True)
