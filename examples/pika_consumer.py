"""Consume every shard of a logical queue with pika: python examples/pika_consumer.py [COUNT]

Stops after COUNT messages. WARREN_URL says where the cluster is.
"""

import os
import sys

import pika

from interceptors import ShardedChannel
from sharding import Topology

url = os.environ.get("WARREN_URL", "amqp://guest:guest@localhost:5672/")
wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 100
seen = 0


def on_message(channel, method, _properties, body):  # type: ignore[no-untyped-def]  # as in pika's
    global seen
    seen += 1
    channel.basic_ack(method.delivery_tag)
    if seen == wanted:
        print("consumed", seen, "messages, the last one:", method.routing_key, body.decode())
        channel.stop_consuming()


with Topology(url) as topology, pika.BlockingConnection(pika.URLParameters(url)) as connection:
    channel = ShardedChannel(connection.channel(), topology)
    channel.basic_qos(prefetch_count=20)
    channel.basic_consume_all("images", on_message)
    channel.start_consuming()
