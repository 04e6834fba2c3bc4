"""The blocking channel while nodes are killed, frozen and brought back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pika
import pika.exceptions
import pytest

from interceptors import ShardedChannel
from sharding import (
    OnUnavailable,
    OutcomeUnknown,
    Policy,
    RemoteError,
    ShardUnavailable,
    TopologyOptions,
)
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.support import patient
from tests.support.sharded import (
    before_harm,
    connection_to,
    drain,
    fresh_queue,
    set_up,
    shards_in_broker,
    topology_of,
)

pytestmark = pytest.mark.cluster

SECONDS = float(os.environ.get("WARREN_FAULT_SECONDS", "6"))
CONFIRM_TIMEOUT = 5.0
PERSISTENT = pika.BasicProperties(delivery_mode=2)


ROUTER = """
import sys
from sharding import Topology, TopologyOptions
from tests.cluster.waiting import PATIENCE
with Topology(sys.argv[1], options=TopologyOptions(start_timeout=PATIENCE)) as topology:
    images = topology.shard_map(sys.argv[2])
    for number in range(10_000):
        print(images.shard_of(f"key-{number}").name)
"""


def routes_of_another_process(node: Node, logical: str) -> list[str]:
    command = [sys.executable, "-c", ROUTER, node.endpoint.amqp_url, logical]
    done = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_keys_of_other_shards_do_not_move_when_a_node_dies(harmed: Cluster) -> None:
    logical = fresh_queue()
    with before_harm(harmed, Policy.exactly(logical, 2, name=logical)) as (topology, shard_map):
        before = routes_of_another_process(harmed.nodes[0], logical)
        assert before == [shard_map.shard_of(f"key-{n}").name for n in range(10_000)]
        victim = harmed.nodes[2]
        victim.kill()
        assert routes_of_another_process(harmed.nodes[1], logical) == before
        # Its own keys fail in bounded time, first by the broker's nack, then before they are sent.
        with connection_to(harmed.nodes[0]) as connection:
            channel = ShardedChannel(
                connection.channel(), topology, confirm_timeout=CONFIRM_TIMEOUT
            )
            channel.confirm_delivery()
            lost = next(k for k in map(str, range(99)) if shard_map.shard_of(k).node == victim.name)
            kept = next(k for k in map(str, range(99)) if shard_map.shard_of(k).node != victim.name)
            wait_until(lambda: _refused(channel, logical, lost))
            with pytest.raises(ShardUnavailable, match=victim.name):
                channel.basic_publish(logical, lost, b"x")
            channel.basic_publish(logical, kept, b"x")
            victim.restart()
            wait_until(lambda: not topology.unavailable(shard_map.shard_of(lost).name))
            channel.basic_publish(logical, lost, b"home")
    assert routes_of_another_process(harmed.nodes[2], logical) == before


def _refused(channel: ShardedChannel, logical: str, key: str) -> bool:
    try:
        channel.basic_publish(logical, key, b"x")
    except ShardUnavailable:
        return True
    except pika.exceptions.NackError:
        pass
    return False


def test_keys_move_for_everybody_where_the_policy_says_so_and_come_home(harmed: Cluster) -> None:
    logical = fresh_queue()
    policy = Policy(logical, f"^{logical}$", 2, on_unavailable=OnUnavailable.MOVE)
    with before_harm(harmed, policy) as (topology, home):
        before = routes_of_another_process(harmed.nodes[0], logical)
        victim = harmed.nodes[1]
        victim.kill()
        wait_until(lambda: victim.name in topology._plane.down_nodes)
        away = topology.ensure(logical).shard_map
        during = routes_of_another_process(harmed.nodes[0], logical)
        moved = [(old, new) for old, new in zip(before, during, strict=True) if old != new]
        lost = {shard.name for shard in home.shards_on(victim.name)}
        assert {old for old, _ in moved} == lost
        assert not {new for _, new in moved} & lost
        with connection_to(harmed.nodes[0]) as connection:
            channel = ShardedChannel(connection.channel(), topology)
            channel.confirm_delivery()
            for number in range(100):
                channel.basic_publish(logical, f"key-{number}", b"x")
        victim.restart()
        wait_until(lambda: victim.name not in topology._plane.down_nodes)
        assert topology.ensure(logical).shard_map.epoch > away.epoch
        assert routes_of_another_process(harmed.nodes[2], logical) == before


@pytest.mark.parametrize("management", [True, False])
def test_node_that_hangs_keeps_its_shards_in_the_map(harmed: Cluster, management: bool) -> None:
    """It can't be reached, but it has not left: that is no reason to move keys."""
    logical = fresh_queue()
    quick = TopologyOptions(connect_timeout=1.0, change_timeout=8.0)
    policy = Policy.exactly(logical, 1, name=logical)
    with before_harm(harmed, policy, options=quick, management=management) as (topology, shard_map):
        assert len(shard_map.shards) == 3
        harmed.nodes[2].freeze()
        try:
            # The management API did not answer in time while a node hung, and without it ensure()
            # did not end in time either (seen); but there is never a map without the node.
            with suppress(RemoteError, OutcomeUnknown):
                assert topology.ensure(logical).shard_map == shard_map
        finally:
            harmed.nodes[2].thaw()
        harmed.wait_until_whole()
    with topology_of(harmed, options=patient.TOPOLOGY, management=management) as topology:
        topology.refresh(PATIENCE)
        assert topology.shard_map(logical) == shard_map


def test_herd_of_sixteen_clients_ends_evenly(nodes: Cluster) -> None:
    logical = fresh_queue()
    node = nodes.nodes[0]
    shard_map = set_up(nodes, Policy.exactly(logical, 4, name=logical))
    with topology_of(nodes) as topology:
        shards = [shard.name for shard in shard_map.shards_on(node.name)]
        stop = threading.Event()
        together = threading.Barrier(16)
        topologies = [topology_of(nodes) for _ in range(4)]

        def client(number: int) -> None:
            with connection_to(node) as connection:
                channel = ShardedChannel(connection.channel(), topologies[number % 4])
                together.wait()
                channel.basic_consume(logical, lambda *_: None)
                while not stop.is_set():
                    connection.process_data_events(0.1)

        clients = [threading.Thread(target=client, args=(number,)) for number in range(16)]
        try:
            for each in clients:
                each.start()
            even = dict.fromkeys(shards, 4)
            wait_until(lambda: topology.consumer_counts(shards) == even)
        finally:
            stop.set()
            for each in clients:
                each.join()
            for each_topology in topologies:
                each_topology.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("harm", ["kill", "freeze"])
def test_what_is_reported_stored_is_stored_whatever_happens_to_a_node(
    harmed: Cluster, harm: str
) -> None:
    """Publish through a node that lives on while another, with a third of the shards, does not."""
    logical = fresh_queue()
    victim = harmed.nodes[2]
    stored, refused, unknown = set[bytes](), set[bytes](), set[bytes]()
    reasons: list[Exception] = []
    longest = 0.0
    policy = Policy.exactly(logical, 2, name=logical)
    with (
        before_harm(harmed, policy) as (topology, _),
        connection_to(harmed.nodes[0]) as connection,
    ):
        channel = ShardedChannel(connection.channel(), topology, confirm_timeout=CONFIRM_TIMEOUT)
        channel.confirm_delivery()
        on_the_wire = methods_sent(connection)
        began = time.monotonic()
        harmer = threading.Timer(SECONDS / 4, getattr(victim, harm))
        harmer.start()
        number = 0
        while time.monotonic() - began < SECONDS or not refused:
            number += 1
            body = b"%d" % number
            sent = time.monotonic()
            try:
                channel.basic_publish(logical, f"key-{number}", body, PERSISTENT)
                stored.add(body)
            except ShardUnavailable:
                refused.add(body)
            except (OutcomeUnknown, pika.exceptions.NackError) as reason:
                unknown.add(body)
                reasons.append(reason)
            longest = max(longest, time.monotonic() - sent)
        harmer.join()
        closing = time.monotonic()
        connection.close()  # comes back although the node is still away
        closed_in = time.monotonic() - closing
        try:
            if harm == "freeze":
                # The first to meet the node ends by its own deadline. The brokers' nack comes when
                # they give the node up themselves, after a minute (net_ticktime).
                assert isinstance(reasons[0], OutcomeUnknown)
                assert "confirm_timeout" in str(reasons[0])
        finally:
            if harm == "kill":
                victim.restart()
            else:
                victim.thaw()
        harmed.wait_until_whole()
        found = {body for _, _, body in drain(harmed.nodes[0], shards_in_broker(harmed, logical))}
    print(
        f"\n{harm}: {len(stored)} stored, {len(refused)} refused, {len(unknown)} unknown "
        f"({len(unknown & found)} of them stored), longest wait {longest:.1f} s, "
        f"close() {closed_in:.1f} s"
    )
    assert stored
    assert stored <= found
    assert not refused & found
    # A question about a queue of a dead node hangs for a minute, and close() behind it: none is
    # asked over the application's connection.
    assert on_the_wire == {"Basic.Publish", "Channel.Close", "Connection.Close"}


def methods_sent(connection: pika.BlockingConnection) -> set[str]:
    """What is sent over a connection from now on, by the names of the AMQP methods."""
    pika_side: Any = connection._impl  # type: ignore[attr-defined]
    send = pika_side._send_method
    names: set[str] = set()

    def noted(channel: int, method: Any, content: Any = None) -> None:
        names.add(method.NAME)
        send(channel, method, content)

    pika_side._send_method = noted
    return names
