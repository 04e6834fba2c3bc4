"""A real RabbitMQ cluster on this machine: started, harmed, healed and removed.

    with Cluster.start("mine", nodes=3) as cluster:
        cluster.nodes[1].kill()
        …

What is the same for every kind of node is here; what differs is in the drivers (`native`, `docker`,
`foreign`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sharding.cluster.management import Management, NoAnswer
from tests.cluster import boots, docker, folders, foreign, native, processes, sources
from tests.cluster.haproxy import Balancer
from tests.cluster.nodes import LISTENERS, Driver, Endpoint, NotOurs, serves
from tests.cluster.waiting import wait_until

PLUGINS = ("rabbitmq_management", "rabbitmq_stream", "rabbitmq_stream_management")
BOOT_TIMEOUT = 240.0

Progress = Callable[[str], None]


def silent(_: str) -> None:
    pass


@dataclass(frozen=True)
class Node:
    """One node: where it is, and what can be done to it."""

    endpoint: Endpoint
    driver: Driver
    cluster: Cluster = field(repr=False)

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def management(self) -> Management:
        return self.endpoint.management

    def kill(self) -> None:
        """Kill -9."""
        self.driver.kill()

    def stop(self) -> None:
        """Stop it in order, with its data kept."""
        self.driver.stop()

    def freeze(self) -> None:
        """Let it hang: its connections stay open, nothing answers."""
        self.driver.freeze()

    def thaw(self) -> None:
        self.driver.thaw()

    def restart(self) -> None:
        """Start it again with its data, and wait until the cluster agrees that it is back."""
        if self.driver.running():
            self.driver.stop()
        self.driver.start()
        self.cluster.wait_until_whole()

    def cut_off(self) -> None:
        """Part it from the other nodes. Its clients still reach it; its peers do not.

        The node refuses its peers' cookie, so that no Erlang connection between them can be made:
        to the brokers that is a network partition. It needs no right over the machine's network
        and leaves nothing behind there.
        """
        self._tell_about_peers("erlang:set_cookie(Peer, cut_off), erlang:disconnect_node(Peer)")
        others = [node for node in self.cluster.running_nodes() if node != self]

        def both_sides_noticed() -> bool:
            there = [members_seen(other.management) for other in others]
            here = members_seen(self.management)  # it may be silent: it pauses
            return not here & {other.name for other in others} and all(
                seen and self.name not in seen for seen in there
            )

        wait_until(
            both_sides_noticed, 60, lambda: f"{self.name} and the others still see each other"
        )

    def heal(self) -> None:
        """End a cut, and wait until the cluster agrees on its members again."""
        self._tell_about_peers("erlang:set_cookie(Peer, erlang:get_cookie()), net_adm:ping(Peer)")
        self.cluster.wait_until_whole()

    def _tell_about_peers(self, action: str) -> None:
        peers = ",".join(f"'{node.name}'" for node in self.cluster.nodes if node != self)
        self.driver.ctl("eval", f"lists:foreach(fun(Peer) -> {action} end, [{peers}]).")


class Cluster:
    """Several nodes that know each other. Ends with the `with` block it is started in.

    `vhost` is the virtual host that the nodes' URLs name.
    """

    def __init__(
        self, name: str, source: str, record: folders.Record | None, vhost: str = "/"
    ) -> None:
        self.name = name
        self.source = source
        self.vhost = vhost
        self._record = record
        self._expected: set[str] = set()
        endpoints = _endpoints(record)
        self.nodes: list[Node] = [self._node(endpoint) for endpoint in endpoints]
        self._expected = {node.name for node in self.nodes}

    @classmethod
    def start(
        cls,
        name: str | None = None,
        *,
        nodes: int = 3,
        version: str = sources.DEFAULT_VERSION,
        plugins: Sequence[str] = (),
        config: str = "",
        extra_ports: Sequence[str] = (),
        one_core_each: bool = False,
        keep: bool = False,
        owner: list[int] | None = None,
        progress: Progress = silent,
    ) -> Cluster:
        """Start a cluster and wait until it is whole.

        `plugins` come on top of management and streams. `config` is added to each rabbitmq.conf;
        `$address` and `$<port>` stand for the node's own, for each name in `extra_ports` too.
        With `one_core_each` a node runs on one core of the machine only: on few cores it boots for
        60 % of the work, as its threads wake each other across no core (measured); what it can do
        at its fastest is less then, so benchmarks do not ask for it.
        It ends with the process that `owner` names, else with this one; with `keep` it outlives
        both, until it is stopped by name.
        """
        began = time.monotonic()
        source = sources.choose(version)
        if source == "environment":
            return cls("environment", source, None)
        installation = None if source == "docker" else sources.installation(source, version)
        name = name or f"run-{secrets.token_hex(4)}"
        # The record must not take over what another cluster of this name left in the engine.
        if source == "docker":
            docker.remove_cluster(name)
        record = folders.reserve(
            name,
            lambda block: folders.Record(
                name=name,
                version=installation.version if installation else version,
                source=source,
                block=block,
                owner=None if keep else owner or processes.identity(),
                plugins=[*PLUGINS, *plugins],
                config=config,
                extra_ports=list(extra_ports),
                one_core_each=one_core_each,
            ),
        )
        for _ in range(nodes):
            record.nodes.append(_new_endpoint(record).to_json())
        record.save()
        cluster = cls(name, source, record)
        try:
            if installation is not None:
                native.start_epmd(record, installation)
            for node in cluster.nodes:
                node.driver.start()
            cluster.wait_until_whole(progress=progress)
        except BaseException:
            cluster.stop()
            raise
        finally:
            boots.note(name, nodes, record.version, time.monotonic() - began)
        return cluster

    @classmethod
    def attach(cls, name: str, vhost: str = "/") -> Cluster:
        """A cluster that is running already."""
        record = folders.Record.load(name)
        return cls(name, record.source, record, vhost)

    def new_vhost(self, label: str) -> Cluster:
        """The same nodes with a new virtual host, whose name begins with `label`.

        Shard maps, policies, queues and streams are kept for each virtual host, so tests that
        have one each can share a cluster.
        """
        vhost = f"{label}-{secrets.token_hex(3)}"
        management = self.nodes[0].management
        management.call("PUT", "vhosts", vhost, body={}, timeout=60)
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        management.call("PUT", "permissions", vhost, management.user, body=everything, timeout=60)
        view = Cluster(self.name, self.source, self._record, vhost)
        wait_until(
            lambda: all(_serves_vhost(node.management, vhost, self._expected) for node in view),
            60,
            lambda: f"virtual host {vhost} does not run on every node of {self.name}",
        )
        return view

    def delete_vhost(self, vhost: str) -> None:
        try:
            self.a_running_node().management.call("DELETE", "vhosts", vhost)
        except NoAnswer as late:
            if late.in_time:
                raise
            wait_until(lambda: vhost not in _vhosts(self.a_running_node().management))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __repr__(self) -> str:
        return f"<Cluster {self.name}: {len(self.nodes)} nodes, from {self.source}>"

    def stop(self) -> None:
        """End every process and delete every folder of the cluster."""
        if self._record is None:
            return
        if self.source == "docker":
            docker.remove_cluster(self.name)
        folders.remove(self.name)

    @property
    def version(self) -> str:
        """The RabbitMQ version that a running node reports."""
        return str(self.a_running_node().management.get("overview")["rabbitmq_version"])

    def a_running_node(self) -> Node:
        """The first one that answers; if none does for the moment, it is waited for."""
        answering = wait_until(
            lambda: next((node for node in self.nodes if serves(node.endpoint)), None),
            explain=lambda: f"no node of {self} answers",
        )
        assert answering is not None
        return answering

    def running_nodes(self) -> list[Node]:
        """Those that answer soon: one that is held up is left out, too."""
        return [node for node in self.nodes if serves(node.endpoint)]

    def add_node(self) -> Node:
        """Add a node to the running cluster and wait until all agree that it is a member."""
        record = self._ours()
        endpoint = _new_endpoint(record)
        record.nodes.append(endpoint.to_json())
        record.save()
        node = self._node(endpoint)
        node.driver.start()
        self.nodes.append(node)
        self._expected.add(node.name)
        self.wait_until_whole()
        return node

    def remove_node(self, node: Node) -> None:
        """Make a node leave for good: stopped, forgotten by the others, its data deleted."""
        record = self._ours()
        node.driver.stop()
        self.nodes.remove(node)
        self._expected.discard(node.name)
        self.nodes[0].driver.ctl("forget_cluster_node", node.name)
        node.driver.remove()
        record.nodes[:] = [entry for entry in record.nodes if entry["name"] != node.name]
        record.save()
        self.wait_until_whole()

    def balancer(self, nodes: Sequence[Node] | None = None) -> Balancer:
        """HAProxy in front of these nodes, or of all of them. Stops with the cluster."""
        record = self._ours()
        # Several processes may use the cluster, and a port is taken only when it is listened on.
        folder = folders.cluster_folder(self.name)
        with folders.locked("balancers", folder):
            number = next(n for n in range(50) if not (folder / f"haproxy-{n}").exists())
            return Balancer.start(
                folder / f"haproxy-{number}",
                f"127.0.{record.block}.{200 + number}",
                native.free_ports(record, len(LISTENERS)),
                [node.endpoint for node in nodes or self.nodes],
            )

    def wait_until_whole(self, timeout: float = BOOT_TIMEOUT, progress: Progress = silent) -> None:
        """Wait until every node runs, all listeners answer, and all agree on the members."""
        began, looked = time.monotonic(), 0.0
        while unready := self._unready():
            waited = time.monotonic() - began
            ready = len(self.nodes) - len(unready)
            progress(f"{self.name}: {ready} of {len(self.nodes)} nodes ready after {waited:.0f} s")
            dead: list[Node] = []
            if waited > looked + 1:  # not each time: all processes of the machine are looked at
                looked = waited
                dead = [node for node in unready if not node.driver.running()]
            if dead or waited > timeout:
                node = (dead or unready)[0]
                reason = "has ended" if dead else f"is not ready after {timeout:g} s"
                raise RuntimeError(f"{node.name} {reason}:\n{node.driver.last_words()}")
            time.sleep(0.2)
        progress(f"{self.name}: all {len(self.nodes)} nodes ready")

    def _unready(self) -> list[Node]:
        """Those that do not serve yet; where all do, those that do not agree with the others.

        While a node boots, the others are left alone: what they are asked takes the work of all.
        """
        return (
            # A virtual host that is made before is not made on this node, and 3.10 says so after
            # a minute: 500 timeout.
            [node for node in self.nodes if not node.driver.has_booted()]
            or [node for node in self.nodes if not serves(node.endpoint)]
            or [node for node in self.nodes if not self._agrees(node)]
        )

    def _agrees(self, node: Node) -> bool:
        """Whether it sees all members and no others."""
        members = _members(node.management)
        running = {member["name"] for member in members if member.get("running")}
        parted = any(member.get("partitions") for member in members)
        return (
            running == self._expected and not parted and _listed(node.management) >= self._expected
        )

    def _node(self, endpoint: Endpoint) -> Node:
        there = replace(endpoint, vhost=self.vhost)
        return Node(there, _driver(self._record, endpoint), self)

    def _ours(self) -> folders.Record:
        if self._record is None:
            raise NotOurs("the cluster is named in the environment; Warren only uses it")
        return self._record


def members_seen(management: Management) -> set[str]:
    """The running members as one node sees them; empty if it does not answer."""
    return {node["name"] for node in _members(management) if node.get("running")}


def _members(management: Management) -> list[dict[str, Any]]:
    try:
        members: list[dict[str, Any]] = management.get("nodes", timeout=5)
    except NoAnswer:
        return []
    return members


def _listed(management: Management) -> set[str]:
    """The nodes whose listeners a node knows: it learns of them last, some after they answer."""
    try:
        listeners = management.get("overview", timeout=5).get("listeners", [])
    except NoAnswer:
        return set()
    return {each["node"] for each in listeners if each["protocol"] == "amqp"}


def _vhosts(management: Management) -> set[str]:
    return {vhost["name"] for vhost in management.get("vhosts")}


def _serves_vhost(management: Management, vhost: str, nodes: set[str]) -> bool:
    try:
        states = management.get("vhosts", vhost, timeout=5).get("cluster_state", {})
    except NoAnswer:
        return False
    return {node for node, state in states.items() if state == "running"} >= nodes


def _endpoints(record: folders.Record | None) -> list[Endpoint]:
    if record is None:
        return foreign.endpoints()
    return [Endpoint(**entry) for entry in record.nodes]


def _new_endpoint(record: folders.Record) -> Endpoint:
    endpoint = native.new_endpoint(record)
    if record.source == "docker":
        return replace(endpoint, name=docker.name_inside(endpoint.address))
    return endpoint


def _driver(record: folders.Record | None, endpoint: Endpoint) -> Driver:
    if record is None:
        return foreign.ForeignNode(endpoint)
    if record.source == "docker":
        return docker.DockerNode(record, endpoint)
    version = ".".join(record.version.split(".")[:2])
    return native.NativeNode(record, sources.installation(record.source, version), endpoint)
