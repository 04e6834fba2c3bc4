"""Share the messages of a logical queue with other workers: python examples/worker.py [COUNT]

Start it several times: each gets its share of the shards, and those of one that dies go to the
others. Stops after COUNT messages or at SIGTERM. WARREN_URL says where the cluster is.
"""

import os
import sys

from sharding import Topology
from sharding.groups import ConsumerGroup, Delivery, GroupOptions

url = os.environ.get("WARREN_URL", "amqp://guest:guest@localhost:5672/")
wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 100
seen = 0


def handle(delivery: Delivery) -> None:
    """Acknowledged when it returns, tried again when it raises."""
    global seen
    seen += 1
    if seen == wanted:
        print("handled", seen, "messages, the last one:", delivery.key, delivery.body.decode())
        group.stop()


with Topology(url) as topology:
    group = ConsumerGroup(topology, "images", handle, options=GroupOptions(prefetch=20))
    group.run()
