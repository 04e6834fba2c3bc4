"""A node is who it is, whoever looks at it; and only who is proved to see this cluster says which
nodes it has."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from interceptors import ShardedPublisher
from sharding import Address, OnUnavailable, Policy, ShardMap, Topology
from sharding.amqp.session import Session
from sharding.cluster.management import ClusterView
from sharding.cluster.nodes import ClusterNodes
from sharding.cluster.topology import TopologyOptions
from sharding.maps.map_log import State
from sharding.maps.planning import Member
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.pool import Pool
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.sharded import (
    connection_to,
    fresh_queue,
    keys_of,
    make_sharded,
    publish_all,
    shards_in_broker,
    topology_of,
)

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("first_with_management", [False, True])
@pytest.mark.parametrize("cluster_name", ["", "production"])
def test_a_node_has_one_name_with_and_without_the_management_api(
    nodes: Cluster, first_with_management: bool, cluster_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """02. Without the API nodes got names of our own, and the next ensure with it took them for
    nodes that had left: 6 of 6 shards left the map with 600 messages, and every key moved."""
    if cluster_name:  # else a node tells its own name for it
        monkeypatch.setattr(Session, "cluster_name", cluster_name)
    messages = [(f"key-{number}", b"%d" % number) for number in range(100)]
    with topology_of(nodes, management=first_with_management) as topology:
        before = make_sharded(topology, 2)
        publish_all(topology, before.logical, messages)
    with topology_of(nodes, management=not first_with_management) as topology:
        ensured = topology.ensure(before.logical)
    assert ensured.notes == ()
    assert ensured.shard_map.shards == before.shards
    assert len(shards_in_broker(nodes, before.logical)) == 6
    keys = [key for key, _ in messages]
    routes = [ensured.shard_map.shard_of(key) for key in keys]
    assert routes == [before.shard_of(key) for key in keys]


class Front:
    """A URL at which the management API of this or that cluster answers."""

    def __init__(self, behind: Cluster, names_of: Cluster | None = None) -> None:
        self.behind = behind
        """Nodes are called as those of `names_of` are."""
        front = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api = front.behind.nodes[0].management
                asked = urllib.request.Request(f"{api.url}{self.path}")
                asked.add_header("Authorization", self.headers["Authorization"])
                try:
                    with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
                        status, body = answer.status, answer.read()
                except urllib.error.HTTPError as error:
                    with error:
                        status, body = error.code, error.read()
                for other, node in zip(front.behind, names_of or front.behind, strict=True):
                    before, after = (json.dumps(each.name).encode() for each in (other, node))
                    body = body.replace(before, after)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def another(cluster: Cluster, pool: Pool) -> Iterator[Cluster]:
    with pool.shared("plugin", cluster.version[:3], "another") as other:
        yield other


@pytest.mark.parametrize("same_names", [False, True], ids=["other names", "the same names"])
def test_the_management_api_of_another_cluster_is_not_believed(
    cluster: Cluster, another: Cluster, same_names: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """23. Where the same name is sharded, all nodes seemed to have left, and a map of the other
    cluster's was appended."""
    with topology_of(cluster) as topology:
        before = make_sharded(topology, 2)
    urls = [node.endpoint.amqp_url for node in cluster]
    with (
        Front(another, cluster if same_names else None) as front,
        Topology(*urls, management_urls=[front.url], options=patient.TOPOLOGY) as mixed,
    ):
        ensured = mixed.ensure(before.logical)
        assert mixed.counters["nodes_down"] == 0
    assert ensured.shard_map == before
    assert f"the management API {front.url} is not used" in caplog.text


def test_an_api_that_becomes_another_cluster_s_is_not_believed_any_more(
    cluster: Cluster, another: Cluster
) -> None:
    """Found by an attack: it was proved once, and where it then said that nodes listen the login
    went."""
    options = replace(patient.TOPOLOGY, watch_interval=0.1)
    url = cluster.nodes[0].endpoint.amqp_url
    with (
        Front(cluster) as front,
        Topology(url, management_urls=[front.url], options=options) as topology,
    ):
        trust = topology._plane._trust
        own, strange = (each.nodes[2].endpoint for each in (cluster, another))
        wait_until(lambda: trust.allows(Address(own.address, own.ports["amqp"])))
        front.behind = another
        wait_until(lambda: not topology._view.is_believed)
        assert not trust.allows(Address(strange.address, strange.ports["amqp"]))
        assert topology.counters["nodes_down"] == 0
        front.behind = cluster
        wait_until(lambda: topology._view.is_believed)


@pytest.fixture
def alone(pool: Pool, broker_version: str) -> Iterator[Cluster]:
    """Without maps of other tests, which know the same nodes."""
    with pool.shared("healthy", broker_version, "alone") as running:
        yield running


@pytest.fixture
def names_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody has named the cluster; else a node tells its own name for it."""
    monkeypatch.setattr(Session, "cluster_name", "production")


@pytest.mark.usefixtures("names_unknown")
def test_shards_of_a_lost_map_keep_the_names_that_were_made_for_their_nodes(
    alone: Cluster,
) -> None:
    """Found by an attack: rebuilt with the management API there were 6 shards instead of 3."""
    with topology_of(alone, management=False) as topology:
        before = make_sharded(topology)
        topology.forget(before.logical)
    with topology_of(alone) as topology:
        found = topology.adopt(topology.find_shards(before.logical)).shard_map
    assert any(shard.node.startswith("node-") for shard in before.shards)
    assert {shard.name for shard in found.shards} == {shard.name for shard in before.shards}
    assert len(shards_in_broker(alone, before.logical)) == 3


def test_a_node_of_which_maps_have_no_address_is_not_taken_for_down(alone: Cluster) -> None:
    """Found by an attack: its keys were moved by who has no management API. A node that has just
    joined is in the maps before its addresses are known."""
    with topology_of(alone) as topology:
        first = make_sharded(topology)
        second = make_sharded(topology, on_unavailable=OnUnavailable.MOVE)
        for each in (first, second):
            nodes = (*each.nodes[:2], replace(each.nodes[2], addresses=()))
            without = replace(each, nodes=nodes)
            topology.change(partial(State.with_map, shard_map=without))
    with topology_of(alone.nodes[:1], management=False) as topology:
        ensured = topology.ensure(second.logical)
    assert [shard.available for shard in ensured.shard_map.shards] == [True] * 3


def test_an_api_is_believed_by_who_may_make_no_queue(cluster: Cluster) -> None:
    """The connection has a name as well, which nobody can guess."""
    api = cluster.nodes[0].management
    api.call("PUT", "users", "sees", body={"password": "sees", "tags": "monitoring"})
    rights = {"configure": "^$", "write": ".*", "read": ".*"}
    api.call("PUT", "permissions", cluster.vhost, "sees", body=rights)
    with topology_of(cluster) as operator:
        make_sharded(operator)
    url = cluster.nodes[0].endpoint.amqp_url.replace("guest:guest", "sees:sees")
    try:
        with Topology(url, management_urls=[api.url], options=patient.TOPOLOGY) as topology:
            topology.wait_until_ready(PATIENCE)
            wait_until(lambda: topology._view.is_believed)
    finally:
        api.call("DELETE", "users", "sees")


def test_a_shard_that_answers_stays_in_the_map(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is said of its node: an API may name fewer nodes than there are."""
    with topology_of(cluster) as topology:
        before = make_sharded(topology)
        gone = before.nodes[2].name
        whole = ClusterView.members
        monkeypatch.setattr(
            ClusterView,
            "members",
            lambda view, *asked: [each for each in whole(view, *asked) if each.name != gone],
        )
        ensured = topology.ensure(before.logical)
        monkeypatch.undo()
    assert ensured.shard_map.shards == before.shards
    (note,) = ensured.notes
    assert note == f"node {gone!r} is said to have left, but its shards are there: they stay"


# A node that is cut off

QUICK = TopologyOptions(watch_interval=1.0)


@pytest.fixture
def with_a_cut(harmed: Cluster) -> Iterator[Cluster]:
    if not harmed.version.startswith("4.3"):
        pytest.skip("before 4.3 the test clusters' nodes pause when they are cut off")
    yield harmed
    harmed.nodes[2].heal()


def sharded(cluster: Cluster) -> ShardMap:
    logical = fresh_queue()
    with topology_of(cluster) as operator:
        operator.set_policy(Policy(logical, f"^{logical}$", 1, on_unavailable=OnUnavailable.MOVE))
        return operator.ensure(logical).shard_map


def refused_though_it_serves(topology: Topology, shard_map: ShardMap, rest: list[Node]) -> set[str]:
    serving = set()
    for node in rest:
        with connection_to(node):
            serving.add(node.name)
    return {
        shard.name
        for shard in shard_map.shards
        if shard.node in serving and topology.unavailable(shard.name)
    }


def test_a_node_that_is_cut_off_does_not_say_which_others_run(with_a_cut: Cluster) -> None:
    """19. All others are down, it says; keys of nodes that serve were refused or moved."""
    shard_map = sharded(with_a_cut)
    alone, rest = with_a_cut.nodes[2], with_a_cut.nodes[:2]
    urls = [node.endpoint.amqp_url for node in rest]
    alone.cut_off()
    with (
        Topology(*urls, management_urls=[alone.management.url], options=QUICK) as app,
        Topology(*urls, management_urls=[rest[0].management.url], options=QUICK) as good,
    ):
        wait_until(lambda: alone.name in good._plane.down_nodes)
        for _ in range(5):  # two who watch, in turn
            for each in (app, good):
                each.ensure(shard_map.logical)
            assert not refused_though_it_serves(app, shard_map, rest)
        found = good.shard_map(shard_map.logical)
        assert found is not None
        assert {shard.node for shard in found.shards if shard.available} == {
            node.name for node in rest
        }


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_of_three_the_one_that_is_cut_off_is_not_believed(
    with_a_cut: Cluster, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """19b. Whichever API answered last was believed."""
    shard_map = sharded(with_a_cut)
    alone, rest = with_a_cut.nodes[2], with_a_cut.nodes[:2]
    order = [alone, *rest] if first else [*rest, alone]
    looks = []
    whole = ClusterNodes.watch

    async def watch(nodes: ClusterNodes, session: Session) -> list[Member]:
        looks.append(nodes)
        return await whole(nodes, session)

    monkeypatch.setattr(ClusterNodes, "watch", watch)
    with Topology(
        *(node.endpoint.amqp_url for node in with_a_cut),
        management_urls=[node.management.url for node in order],
        options=QUICK,
    ) as app:
        app.wait_until_ready(PATIENCE)
        wait_until(lambda: app._view.is_believed)
        alone.cut_off()
        said = rest[0].management
        wait_until(lambda: not all(node["running"] for node in said.get("nodes")))
        while len(looks) < 20:
            assert not refused_though_it_serves(app, shard_map, rest)
            time.sleep(0.1)
        with ShardedPublisher(app, shard_map.logical, confirm_timeout=PATIENCE) as publisher:
            for shard in shard_map.shards:
                if shard.node != alone.name:
                    publisher.publish(next(keys_of(shard_map, shard.name)), b"served")
            assert publisher.flush(PATIENCE).all_stored
