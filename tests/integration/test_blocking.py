"""What the wrapped blocking channel does beyond the plugin; what they share is in conformance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import ChannelClosedByBroker, ChannelWrongStateError, UnroutableError

from interceptors import Placement, ShardedChannel
from sharding import InvalidInput, Policy, ShardMap, ShardUnavailable, Topology
from sharding.maps.naming import shards_exchange, unrouted
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.sharded import (
    connection_to,
    drain,
    fresh_queue,
    publish_all,
    raw_channel,
)

pytestmark = pytest.mark.cluster


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[BlockingConnection]:
    with connection_to(cluster.nodes[0]) as opened:
        yield opened


@pytest.fixture
def images(topology: Topology) -> Iterator[ShardMap]:
    logical = fresh_queue()
    topology.set_policy(Policy.exactly(logical, 2, name=logical))
    yield topology.ensure(logical).shard_map
    topology.forget(logical)
    topology.clear_policy(logical)


def pump_until(connection: BlockingConnection, condition: Callable[[], object]) -> None:
    def pumped() -> object:
        connection.process_data_events(0.05)
        return condition()

    wait_until(pumped)


def test_connection_through_a_balancer_knows_its_node(
    cluster: Cluster, topology: Topology, images: ShardMap
) -> None:
    balancer = cluster.balancer()
    try:
        for number in range(3):
            parameters = patient.parameters(balancer.endpoint.amqp_url)
            with pika.BlockingConnection(parameters) as connection:
                channel = ShardedChannel(connection.channel(), topology)
                declared = channel.queue_declare(images.logical, durable=True).method.queue
                # Who answers a connection through the balancer, asked of the management API.
                # It shows a consumer for a while after its end, so each has a tag of its own.
                tag = f"here-{number}"
                assert tag == channel.basic_consume(images.logical, ignored, consumer_tag=tag)
                node = _node_of_consumer(cluster, tag)
                assert declared == f"sharding: {images.logical} - {node} - 0"
    finally:
        balancer.stop()


def ignored(*_: object) -> None:
    pass


def keys_on_two_nodes(cluster: Cluster, shard_map: ShardMap) -> tuple[str, str]:
    first, second = (
        next(key for key in map(str, range(99)) if shard_map.shard_of(key).node == node.name)
        for node in cluster.nodes[:2]
    )
    return first, second


def _node_of_consumer(cluster: Cluster, tag: str) -> str:
    found: list[str] = []

    def listed() -> list[str]:
        consumers = cluster.nodes[0].management.get("consumers", timeout=PATIENCE)
        here = [consumer for consumer in consumers if consumer["consumer_tag"] == tag]
        # It may list a consumer before it knows of its channel: that is `[]` then.
        known = [consumer["channel_details"] for consumer in here if consumer["channel_details"]]
        found.extend(details["node"] for details in known)
        return found

    wait_until(listed)
    return found[0]


def test_one_call_consumes_every_shard_also_later_ones(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    seen: set[bytes] = set()
    channel = ShardedChannel(connection.channel(), topology)
    tags = channel.basic_consume_all(
        images.logical, lambda _, __, ___, body: seen.add(body), auto_ack=True
    )
    assert len(tags) == 6
    topology.set_policy(Policy.exactly(images.logical, 3, name=images.logical))
    grown = topology.ensure(images.logical).shard_map
    assert len(grown.shards) == 9
    pump_until(connection, lambda: len(channel.consumer_tags) == 9)
    with raw_channel(cluster.nodes[1]) as publisher:
        for shard in grown.shards:
            publisher.basic_publish("", shard.name, shard.name.encode())
    pump_until(connection, lambda: len(seen) == 9)


def test_placement_any_reaches_shards_of_other_nodes(
    topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    channel = ShardedChannel(connection.channel(), topology, placement=Placement.ANY)
    for _ in range(6):
        channel.basic_consume(images.logical, lambda *_: None)
    counts = topology.consumer_counts([shard.name for shard in images.shards])
    assert set(counts.values()) == {1}


def test_return_nobody_asked_for_does_not_reach_the_application(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    returned: list[bytes] = []
    channel = ShardedChannel(connection.channel(), topology)
    channel.add_on_return_callback(lambda _, __, ___, body: returned.append(body))
    with raw_channel(cluster.nodes[0]) as raw:
        for shard in images.shards:
            raw.queue_unbind(shard.name, shards_exchange(images.logical), shard.name)
    one, other = keys_on_two_nodes(cluster, images)  # a shard that gave one back is suspected
    channel.basic_publish(images.logical, one, b"not asked for")
    channel.basic_publish(images.logical, other, b"asked for", mandatory=True)
    pump_until(connection, lambda: returned)
    assert returned == [b"asked for"]


def test_unroutable_message_is_an_error_also_without_mandatory(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    channel = ShardedChannel(connection.channel(), topology)
    channel.confirm_delivery()
    shard = images.shard_of("user-1")
    with raw_channel(cluster.nodes[0]) as raw:
        raw.queue_delete(shard.name)
    with pytest.raises(ShardUnavailable, match="warren shards ensure"):
        channel.basic_publish(images.logical, "user-1", b"x")
    wait_until(lambda: topology.unavailable(shard.name))
    topology.ensure(images.logical)
    wait_until(lambda: not topology.unavailable(shard.name))
    channel.basic_publish(images.logical, "user-1", b"x")
    with pytest.raises(UnroutableError):
        channel.basic_publish("amq.direct", "nobody", b"x", mandatory=True)


def test_name_that_is_sharded_no_more_loses_nothing_silently(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    channel = ShardedChannel(connection.channel(), topology)
    channel.confirm_delivery()
    channel.basic_publish(images.logical, "user-42", b"stored")
    topology.forget(images.logical)
    wait_until(lambda: topology.shard_map(images.logical) is None)
    channel.basic_publish(images.logical, "user-42", b"kept")  # its exchange is still there
    with raw_channel(cluster.nodes[0]) as raw:
        assert raw.basic_get(unrouted(images.logical), auto_ack=True)[2] == b"kept"


def test_sharded_name_as_a_key_of_the_default_exchange_loses_nothing_silently(
    topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    channel = ShardedChannel(connection.channel(), topology)
    channel.confirm_delivery()
    with pytest.raises(UnroutableError):  # there is no queue of that name
        channel.basic_publish("", images.logical, b"a habit of pika's users")


def test_closed_channel_declares_nothing(
    topology: Topology, connection: BlockingConnection
) -> None:
    channel, logical = ShardedChannel(connection.channel(), topology), fresh_queue()
    channel.close()
    with pytest.raises(ChannelWrongStateError):
        channel.exchange_declare(
            logical, "x-modulus-hash", durable=True, arguments={"x-shards-per-node": 1}
        )
    assert topology.shard_map(logical) is None


def test_transaction_publishes_on_commit(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    shards = [shard.name for shard in images.shards]
    channel = ShardedChannel(connection.channel(), topology)
    channel.tx_select()
    channel.basic_publish(images.logical, "user-1", b"dropped")
    channel.tx_rollback()
    channel.basic_publish(images.logical, "user-1", b"kept")
    channel.tx_commit()
    home = images.shard_of("user-1").name
    assert drain(cluster.nodes[0], shards) == [(home, "user-1", b"kept")]


def test_key_that_is_the_name_of_a_shard_is_refused(
    topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    channel = ShardedChannel(connection.channel(), topology)
    with pytest.raises(InvalidInput, match="routing_key: must not be the name of a shard"):
        channel.basic_publish(images.logical, images.shards[0].name, b"x")


def test_maps_from_code_or_a_file_need_no_log(
    cluster: Cluster, connection: BlockingConnection, images: ShardMap
) -> None:
    fixed = ShardMap.loads(images.dumps())
    url = cluster.nodes[0].endpoint.amqp_url
    with Topology(url, maps=[fixed], options=patient.TOPOLOGY) as topology:
        channel = ShardedChannel(connection.channel(), topology)
        channel.confirm_delivery()
        channel.basic_publish(images.logical, "user-1", b"x")
        home = images.shard_of("user-1").name
        assert drain(cluster.nodes[0], [home]) == [(home, "user-1", b"x")]
        channel.basic_consume(images.logical, lambda *_: None)
        with pytest.raises(InvalidInput, match="maps: must not be given"):
            topology.set_policy(Policy.exactly("other", 1, name="other"))


def test_wrapping_a_channel_that_confirms_already_is_refused(
    topology: Topology, connection: BlockingConnection
) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    with pytest.raises(InvalidInput, match="wrapped before confirm_delivery"):
        ShardedChannel(channel, topology)


def test_message_that_can_not_be_encoded_does_not_disturb_the_next_confirm(
    topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    channel = ShardedChannel(connection.channel(), topology, confirm_timeout=PATIENCE)
    channel.confirm_delivery()
    headers: dict[str, Any] = {"x": object()}
    strange = pika.BasicProperties(headers=headers)
    with pytest.raises(Exception, match="object"):
        channel.basic_publish(images.logical, "user-1", b"x", strange)
    channel.basic_publish(images.logical, "user-1", b"x")


def test_exchange_in_use_stays_sharded_when_its_deletion_is_refused(
    topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    channel = ShardedChannel(connection.channel(), topology)
    with pytest.raises(ChannelClosedByBroker, match="in use"):
        channel.exchange_delete(images.logical, if_unused=True)
    topology.refresh(PATIENCE)
    assert topology.shard_map(images.logical) == images


def test_return_is_shown_only_if_asked_for_also_with_confirms(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    returned: list[bytes] = []
    channel = ShardedChannel(connection.channel(), topology)
    channel.confirm_delivery()
    channel.add_on_return_callback(lambda _, __, ___, body: returned.append(body))
    one, other = keys_on_two_nodes(cluster, images)
    with raw_channel(cluster.nodes[0]) as raw:
        for shard in images.shards:
            raw.queue_unbind(shard.name, shards_exchange(images.logical), shard.name)
    with pytest.raises(ShardUnavailable):
        channel.basic_publish(images.logical, one, b"not asked for")
    with pytest.raises(UnroutableError):
        channel.basic_publish(images.logical, other, b"asked for", mandatory=True)
    pump_until(connection, lambda: returned)
    assert returned == [b"asked for"]


def test_shard_that_was_gone_for_a_while_is_consumed_again(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    seen: list[bytes] = []
    channel = ShardedChannel(connection.channel(), topology)
    channel.basic_consume_all(
        images.logical, lambda _, __, ___, body: seen.append(body), auto_ack=True
    )
    lost = images.shards[3].name
    with raw_channel(cluster.nodes[0]) as raw:
        raw.queue_delete(lost)
    pump_until(connection, lambda: len(channel.consumer_tags) == 5)
    topology.ensure(images.logical)
    pump_until(connection, lambda: len(channel.consumer_tags) == 6)
    with raw_channel(cluster.nodes[0]) as raw:
        raw.basic_publish("", lost, b"found")
    pump_until(connection, lambda: seen == [b"found"])


def test_consuming_goes_on_when_the_broker_has_ended_every_consumer(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    """Found by an attack: `start_consuming` returned, without a word, and nobody read the shards
    when they were back."""
    seen: list[bytes] = []

    def on_message(channel: Any, method: Any, _: Any, body: bytes) -> None:
        seen.append(body)
        channel.basic_ack(method.delivery_tag)
        channel.stop_consuming()

    channel = ShardedChannel(connection.channel(), topology)
    channel.basic_consume_all(images.logical, on_message)

    def delete_and_make_again() -> None:
        with raw_channel(cluster.nodes[1]) as raw:
            for shard in images.shards:
                raw.queue_delete(shard.name)
        wait_until(lambda: not channel.consumer_tags)
        topology.ensure(images.logical)
        publish_all(topology, images.logical, [("key", b"after")])

    with ThreadPoolExecutor(1) as thread:
        harm = thread.submit(delete_and_make_again)
        channel.start_consuming()
        assert seen == [b"after"]
        harm.result(PATIENCE)


@pytest.mark.parametrize("key", [b"nobody", "nobody"])
def test_return_of_a_message_whose_key_is_given_as_bytes_is_recognised(
    topology: Topology, connection: BlockingConnection, key: Any
) -> None:
    """Found by an attack: pika takes bytes, and reads text back. The message that came back was
    taken for none of ours, and its confirm for that of a stored one."""
    channel = ShardedChannel(connection.channel(), topology, confirm_timeout=PATIENCE)
    channel.confirm_delivery()
    with pytest.raises(UnroutableError):
        channel.basic_publish("", key, b"lost", mandatory=True)


def test_names_and_keys_may_be_bytes(
    cluster: Cluster, topology: Topology, connection: BlockingConnection, images: ShardMap
) -> None:
    channel = ShardedChannel(connection.channel(), topology, confirm_timeout=PATIENCE)
    channel.confirm_delivery()
    keys = [b"user-1", "käse".encode(), b"\xff\xfe"]
    for key in keys:
        given: tuple[Any, Any] = (images.logical.encode(), key)
        channel.basic_publish(*given, key)
    for shard in images.shards:
        here = [body for _, _, body in drain(cluster.nodes[0], [shard.name])]
        assert here == [key for key in keys if images.shard_of(key) == shard]
    gone = images.shard_of(b"user-1").name
    with raw_channel(cluster.nodes[0]) as raw:
        raw.queue_delete(gone)
    lost: tuple[Any, Any] = (images.logical, b"user-1")
    with pytest.raises(ShardUnavailable):
        channel.basic_publish(*lost, b"lost")
