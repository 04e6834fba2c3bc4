"""The sending half of a connection: whole frames, from many threads, none waiting without bound.

The rules:

* `send` is for every thread but the reading one. It holds a lock until its frames are written, so
  that frames are never mixed, and gives up at its deadline: with `TryLater` if nothing was written,
  with `ConnectionLost` if a frame was cut, as the connection is then useless.
* A transport that keeps what it did not take (TLS) has begun to send it. It is posted then: given
  up by its sender, and still the next to be written.
* The reading thread must never wait to write: a broker that waits for us to read does not read
  what we write, and both would wait for ever. It `post`s its frames (heartbeats, answers). They are
  written at once if nobody else is writing and the socket takes them; else by the thread that is
  writing, after its own frames, or by `flush` when the socket can be written again.
* What is posted is bounded: a peer that asks more than it lets us answer breaks the protocol.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from sharding.errors import TryLater, WarrenError
from sharding.stream.connections.transport import Buffer, Transport
from sharding.stream.errors import ConnectionLost, ProtocolError

MOST_POSTED = 1024  # four for each of the 255 subscriptions that a connection can have


class Outgoing:
    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._writing = threading.Lock()
        self._posted: deque[memoryview] = deque()
        self._ended = False

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Write the buffers as one, after anyone else's."""
        if not self._writing.acquire(timeout=max(deadline - self._clock(), 0)):
            raise TryLater("another thread's frames were not taken by the peer in time")
        try:
            self._write_posted(deadline)
            self._write(buffers, deadline)
        except WarrenError:
            raise
        except BaseException:
            # A signal handler's: a frame may be cut, and the next one must not be read as its rest.
            self._transport.shut_down()
            raise
        finally:
            self._done_writing()
        # What the reading thread could not write because of us. If that is late, ours is written.
        while self._posted and self._writing.acquire(blocking=False):
            try:
                self._write_posted(deadline)
            except TryLater:
                return
            finally:
                self._done_writing()

    def post(self, frame: bytes) -> None:
        """Write a frame now or soon, without waiting."""
        if len(self._posted) >= MOST_POSTED:
            raise ProtocolError(f"the peer does not take our answers: {MOST_POSTED} wait")
        self._posted.append(memoryview(frame))
        self.flush()

    def flush(self) -> None:
        """Write what is posted, as far as that is possible without waiting."""
        while self._posted and self._writing.acquire(blocking=False):
            try:
                if not self._write_some_posted():
                    return
            finally:
                self._done_writing()

    @property
    def waits_to_flush(self) -> bool:
        """Whether something is posted that only `flush` will write."""
        return bool(self._posted) and not self._writing.locked()

    def close(self, timeout: float) -> None:
        """Close the transport when no thread writes to it any more; one that still does so when the
        time is up closes it."""
        self._ended = True
        self._transport.shut_down()
        if self._writing.acquire(timeout=timeout):
            self._done_writing()

    def _done_writing(self) -> None:
        if self._ended:
            self._transport.close()
        self._writing.release()

    def _write_some_posted(self) -> bool:
        """Whether all of it was written."""
        while self._posted:
            frame = self._posted[0]
            written = self._transport.send([frame])
            if written < len(frame):
                self._posted[0] = frame[written:]
                return False
            self._posted.popleft()
        return True

    def _write_posted(self, deadline: float) -> None:
        while not self._write_some_posted():
            if not self._writable(deadline):
                raise TryLater("the peer takes nothing")

    def _write(self, buffers: Sequence[Buffer], deadline: float) -> None:
        left = _without(buffers, self._transport.send(buffers))
        while left:
            if not self._writable(deadline):
                if left is buffers:
                    if self._transport.keeps_what_it_refused:
                        self._posted.appendleft(memoryview(b"".join(buffers)))
                    raise TryLater("the peer takes nothing")
                raise ConnectionLost("the peer took a frame only in part")
            left = _without(left, self._transport.send(left))

    def _writable(self, deadline: float) -> bool:
        return self._transport.wait(deadline - self._clock(), to_send=True)


def _without(buffers: Sequence[Buffer], written: int) -> Sequence[Buffer]:
    """What is left of the buffers when so many bytes from the front are gone."""
    if not written:
        return buffers
    for number, buffer in enumerate(buffers):
        if written < len(buffer):
            return [memoryview(buffer)[written:], *buffers[number + 1 :]]
        written -= len(buffer)
    return ()
