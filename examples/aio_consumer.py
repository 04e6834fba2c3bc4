"""Consume every shard of a logical queue with aio-pika: python examples/aio_consumer.py [COUNT]

Stops after COUNT messages. WARREN_URL says where the cluster is.
"""

import asyncio
import os
import sys

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

from interceptors import AioShardedChannel
from sharding import Topology

url = os.environ.get("WARREN_URL", "amqp://guest:guest@localhost:5672/")
wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 100


async def main() -> None:
    messages: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    with Topology(url) as topology:
        async with await aio_pika.connect_robust(url) as connection:
            channel = AioShardedChannel(await connection.channel(), topology)
            await channel.set_qos(prefetch_count=20)
            await channel.consume_all("images", messages.put)
            for _ in range(wanted):
                message = await messages.get()
                await message.ack()
            print("consumed", wanted, "messages, the last one:", message.routing_key)


asyncio.run(main())
