"""No login goes where only a record of the map log points."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

import pika
import pytest

from interceptors import ShardedPublisher
from sharding import Address, OnUnavailable, ShardMap, Topology
from sharding.groups import ConsumerGroup
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.sharded import make_sharded, topology_of

pytestmark = pytest.mark.cluster

PASSWORD = "s3cret-word"


class Trap:
    """A stranger's host that asks whoever connects for a login, as a broker would."""

    def __init__(self) -> None:
        self.connections = 0
        self.heard: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listener.getsockname()[:2])
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Trap:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with peer:
                peer.settimeout(5)
                try:
                    peer.recv(8)
                    start = pika.spec.Connection.Start(0, 9, {"product": "trap"}, "PLAIN", "en_US")
                    peer.sendall(pika.frame.Method(0, start).marshal())
                    self.heard.append(peer.recv(65536))
                except OSError:
                    pass


@pytest.fixture
def trap() -> Iterator[Trap]:
    with Trap() as listening:
        yield listening


@pytest.fixture(scope="module")
def victim(cluster: Cluster) -> Iterator[str]:
    """The AMQP URL of a user who may do everything, at one node."""
    api = cluster.nodes[0].management
    api.call("PUT", "users", "victim", body={"password": PASSWORD, "tags": "administrator"})
    rights = {"configure": ".*", "write": ".*", "read": ".*"}
    api.call("PUT", "permissions", cluster.vhost, "victim", body=rights)
    yield cluster.nodes[0].endpoint.amqp_url.replace("guest:guest", f"victim:{PASSWORD}")
    api.call("DELETE", "users", "victim")


def forged(operator: Topology, shard_map: ShardMap, where: Address) -> ShardMap:
    """A map that leads to a stranger, written by somebody who may write maps."""
    nodes = tuple(replace(node, addresses=(where,)) for node in shard_map.nodes)
    evil = replace(shard_map, nodes=nodes)
    return operator.change(lambda state: state.with_map(evil)).maps[shard_map.logical]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "no login goes where only a map points" in each]


@pytest.mark.parametrize("management", [False, True], ids=["without management", "with it"])
def test_no_login_goes_where_only_a_map_points(
    cluster: Cluster, victim: str, trap: Trap, management: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """03. Nodes' addresses in a record were dialled with the reader's own login."""
    handled: set[bytes] = set()
    wanted = {b"%d" % number for number in range(50)}
    with topology_of(cluster) as operator:
        shard_map = make_sharded(operator, on_unavailable=OnUnavailable.MOVE)
        forged(operator, shard_map, trap.address)
    urls = [cluster.nodes[0].management.url] if management else []
    with Topology(victim, management_urls=urls, options=patient.TOPOLOGY) as topology:
        logical = shard_map.logical
        found = topology.shard_map(logical)
        assert found is not None
        assert {each for node in found.nodes for each in node.addresses} == {trap.address}
        for shard in shard_map.shards:
            topology.suspect(shard.name)  # it is asked for at its node
        wait_until(lambda: len(warnings(caplog)) == 3)
        wait_until(lambda: not any(topology.unavailable(each.name) for each in shard_map.shards))
        with ShardedPublisher(topology, logical, confirm_timeout=PATIENCE) as publisher:
            for body in wanted:
                publisher.publish(f"key-{body.decode()}", body)
            assert publisher.flush(PATIENCE).all_stored
        with ConsumerGroup(
            topology, logical, lambda each: handled.add(each.body), options=patient.group()
        ):
            wait_until(lambda: handled == wanted)
        ensured = topology.ensure(logical)
        assert ensured.shard_map.shards == shard_map.shards
    assert (trap.connections, trap.heard) == (0, [])
    nodes = {warning.split()[1] for warning in warnings(caplog)}
    assert len(warnings(caplog)) == len(nodes) == 3


def test_hosts_that_the_user_names_or_the_cluster_confirms_get_the_login(
    cluster: Cluster, victim: str
) -> None:
    with topology_of(cluster) as operator:
        shard_map = make_sharded(operator)
    last = cluster.nodes[2]

    def places(topology: Topology) -> list[tuple[str, int]]:
        found = topology.connection_parameters(last.name)
        return [(str(each.host), int(each.port)) for each in found]

    here = pika.URLParameters(victim)
    own = next(node for node in shard_map.nodes if node.name == last.name).addresses[0]
    with Topology(victim, options=patient.TOPOLOGY) as topology:
        topology.wait_until_ready(PATIENCE)
        assert places(topology) == [(here.host, here.port)]
    urls = [cluster.nodes[1].management.url]
    with Topology(victim, management_urls=urls, options=patient.TOPOLOGY) as topology:
        topology.wait_until_ready(PATIENCE)
        # Who is ready does not wait until a slow API has answered.
        wait_until(lambda: places(topology) == [(own.host, own.port)])
    named = replace(patient.TOPOLOGY, trusted_hosts=[f"{own.host[:-1]}*"])
    with Topology(victim, options=named) as topology:
        topology.wait_until_ready(PATIENCE)
        assert places(topology) == [(own.host, own.port)]
