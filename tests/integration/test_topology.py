"""All clients agree on one history and one map, whatever node they talk to."""

from __future__ import annotations

import secrets
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pika
import pytest

from sharding import MissingRight, Policy, StaleMap, Unreachable, UnsupportedFormat
from sharding.amqp.session import Session
from sharding.cluster.stream_log import LogFollower
from sharding.cluster.topology import Topology, TopologyOptions
from sharding.maps import snapshots
from sharding.maps.map_log import LOG, NOTES, NOTHING, State
from sharding.maps.snapshots import LogReader
from sharding.publishing.publisher import ShardedPublisher
from sharding.stream import StreamEnvironment
from tests.cluster import Cluster, Node, wait_until
from tests.cluster.waiting import PATIENCE
from tests.machine import PROJECT
from tests.support import patient
from tests.support.log_records import proposal
from tests.support.maps import queue_map
from tests.support.sharded import drain, fresh_queue, raw_channel, topology_of

pytestmark = pytest.mark.cluster


def log_records(node: Node) -> list[tuple[str, bytes]]:
    """Exchange and body of every record, read by plain AMQP; a note is appended, to know the end
    by."""
    records: list[tuple[str, bytes]] = []
    end = pika.BasicProperties(message_id=secrets.token_hex(8))
    with raw_channel(node) as channel:
        channel.confirm_delivery()
        channel.basic_publish(NOTES, "", NOTHING, end)
        channel.basic_qos(prefetch_count=1000)
        feed = channel.consume(
            LOG, arguments={"x-stream-offset": "first"}, inactivity_timeout=PATIENCE
        )
        for method, properties, body in feed:
            assert method is not None, f"the log is not read to its end: {len(records)} records"
            channel.basic_ack(method.delivery_tag or 0)
            if properties is not None and properties.message_id == end.message_id:
                break
            records.append((method.exchange or "", body or b""))
        channel.cancel()
    return records


def history(records: list[tuple[str, bytes]]) -> tuple[State, int]:
    """What a reader of everything makes of it, and how many of its records took effect."""
    reader, counted = LogReader(), 0
    for offset, (exchange, body) in enumerate(records):
        if exchange != LOG:
            reader.skip(offset, body)
        else:
            counted += reader.read(offset, body).void is None and b'"changes"' in body
    assert reader.state is not None
    return reader.state, counted


WRITER = """
import sys
from sharding import Policy
from sharding.cluster.topology import Topology
from tests.support import patient
number, urls = int(sys.argv[1]), sys.argv[2:]
with Topology(*urls, options=patient.TOPOLOGY) as topology:
    sys.stdin.readline()
    for step in range(5):
        topology.set_policy(Policy(f"writer-{number}", "^never$", shards_per_node=step + 1))
        print(step, flush=True)
"""


class Racing:
    """Eight processes that wait for one signal, and then change a policy five times each."""

    def __init__(self, nodes: Cluster) -> None:
        with topology_of(nodes) as before:
            self._first_epoch = before.set_policy(Policy("founded", "^never$", 1)).epoch
        urls = [node.endpoint.amqp_url for node in nodes]
        self.writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(number), *urls[number % 3 :], *urls],
                cwd=PROJECT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(8)
        ]
        for writer in self.writers:  # all are connected, or about to be
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()

    def end(self) -> None:
        for writer in self.writers:
            writer.communicate(timeout=4 * PATIENCE)
            assert writer.returncode == 0

    def check(self, nodes: Cluster, at: Node) -> None:
        """What all read, and what is in the log of the node `at`."""
        readers = [topology_of([node]) for node in nodes]
        try:
            for reader in readers:
                reader.refresh(PATIENCE)
            states = [reader.state for reader in readers]
        finally:
            for reader in readers:
                reader.close()
        # Eight writers, five changes each, none lost and none twice.
        assert {state.epoch for state in states} == {self._first_epoch + 40}
        assert all(state == states[0] for state in states)
        assert {states[0].policies[f"writer-{n}"].shards_per_node for n in range(8)} == {5}

        # Whoever reads the log as it lies there comes to the same.
        assert history(log_records(at)) == (states[0], self._first_epoch + 40)


def test_eight_processes_racing_end_with_one_history(nodes: Cluster) -> None:
    racing = Racing(nodes)
    racing.end()
    racing.check(nodes, nodes.nodes[0])


def test_eight_processes_racing_end_with_one_history_when_the_log_s_leader_is_killed(
    harmed: Cluster,
) -> None:
    racing = Racing(harmed)
    management = harmed.nodes[0].management
    leader = management.get("queues", harmed.vhost, LOG)["leader"]
    first = racing.writers[0].stdout
    assert first is not None
    assert first.readline() == "0\n"  # they are in the middle of it
    victim = next(node for node in harmed if node.name == leader)
    victim.kill()
    racing.end()
    victim.restart()
    # Its own replica may be one that does not run yet.
    racing.check(harmed, next(node for node in harmed if node is not victim))


@pytest.mark.twin("integration/test_topology.py::test_eight_processes_racing_end_with_one_history")
def test_writers_of_different_queues_void_nothing(nodes: Cluster) -> None:
    """A hundred of them, four to a process's topology, each with a map of its own."""
    names = [fresh_queue() for _ in range(100)]
    with ExitStack() as stack:
        writers = [stack.enter_context(topology_of(nodes, management=False)) for _ in range(25)]
        writers[0].set_policy(Policy("founded", "^never$", 1))
        for writer in writers:
            writer.wait_until_ready(PATIENCE)
        seen = len(log_records(nodes.nodes[0]))
        for epoch in range(1, 4):
            maps = [replace(queue_map(epoch=epoch), logical=name) for name in names]
            answers = [
                writers[number % 25].futures.change(partial(State.with_map, shard_map=to))
                for number, to in enumerate(maps)
            ]
            for answer in answers:
                answer.result(PATIENCE)
        for writer in writers:
            writer.refresh(PATIENCE)
            assert {writer.state.maps[name].epoch for name in names} == {3}
    records = log_records(nodes.nodes[0])
    reader, void = LogReader(), []
    for offset, (exchange, body) in enumerate(records):
        if exchange != LOG:
            reader.skip(offset, body)
        elif (why := reader.read(offset, body).void) is not None and offset >= seen:
            void.append(why)
    assert len(void) <= 300 // 20, void


def test_change_is_pushed_to_open_readers(nodes: Cluster) -> None:
    slow_poll = replace(patient.TOPOLOGY, poll_interval=3600)
    with (
        topology_of(nodes.nodes[:1]) as writer,
        topology_of(nodes.nodes[2:], options=slow_poll) as reader,
    ):
        reader.wait_until_ready(PATIENCE)
        writer.set_policy(Policy("pushed", "^pushed$", 3))
        wait_until(lambda: "pushed" in reader.state.policies)
        assert reader.state == writer.state


def test_reader_goes_to_another_node_when_its_own_dies(harmed: Cluster) -> None:
    with topology_of(harmed, options=None) as topology:
        epoch = topology.set_policy(Policy("before", "^never$", 1)).epoch
        for victim in harmed.nodes[:2]:
            victim.kill()
            topology.set_policy(Policy(f"without-{victim.name}", "^never$", 1))
            victim.restart()
        assert topology.state.epoch == epoch + 2


def test_reader_whose_node_has_no_replica_of_the_log_finds_one(harmed: Cluster) -> None:
    with topology_of(harmed, options=None) as topology:
        state = topology.set_policy(Policy("known", "^never$", 1))
    fourth = harmed.add_node()
    try:
        with topology_of([fourth]) as late:
            assert late.state == state
    finally:
        harmed.remove_node(fourth)


def test_reader_of_a_node_that_ends_the_connection_for_the_log_finds_another(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a node of 3.10 that has just joined (541): it was asked again and again, and for
    other nodes over a connection that was no more."""
    with topology_of(cluster) as topology:
        state = topology.set_policy(Policy("known too", "^never$", 1))
    first = cluster.nodes[0]
    attach = LogFollower.attach

    async def ended(follower: LogFollower, session: Session) -> None:
        if session.where.endswith(f":{first.endpoint.ports['amqp']}"):
            await session.close()
            raise Unreachable("the channel was closed: (541, 'INTERNAL_ERROR')")
        await attach(follower, session)

    monkeypatch.setattr(LogFollower, "attach", ended)
    with topology_of([first]) as late:
        assert late.state == state


def test_an_offset_that_somebody_stores_in_the_log_stops_nobody(cluster: Cluster) -> None:
    """It lies between the records, and takes an offset of its own: records seem to be missing."""
    policy, later = (Policy(f"{fresh_queue()}", "^never$", number) for number in (1, 2))
    with (
        topology_of(cluster) as topology,
        StreamEnvironment(cluster.nodes[0].endpoint.stream_url, **patient.STREAMS) as environment,
    ):
        topology.set_policy(policy)
        with environment.consumer(LOG, name="meddler", offset="first", **patient.READER) as reader:
            reader.store_offset(LOG, 0, PATIENCE)
        before = last_offset(environment)
        state = topology.set_policy(later)
        assert topology.state.policies[policy.name] == policy
        wait_until(lambda: last_offset(environment) > before)
        with topology_of(cluster) as late:
            assert late.state == state


def last_offset(environment: StreamEnvironment) -> int:
    ends = environment.offsets(LOG)
    assert ends is not None
    return ends.last


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
            channel.queue_delete(LOG)
        wait_until(lambda: topology.state.epoch == 0)
        assert topology.set_policy(Policy("new", "^never$", 1)).epoch == 1


def test_a_log_made_again_with_as_many_records_is_another_one(nodes: Cluster) -> None:
    """Its epochs begin again, and a publisher that was there before goes by them."""
    logical = fresh_queue()
    slow_poll = replace(patient.TOPOLOGY, poll_interval=3600)
    with (
        topology_of(nodes, options=slow_poll) as app,
        topology_of(nodes) as operator,
    ):
        for number in range(4):  # some history
            app.set_policy(Policy(f"other-{number}", "^never$", 1))
        app.set_policy(Policy.exactly(logical, 1, name=logical))
        before = app.ensure(logical).shard_map
        with ShardedPublisher(app, logical) as publisher:
            publisher.publish("first", b"")
            publisher.flush(PATIENCE)
            with raw_channel(nodes.nodes[0]) as channel:
                channel.queue_delete(LOG)
            wait_until(lambda: operator.state.epoch == 0)
            operator.set_policy(Policy.exactly(logical, 3, name=logical))
            new = operator.ensure(logical).shard_map
            wait_until(lambda: app.shard_map(logical) == new)
            keys = [f"key-{number}" for number in range(100)]
            for key in keys:
                publisher.publish(key, key.encode())
            assert publisher.flush(PATIENCE).stored == len(keys)
    assert before.log != new.log
    stored = {key: queue for queue, key, _ in drain(nodes.nodes[0], [s.name for s in new.shards])}
    assert {key: stored[key] for key in keys} == {key: new.shard_of(key).name for key in keys}


def test_a_record_that_can_not_be_understood_stops_changes_until_the_log_is_replaced(
    nodes: Cluster,
) -> None:
    with topology_of(nodes) as topology:
        topology.set_policy(Policy("there", "^never$", 1))
        with raw_channel(nodes.nodes[0]) as channel:
            channel.confirm_delivery()
            for damage in (b"\xff", b'{"format":2', b'{"format":2}'):
                channel.basic_publish(LOG, "", damage)
            channel.basic_publish("", LOG, b'{"format":3}')
            topology.set_policy(Policy("after-damage", "^never$", 1))
            channel.basic_publish(LOG, "", b'{"format":3}')
        topology.refresh(PATIENCE)
        assert topology.state.policies.keys() >= {"there", "after-damage"}
        with pytest.raises(UnsupportedFormat, match=r"record \d+ of the map log .* upgrade"):
            topology.set_policy(Policy("refused", "^never$", 1))
        with raw_channel(nodes.nodes[0]) as channel:
            channel.queue_delete(LOG)
        wait_until(lambda: topology.state.epoch == 0)
        assert topology.set_policy(Policy("new", "^never$", 1)).policies.keys() == {"new"}


def test_the_right_to_change_maps_is_to_write_on_one_name(nodes: Cluster) -> None:
    """Who may write everywhere else has it not, and is told so at once; he reads all the same."""
    node, user = nodes.nodes[0], fresh_queue()
    management = node.management
    management.call("PUT", "users", user, body={"password": "s3cret", "tags": ""}, timeout=PATIENCE)
    rights = {
        "configure": "^$",
        "write": r"^(amq\.default|warren\.shard-maps\.notes)$",
        "read": ".*",
    }
    path = ("permissions", node.endpoint.vhost, user)
    management.call("PUT", *path, body=rights, timeout=PATIENCE)
    url = node.endpoint.amqp_url.replace("guest:guest", f"{user}:s3cret")
    try:
        with topology_of(nodes) as operator:
            state = operator.set_policy(Policy("there", "^never$", 1))
        with raw_channel(node) as channel:
            channel.confirm_delivery()
            record = proposal(state, state.without_policy("there"))
            channel.basic_publish("", LOG, record)
            channel.basic_publish(NOTES, "", record)
        with Topology(url, options=patient.TOPOLOGY) as limited:
            assert limited.state == state
            asked = limited.counters["refreshes"]
            with pytest.raises(MissingRight, match=r"'write' on 'warren\.shard-maps'"):
                limited.set_policy(Policy("mine", "^never$", 1))
            assert limited.counters["refreshes"] <= asked + 1
    finally:
        management.call("DELETE", "users", user, timeout=PATIENCE)


@pytest.mark.parametrize("log", ["there", "missing"])
def test_who_may_not_reach_the_log_is_told_so_by_name(nodes: Cluster, log: str) -> None:
    """Found by an attack: a change waited for its whole time, and then no broker was reached."""
    node, management = nodes.nodes[0], nodes.nodes[0].management
    user = f"stranger-{secrets.token_hex(3)}"
    vhost = nodes.vhost if log == "there" else user
    with topology_of(nodes) as operator:
        operator.set_policy(Policy("there", "^never$", 1))
    if log == "missing":
        management.call("PUT", "vhosts", vhost, timeout=PATIENCE)
    management.call("PUT", "users", user, body={"password": "s3cret", "tags": ""}, timeout=PATIENCE)
    rights = dict.fromkeys(("configure", "write", "read"), "^mine$")
    management.call("PUT", "permissions", vhost, user, body=rights, timeout=PATIENCE)
    url = replace(node.endpoint, user=user, password="s3cret", vhost=vhost).amqp_url
    try:
        with (
            Topology(url, options=patient.TOPOLOGY) as limited,
            pytest.raises(MissingRight, match=r"'warren\.shard-maps'"),
        ):
            limited.set_policy(Policy("mine", "^never$", 1))
    finally:
        management.call("DELETE", "users", user, timeout=PATIENCE)
        if log == "missing":
            management.call("DELETE", "vhosts", vhost, timeout=PATIENCE)


def test_a_start_reads_the_newest_snapshot_and_what_is_behind_it(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_WORTH_A_SNAPSHOT", 5_000)
    with topology_of(nodes) as topology:
        for number in range(60):
            state = topology.set_policy(Policy("grows", "^never$", number + 1))
    records = log_records(nodes.nodes[0])
    assert sum(b'"snapshot"' in body for _, body in records) >= 2
    read_on = LogFollower._read_on
    starts: list[int] = []

    async def note_start(log: LogFollower, session: Session) -> None:
        starts.append(log._reader.next_offset)
        await read_on(log, session)

    monkeypatch.setattr(LogFollower, "_read_on", note_start)
    with topology_of(nodes) as late:
        assert late.state == state
    assert len(starts) == 1
    assert starts[0] > len(records) / 2
    assert history(records)[0] == state
