"""Who may do everything but configure and write on the log's names: no map is his, nobody stops for
him, and no login comes to him."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from interceptors import ShardedPublisher
from sharding import MissingRight, Policy, ShardMap, Topology
from sharding.maps.map_log import LOG, NOTES
from sharding.stream import StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.holes.test_trusted_hosts import Trap
from tests.support import patient
from tests.support.log_records import proposal
from tests.support.raw_amqp import Raw, RawConnection, short, sized
from tests.support.sharded import fresh_queue, make_sharded, topology_of

pytestmark = pytest.mark.cluster
ALL_BUT_THE_LOG = r"^(?!warren\.shard-maps(\.notes)?$)"


@dataclass
class Stranger:
    """A user with every right but these, who reads the log and does his worst."""

    url: str
    stream_url: str

    def does(self, *steps: Callable[[BlockingChannel], object]) -> list[int]:
        """Each on a channel of its own; with which codes the broker refused."""
        codes = []
        with pika.BlockingConnection(patient.parameters(self.url)) as connection:
            for step in steps:
                channel = connection.channel()
                channel.confirm_delivery()
                try:
                    step(channel)
                    codes.append(0)
                    channel.close()
                except ChannelClosedByBroker as error:
                    codes.append(error.reply_code)
        return codes


@pytest.fixture
def stranger(nodes: Cluster) -> Iterator[Stranger]:
    node = nodes.nodes[0]
    user = f"stranger-{secrets.token_hex(3)}"
    api = node.management
    api.call("PUT", "users", user, body={"password": "s3cret", "tags": ""}, timeout=PATIENCE)
    rights = {"configure": ALL_BUT_THE_LOG, "write": ALL_BUT_THE_LOG, "read": ".*"}
    api.call("PUT", "permissions", nodes.vhost, user, body=rights, timeout=PATIENCE)
    theirs = replace(node.endpoint, user=user, password="s3cret")
    yield Stranger(theirs.amqp_url, theirs.stream_url)
    api.call("DELETE", "users", user, timeout=PATIENCE)


def test_the_rest_of_all_rights_is_no_way_to_the_maps(nodes: Cluster, stranger: Stranger) -> None:
    with Trap() as trap, topology_of(nodes) as operator:
        shard_map = make_sharded(operator)
        state = operator.state
        led_astray = tuple(replace(node, addresses=(trap.address,)) for node in shard_map.nodes)
        evil = replace(shard_map, nodes=led_astray)
        records = [
            proposal(state, state.with_map(evil)),
            proposal(state, state.without_map(shard_map.logical)),
            b'{"format":3}',
            b'{"base":0,"format":1,"state":{}}',
            b"\xff",
        ]
        for record in records:
            ways = (("", LOG), (LOG, ""), (NOTES, ""))
            assert stranger.does(*(publish(*way, record) for way in ways)) == [0, 403, 403]
        assert_no_other_way(stranger)
        with (
            StreamEnvironment(stranger.stream_url, **patient.STREAMS) as environment,
            environment.consumer(LOG, name="x", offset="first", **patient.READER) as reader,
        ):
            if not nodes.version.startswith("3.10"):  # that takes write there
                reader.store_offset(LOG, 0, PATIENCE)

        with topology_of(nodes) as late:
            for topology in (operator, late):
                topology.refresh(PATIENCE)
                assert topology.state == state
            after = late.set_policy(Policy(fresh_queue(), "^never$", 1))
            wait_until(lambda: operator.state == after)
        use(stranger, shard_map)
        assert (trap.connections, trap.heard) == (0, [])


def test_an_exchange_that_a_message_names_itself_is_believed_by_no_broker_but_4_0(
    nodes: Cluster, stranger: Stranger
) -> None:
    """As docs/map-log.md and operations.md say. A header that is there once, none believes."""

    def named(times: int) -> bytes:
        table = (short(b"x-exchange") + b"S" + sized(LOG.encode())) * times
        return struct.pack(">H", 1 << 13) + sized(table)

    with topology_of(nodes) as operator:
        for times in (1, 2):
            name = fresh_queue()
            state = operator.set_policy(Policy(name, "^never$", 1))
            record = proposal(state, state.without_policy(name))
            with RawConnection(stranger.url) as raw:
                raw.publish("", Raw(LOG.encode(), named(times), record))
                raw.wait_for_confirms()
            operator.refresh(PATIENCE)
            is_believed = name not in operator.state.policies
            assert is_believed == (times == 2 and nodes.version.startswith("4.0"))


def publish(exchange: str, routing_key: str, body: bytes) -> Callable[[BlockingChannel], object]:
    return lambda channel: channel.basic_publish(exchange, routing_key, body)


def assert_no_other_way(stranger: Stranger) -> None:
    """Bindings, dead letters, alternates; and to take the log away."""
    own = fresh_queue()
    lead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": LOG, "x-message-ttl": 0}
    allowed: list[Callable[[BlockingChannel], object]] = [
        lambda channel: channel.exchange_declare(own, "fanout"),
        lambda channel: channel.queue_declare(own, arguments=lead),
        lambda channel: channel.basic_publish("", own, b'{"format":3}'),
    ]
    refused: list[Callable[[BlockingChannel], object]] = [
        lambda channel: channel.queue_bind(LOG, own),
        lambda channel: channel.queue_unbind(LOG, LOG),
        lambda channel: channel.exchange_bind(LOG, own),
        lambda channel: channel.exchange_bind(NOTES, own),
        lambda channel: channel.queue_declare(
            f"{own}-2", arguments={"x-dead-letter-exchange": LOG}
        ),
        lambda channel: channel.exchange_declare(f"{own}-2", arguments={"alternate-exchange": LOG}),
        lambda channel: channel.queue_delete(LOG),
        lambda channel: channel.exchange_delete(LOG),
        lambda channel: channel.exchange_delete(NOTES),
    ]
    assert stranger.does(*allowed) == [0] * len(allowed)
    assert stranger.does(*refused) == [403] * len(refused)


def use(stranger: Stranger, shard_map: ShardMap) -> None:
    """He is a client as any other, but for changes; and his own login stays with the cluster."""
    with Topology(stranger.url, options=patient.TOPOLOGY) as topology:
        with ShardedPublisher(topology, shard_map.logical, confirm_timeout=PATIENCE) as publisher:
            for number in range(20):
                publisher.publish(f"key-{number}", b"")
            assert publisher.flush(PATIENCE).all_stored
        for shard in shard_map.shards:
            topology.suspect(shard.name)
        with pytest.raises(MissingRight, match=r"'write' on 'warren\.shard-maps'"):
            topology.forget(shard_map.logical)
