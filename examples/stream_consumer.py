"""Read a super stream from its replicas, as Arrow: python examples/stream_consumer.py [COUNT]

Stops after COUNT messages. WARREN_STREAM_URL says where the cluster is.
"""

import os
import sys

from sharding.stream import Columns, StreamEnvironment

url = os.environ.get("WARREN_STREAM_URL", "rabbitmq-stream://guest:guest@localhost:5552")
wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 100
seen = 0

with (
    StreamEnvironment(url) as environment,
    environment.consumer("invoices", offset="first", columns=Columns(key=True)) as consumer,
):
    for batch in consumer.batches(timeout=30):
        seen += batch.num_rows
        if seen >= wanted:
            break
    last = batch.to_pylist()[-1]
    print("read", seen, "messages, the last one:", last["key"], last["body"].decode())
