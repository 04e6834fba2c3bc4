"""Everything through a load balancer: python examples/stream_balancer.py

Producers still end at the leader and consumers at replicas. WARREN_STREAM_URL is the balancer.
"""

import os

from sharding.stream import StreamEnvironment

url = os.environ.get("WARREN_STREAM_URL", "rabbitmq-stream://guest:guest@localhost:5552")

with StreamEnvironment(url, load_balancer=True) as environment:
    environment.create_stream("events", exist_ok=True)
    with environment.producer("events") as producer:
        producer.send_many([b"event %d" % number for number in range(1_000)])
        producer.flush(timeout=30).raise_for_failures()
    with environment.consumer("events", offset="first") as consumer:
        print("first:", next(consumer.messages(timeout=30)).body.decode())
        route = environment.route("events")
        print("leader:", route.leader, "· replicas:", *route.replicas)
        print("read from:", *consumer.nodes.values())
