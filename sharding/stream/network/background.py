"""Work on a thread of its own, so that who waits for it keeps a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from sharding.stream.network.client import StreamClient

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """What `work` will return or raise. It is not cancelled when nobody waits any more."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def close_all(clients: Iterable[StreamClient], timeout: float) -> None:
    """Close all at the same time: one that hangs must not take the time of the others."""
    deadline = time.monotonic() + timeout
    threads = [
        threading.Thread(target=client.close, args=(timeout,), name="warren-close", daemon=True)
        for client in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
