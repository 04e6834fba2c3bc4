"""The well-known experiment: where consumers and producers end up behind a load balancer.

Three nodes, HAProxy in front that deals connections out in turn, one stream, ten consumers and two
producers, everything through the balancer. A client that takes the node it happens to reach puts a
third of its consumers on the leader, and two thirds of its producers elsewhere.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from sharding.stream import StreamEnvironment
from tests.cluster import Balancer, Cluster, wait_until
from tests.support import patient
from tests.support.streams import stream_in

pytestmark = pytest.mark.cluster

CONSUMERS, PRODUCERS, MESSAGES = 10, 2, 1_000


@pytest.fixture(scope="module")
def balancer(nodes: Cluster) -> Iterator[Balancer]:
    front = nodes.balancer()
    yield front
    front.stop()


class Observer:
    """What the management API says of a stream."""

    def __init__(self, cluster: Cluster, stream: str) -> None:
        self._management = cluster.nodes[0].management
        self._vhost = cluster.vhost
        self._stream = stream

    def leader(self) -> str:
        queue = self._management.get("queues", self._vhost, self._stream)
        return str(queue.get("leader") or queue["node"])  # 3.10 has the latter only

    def by_node(self, kind: str) -> Counter[str]:
        """How many "consumers" or "publishers" of the stream each node has."""
        entries: list[dict[str, Any]] = self._management.get("stream", kind)
        ours = [entry for entry in entries if entry["queue"]["name"] == self._stream]
        # Until the connection's first report, its details are an empty list.
        return Counter(
            entry["connection_details"]["node"] for entry in ours if entry["connection_details"]
        )

    def connections(self) -> Counter[str]:
        return Counter(each["node"] for each in self._management.get("stream", "connections"))


@pytest.mark.parametrize("shared", [True, False], ids=["one environment", "one for each"])
def test_consumers_are_at_replicas_and_producers_at_the_leader_behind_a_balancer(
    nodes: Cluster, balancer: Balancer, shared: bool, any_version: str
) -> None:
    seeds = itertools.count(1)
    with ExitStack() as stack:

        def environment() -> StreamEnvironment:
            url = balancer.endpoint.stream_url
            made = StreamEnvironment(url, load_balancer=True, **patient.STREAMS)
            # Ten throws of a coin may fall on one side; not with these seeds.
            made._access.rng.seed(next(seeds))
            return stack.enter_context(made)

        first = environment()
        stream = stack.enter_context(stream_in(first))
        producers = [
            stack.enter_context((first if shared else environment()).producer(stream))
            for _ in range(PRODUCERS)
        ]
        consumers = [
            stack.enter_context(
                (first if shared else environment()).consumer(stream, **patient.READER)
            )
            for _ in range(CONSUMERS)
        ]
        observer = Observer(nodes, stream)
        wait_until(
            lambda: (
                observer.by_node("consumers").total() == CONSUMERS
                and observer.by_node("publishers").total() == PRODUCERS
            ),
            explain=lambda: f"{observer.by_node('consumers')} {observer.by_node('publishers')}",
        )
        leader = observer.leader()
        at_nodes, from_nodes = observer.by_node("consumers"), observer.by_node("publishers")
        print(
            f"\n{any_version}, {'one environment' if shared else 'an environment for each'}: "
            f"leader {leader}; consumers {dict(at_nodes)}; producers {dict(from_nodes)}; "
            f"stream connections {dict(observer.connections())}"
        )
        assert at_nodes[leader] == 0
        assert len(at_nodes) == 2, "both replicas have their share"
        assert from_nodes == {leader: PRODUCERS}
        # And they work: every consumer reads what both producers send.
        for producer in producers:
            producer.send_many([b"x"] * MESSAGES)
            producer.flush(timeout=30).raise_for_failures()
        for consumer in consumers:
            rows = 0
            for batch in consumer.batches(timeout=20):
                rows += batch.num_rows
                if rows == PRODUCERS * MESSAGES:
                    break
            assert rows == PRODUCERS * MESSAGES
