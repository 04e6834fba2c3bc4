"""Publish to a super stream: python examples/stream_producer.py [COUNT]

WARREN_STREAM_URL says where the cluster is; WARREN_URL is needed on brokers before 3.13 only.
"""

import os
import sys

from sharding.stream import StreamEnvironment

url = os.environ.get("WARREN_STREAM_URL", "rabbitmq-stream://guest:guest@localhost:5552")
count = int(sys.argv[1]) if len(sys.argv) > 1 else 100

with StreamEnvironment(url, amqp_url=os.environ.get("WARREN_URL")) as environment:
    environment.create_super_stream("invoices", partitions=3, exist_ok=True)
    with environment.producer("invoices") as producer:
        for number in range(count):
            # To the leader of the key's partition, which all stream clients agree on.
            producer.send(b"invoice %d" % number, key=f"customer-{number % 10}")
        report = producer.flush(timeout=30)
    report.raise_for_failures()
    print("stored", report.stored, "messages; customer-7 is in", producer.partition("customer-7"))
