"""Publish to a logical queue with aio-pika: python examples/aio_producer.py [COUNT]

WARREN_URL and WARREN_MANAGEMENT_URL say where the cluster is.
"""

import asyncio
import os
import sys

import aio_pika

from interceptors import AioShardedChannel
from sharding import Topology

url = os.environ.get("WARREN_URL", "amqp://guest:guest@localhost:5672/")
management = os.environ.get("WARREN_MANAGEMENT_URL", "http://localhost:15672")


async def main() -> None:
    with Topology(url, management_urls=[management]) as topology:
        async with await aio_pika.connect_robust(url) as connection:
            channel = AioShardedChannel(await connection.channel(), topology)
            images = await channel.declare_exchange(
                "images", "x-modulus-hash", durable=True, arguments={"x-shards-per-node": 2}
            )
            for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
                message = aio_pika.Message(b"picture %d" % number)
                await images.publish(message, routing_key=f"user-{number}")
            print("user-42 goes to", channel.explain("images", "user-42"))


asyncio.run(main())
