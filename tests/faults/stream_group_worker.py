"""A worker of a stream group that writes down what it does, for tests that harm it.

    python -m tests.faults.stream_group_worker STREAM FILE URL...

Its lines are those of `group_worker`. HEARTBEAT in the environment says how many seconds. While
there is a file FILE.hold, handlers stay inside the message they have begun, which a line W says.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from sharding.groups import Delivery, Retry
from sharding.groups.streams.group import StreamConsumerGroup
from sharding.groups.streams.options import StreamGroupOptions
from sharding.stream import StreamEnvironment
from tests.faults.group_worker import FAILS, Recorder

GROUP = "billing"
HOLD = ".hold"
OPTIONS = StreamGroupOptions(
    prefetch=30,
    parallelism=3,
    retry=Retry(first_delay=0.02),
    store_every_messages=50,
    store_every_seconds=0.5,
    follow_interval=1.0,
)


def main() -> None:
    stream, path, *urls = sys.argv[1:]
    logging.basicConfig(
        level=os.environ.get("WARREN_LOG", "WARNING"),
        format="%(asctime)s %(name)s %(message)s",
    )
    faulthandler.register(signal.SIGUSR1)  # to see where one hangs
    recorder, chance = Recorder(path), random.Random()
    hold = Path(path).with_suffix(HOLD)

    def handle(delivery: Delivery) -> None:
        number = int(delivery.body)
        recorder.write("B", delivery.shard, delivery.key, number)
        time.sleep(chance.uniform(0, 0.004))  # the work
        if hold.exists():
            recorder.write("W", delivery.shard, delivery.key, number)
            while hold.exists():
                time.sleep(0.01)
        if delivery.attempt == 1 and chance.random() < FAILS:
            recorder.write("F", delivery.shard, delivery.key, number)
            raise ValueError("now and then")
        recorder.write("E", delivery.shard, delivery.key, number)

    def watch(group: StreamConsumerGroup) -> None:
        before = None
        while True:
            held = len(group.shards)
            if held != before:
                recorder.write("H", str(held))
                before = held
            time.sleep(0.02)

    options = replace(OPTIONS, heartbeat=int(os.environ.get("HEARTBEAT", "5")))
    with StreamEnvironment(*urls, heartbeat=options.heartbeat) as environment:
        group = StreamConsumerGroup(environment, stream, handle, group=GROUP, options=options)
        threading.Thread(target=watch, args=(group,), daemon=True).start()
        group.run()


if __name__ == "__main__":
    main()
