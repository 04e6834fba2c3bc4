"""What the wrapped blocking channel costs against the raw one, publishing and consuming.

Run it with `python -m benchmarks.channel`. It starts a cluster of its own with one shard on each of
three nodes. Raw publishing goes to the same shards through the same exchange, by their names; the
wrapped channel finds the shard by the key and delivers as sent.
"""

from __future__ import annotations

from time import perf_counter

import pika

from benchmarks.rounds import Ratio, alternate, print_ratio
from interceptors import ShardedChannel
from sharding import Policy, Topology
from tests.cluster import Cluster

LOGICAL = "images"
BODY = b"x" * 100
PUBLISHED = 10_000
CONSUMED = 10_000
ROUNDS = 7
PUBLISH, RAW_PUBLISH = "`ShardedChannel` publish", "raw pika publish to the same shards"
CONSUME, RAW_CONSUME = "`ShardedChannel` consume", "raw pika consume"


def main() -> list[Ratio]:
    with Cluster.start(nodes=3) as cluster:
        urls = [node.endpoint.amqp_url for node in cluster]
        with Topology(*urls, management_urls=[node.management.url for node in cluster]) as topology:
            topology.set_policy(Policy.exactly(LOGICAL, 1, name=LOGICAL))
            topology.ensure(LOGICAL)
            return Measurement(urls[0], topology).run()


class Measurement:
    def __init__(self, url: str, topology: Topology) -> None:
        self._url = url
        self._topology = topology
        shard_map = topology.shard_map(LOGICAL)
        assert shard_map is not None
        self._shards = [shard.name for shard in shard_map.shards]
        self._local = self._shards[0]

    def run(self) -> list[Ratio]:
        speeds = alternate(
            {
                RAW_PUBLISH: lambda: self._publish(wrapped=False),
                PUBLISH: lambda: self._publish(wrapped=True),
                RAW_CONSUME: lambda: self._consume(wrapped=False),
                CONSUME: lambda: self._consume(wrapped=True),
            },
            ROUNDS,
            before=self._purge,
        )
        return [
            print_ratio(speeds, PUBLISH, RAW_PUBLISH, 0.8),
            print_ratio(speeds, CONSUME, RAW_CONSUME, 0.95),
        ]

    def _publish(self, wrapped: bool) -> float:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            raw = connection.channel()
            channel = ShardedChannel(raw, self._topology) if wrapped else raw
            keys = [f"user-{number}" for number in range(PUBLISHED)]
            targets = keys if wrapped else [self._shards[n % 3] for n in range(PUBLISHED)]
            began = perf_counter()
            for key in targets:
                channel.basic_publish(LOGICAL, key, BODY)
            raw.queue_declare(self._local, passive=True)  # all before it has been taken
            return PUBLISHED / (perf_counter() - began)

    def _consume(self, wrapped: bool) -> float:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            self._fill()
            consumer = connection.channel()
            consumer.basic_qos(prefetch_count=1_000)
            channel = ShardedChannel(consumer, self._topology) if wrapped else consumer
            left = CONSUMED

            def on_message(*_: object) -> None:
                nonlocal left
                left -= 1
                if not left:
                    consumer.stop_consuming()

            began = perf_counter()
            channel.basic_consume(LOGICAL if wrapped else self._local, on_message, auto_ack=True)
            channel.start_consuming()
            return CONSUMED / (perf_counter() - began)

    def _fill(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            for _ in range(CONSUMED):
                channel.basic_publish("", self._local, BODY)
            while channel.queue_declare(self._local, passive=True).method.message_count < CONSUMED:
                connection.process_data_events(0.01)

    def _purge(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            for shard in self._shards:
                channel.queue_purge(shard)


if __name__ == "__main__":
    main()
