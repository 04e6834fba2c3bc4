"""A single active consumer that writes down what it handled, for tests that harm it.

    python -m tests.faults.single_active_worker SUPER_STREAM FILE HOW URL...

HOW says how offsets are stored: `messages` and `seconds` by themselves, `by-hand` by the
application. Its lines are like those of `group_worker`: A, it has the turn at a partition; E, a
message is handled. SIGUSR2 cuts its connections.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

from sharding.stream import Consumer, StreamEnvironment
from sharding.stream.errors import NotActive
from sharding.stream.options import ConsumerOptions
from tests.faults.group_worker import Recorder

EVERY = 50
HEARTBEAT = 3
OPTIONS = {
    "messages": ConsumerOptions(name="messages", single_active=True, store_every_messages=EVERY),
    "seconds": ConsumerOptions(name="seconds", single_active=True, store_every_seconds=0.5),
    "by-hand": ConsumerOptions(name="by-hand", single_active=True),
}
"""All from "next" on: whoever takes over must know what that was."""


def main() -> None:
    super_stream, path, how, *urls = sys.argv[1:]
    logging.basicConfig(level="WARNING", format="%(asctime)s %(name)s %(message)s")
    faulthandler.register(signal.SIGUSR1)  # to see where one hangs
    signal.signal(signal.SIGUSR2, lambda *_: cut())
    recorder = Recorder(path)
    with (
        StreamEnvironment(*urls, heartbeat=HEARTBEAT) as environment,
        environment.consumer(super_stream, OPTIONS[how]) as consumer,
    ):
        threading.Thread(target=watch, args=(consumer, recorder), daemon=True).start()
        unstored = 0
        for message in consumer.messages():
            assert message.stream is not None
            recorder.write("E", message.stream, "", int(message.body))
            unstored += 1
            if how == "by-hand" and unstored == EVERY:
                unstored = 0
                with suppress(NotActive):  # another has it by now, and handles these again
                    consumer.store_offset()


def watch(consumer: Consumer, recorder: Recorder) -> None:
    before: set[str] = set()
    while True:
        now = set(consumer.active)
        for stream in now - before:
            recorder.write("A", stream)
        before = now
        time.sleep(0.02)


def cut() -> None:
    """End every connection, as a network that drops them does."""
    for each in gc.get_objects():
        if isinstance(each, socket.socket) and each.type == socket.SOCK_STREAM:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
