"""All clients agree on one history and one map, whatever node they talk to."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from dataclasses import replace

import pika
import pytest

from sharding import Policy, StaleMap, Unreachable
from sharding.cluster.stream_log import LOG_QUEUE, NOTHING
from sharding.cluster.topology import Topology, TopologyOptions
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.support import patient
from tests.support.sharded import fresh_queue, raw_channel, topology_of

pytestmark = pytest.mark.cluster


def log_records(node: Node) -> list[dict[str, object]]:
    """Every record of the log, read by plain AMQP; a void one is appended, to know the end by."""
    records: list[dict[str, object]] = []
    end = pika.BasicProperties(message_id=secrets.token_hex(8))
    with raw_channel(node) as channel:
        channel.confirm_delivery()
        channel.basic_publish("", LOG_QUEUE, NOTHING, end)
        channel.basic_qos(prefetch_count=1000)
        feed = channel.consume(
            LOG_QUEUE, arguments={"x-stream-offset": "first"}, inactivity_timeout=PATIENCE
        )
        for method, properties, body in feed:
            assert method is not None, f"the log is not read to its end: {len(records)} records"
            channel.basic_ack(method.delivery_tag or 0)
            if properties is not None and properties.message_id == end.message_id:
                break
            records.append(json.loads(body or b"{}"))
        channel.cancel()
    return records


WRITER = """
import sys
from sharding import Policy
from sharding.cluster.topology import Topology
from tests.support import patient
number, url = int(sys.argv[1]), sys.argv[2]
with Topology(url, options=patient.TOPOLOGY) as topology:
    sys.stdin.readline()
    for step in range(5):
        topology.set_policy(Policy(f"writer-{number}", "^never$", shards_per_node=step + 1))
    topology.refresh(60)
    print(topology.state.epoch)
"""


def test_eight_processes_racing_end_with_one_history(nodes: Cluster) -> None:
    with topology_of(nodes, options=patient.TOPOLOGY) as before:
        first_epoch = before.state.epoch
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(number), nodes.nodes[number % 3].endpoint.amqp_url],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    for writer in writers:  # all are connected, or about to be, and wait for the same signal
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=2 * PATIENCE)
        assert writer.returncode == 0

    readers = [topology_of([node], options=patient.TOPOLOGY) for node in nodes]
    try:
        for reader in readers:
            reader.refresh(PATIENCE)
        states = [reader.state for reader in readers]
    finally:
        for reader in readers:
            reader.close()
    # Eight writers, five changes each, none lost and none twice.
    assert {state.epoch for state in states} == {first_epoch + 40}
    assert all(state == states[0] for state in states)
    assert {states[0].policies[f"writer-{n}"].shards_per_node for n in range(8)} == {5}

    winners: list[object] = []
    epoch = 0
    for record in log_records(nodes.nodes[0]):
        if record.get("base") == epoch:
            epoch += 1
            winners.append(record["base"])
    assert winners == list(range(first_epoch + 40))


def test_change_is_pushed_to_open_readers(nodes: Cluster) -> None:
    slow_poll = replace(patient.TOPOLOGY, poll_interval=3600)
    with (
        topology_of(nodes.nodes[:1], options=patient.TOPOLOGY) as writer,
        topology_of(nodes.nodes[2:], options=slow_poll) as reader,
    ):
        reader.wait_until_ready(PATIENCE)
        writer.set_policy(Policy("pushed", "^pushed$", 3))
        wait_until(lambda: "pushed" in reader.state.policies)
        assert reader.state == writer.state


def test_reader_goes_to_another_node_when_its_own_dies(harmed: Cluster) -> None:
    with topology_of(harmed) as topology:
        epoch = topology.set_policy(Policy("before", "^never$", 1)).epoch
        for victim in harmed.nodes[:2]:
            victim.kill()
            topology.set_policy(Policy(f"without-{victim.name}", "^never$", 1))
            victim.restart()
        assert topology.state.epoch == epoch + 2


def test_reader_whose_node_has_no_replica_of_the_log_finds_one(harmed: Cluster) -> None:
    with topology_of(harmed) as topology:
        state = topology.set_policy(Policy("known", "^never$", 1))
    fourth = harmed.add_node()
    try:
        with topology_of([fourth]) as late:
            assert late.state == state
    finally:
        harmed.remove_node(fourth)


def test_map_is_not_used_longer_than_its_bound(harmed: Cluster) -> None:
    strict = TopologyOptions(poll_interval=0.5, max_staleness=2.0, connect_timeout=1.0)
    node = harmed.nodes[0]
    with topology_of([node], options=strict, management=False) as topology:
        topology.wait_until_ready(PATIENCE)
        node.freeze()
        try:
            wait_until(lambda: not _answers(topology))
            said = r"could not be checked for (?:[2-9]|\d\d+) s, .*max_staleness"
            with pytest.raises(StaleMap, match=said):
                _ = topology.state
        finally:
            node.thaw()
        wait_until(lambda: _answers(topology))
    harmed.wait_until_whole()


def _answers(topology: Topology) -> bool:
    try:
        return topology.state.epoch >= 0
    except StaleMap:
        return False


def test_no_broker_is_an_error_without_the_password() -> None:
    options = TopologyOptions(start_timeout=2, connect_timeout=0.5)
    with (
        Topology("amqp://user:c4nary@127.0.0.1:1/", options=options) as topology,
        pytest.raises(Unreachable) as caught,
    ):
        topology.shard_map(fresh_queue())
    assert "127.0.0.1:1" in str(caught.value)
    assert "c4nary" not in f"{caught.value!r} {topology!r}"


def test_log_made_anew_is_read_from_its_first_record(nodes: Cluster) -> None:
    quick = TopologyOptions(poll_interval=0.5)
    with topology_of(nodes, options=quick) as topology:
        topology.set_policy(Policy("forgotten", "^never$", 1))
        with raw_channel(nodes.nodes[0]) as channel:
            channel.queue_delete(LOG_QUEUE)
        wait_until(lambda: topology.state.epoch == 0)
        assert topology.set_policy(Policy("new", "^never$", 1)).epoch == 1
