"""Share a super stream with other workers: python examples/stream_worker.py [COUNT]

Start it several times: each gets its share of the partitions, and those of one that dies go to the
others. Stops after COUNT messages or at SIGTERM; the next start goes on there. WARREN_STREAM_URL
says where the cluster is. Needs RabbitMQ 3.11.
"""

import os
import sys

from sharding.groups import Delivery, StreamConsumerGroup, StreamGroupOptions
from sharding.stream import StreamEnvironment

url = os.environ.get("WARREN_STREAM_URL", "rabbitmq-stream://guest:guest@localhost:5552")
wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 100
seen = 0


def handle(delivery: Delivery) -> None:
    """The group's offset passes the message when this returns; it is tried again when it raises."""
    global seen
    seen += 1
    if seen == wanted:
        print("handled", seen, "messages, the last one:", delivery.key, delivery.body.decode())
        group.stop()


with StreamEnvironment(url, heartbeat=5) as environment:
    options = StreamGroupOptions(prefetch=20)
    group = StreamConsumerGroup(environment, "invoices", handle, group="billing", options=options)
    group.run()
