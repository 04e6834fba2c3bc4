"""Publish to a logical queue with pika: python examples/pika_producer.py [COUNT]

WARREN_URL and WARREN_MANAGEMENT_URL say where the cluster is.
"""

import os
import sys

import pika

from interceptors import ShardedChannel
from sharding import Topology

url = os.environ.get("WARREN_URL", "amqp://guest:guest@localhost:5672/")
management = os.environ.get("WARREN_MANAGEMENT_URL", "http://localhost:15672")

with (
    Topology(url, management_urls=[management]) as topology,
    pika.BlockingConnection(pika.URLParameters(url)) as connection,
):
    channel = ShardedChannel(connection.channel(), topology)
    two_each = {"x-shards-per-node": 2}
    channel.exchange_declare("images", "x-modulus-hash", durable=True, arguments=two_each)
    channel.confirm_delivery()
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
        channel.basic_publish("images", routing_key=f"user-{number}", body=b"picture %d" % number)
    print("user-42 goes to", channel.explain("images", "user-42"))
