"""A non-blocking socket, plain or TLS, that two threads may use at the same time.

One thread receives, others send (one at a time: the caller's lock sees to that). Nothing here waits
but `wait`. Two threads must not be inside OpenSSL with the same session (CPython lets them until
3.13), so TLS calls share a lock; they never block, so nobody waits long for it.

A socket is ended in two steps, because a closed file descriptor may at once be somebody else's:
`shut_down` wakes every thread that waits, and `close` follows when no thread uses it any more.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias

from sharding.stream.errors import ConnectionLost

Buffer: TypeAlias = bytes | bytearray | memoryview

MOST_BUFFERS = 512  # for one sendmsg; the kernel takes 1024


class Transport(Protocol):
    """What the client needs of a connection to its peer."""

    def receive_into(self, buffer: memoryview) -> int | None:
        """How many bytes came: 0 at the end, None if there are none now."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """How many bytes were taken, from the front; 0 if none can be now."""

    def wait(self, timeout: float, *, to_receive: bool = False, to_send: bool = False) -> bool:
        """Wait until something can be received or sent, or the peer is gone; False if not."""

    def shut_down(self) -> None: ...

    def close(self) -> None: ...


class PlainTransport:
    """TCP."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    def receive_into(self, buffer: memoryview) -> int | None:
        try:
            return self._socket.recv_into(buffer)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"receiving failed: {error}") from error

    def send(self, buffers: Sequence[Buffer]) -> int:
        try:
            return self._socket.sendmsg(buffers[:MOST_BUFFERS])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLost(f"sending failed: {error}") from error

    def wait(self, timeout: float, *, to_receive: bool = False, to_send: bool = False) -> bool:
        return _wait(self._socket, timeout, to_receive, to_send)

    def shut_down(self) -> None:
        with suppress(OSError):  # the peer may have been quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TlsTransport:
    """TLS, after its handshake."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._session = threading.Lock()
        self._receiving_wants_to_send = False

    def receive_into(self, buffer: memoryview) -> int | None:
        try:
            with self._session:
                self._receiving_wants_to_send = False
                return self._socket.recv_into(buffer)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLWantWriteError:  # OpenSSL answers the peer's change of keys
            self._receiving_wants_to_send = True
            return None
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"receiving over TLS failed: {error}") from error

    def send(self, buffers: Sequence[Buffer]) -> int:
        # One record, not one for each small buffer. OpenSSL wants the same bytes again after it
        # could not take them; the caller's bytes do not change, but for more of them at the end.
        data = b"".join(buffers[:MOST_BUFFERS])
        try:
            with self._session:
                return self._socket.send(data)
        except ssl.SSLWantWriteError:
            return 0
        except ssl.SSLWantReadError as error:
            raise ConnectionLost("the peer wants to negotiate TLS anew: not supported") from error
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"sending over TLS failed: {error}") from error

    def wait(self, timeout: float, *, to_receive: bool = False, to_send: bool = False) -> bool:
        to_send = to_send or (to_receive and self._receiving_wants_to_send)
        return _wait(self._socket, timeout, to_receive, to_send)

    def shut_down(self) -> None:
        # Not SSLSocket.shutdown: it drops the session, and the next call would be in plain text.
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with self._session:
            self._socket.close()


def _wait(sock: socket.socket, timeout: float, to_receive: bool, to_send: bool) -> bool:
    poll = select.poll()
    poll.register(sock, (select.POLLIN if to_receive else 0) | (select.POLLOUT if to_send else 0))
    milliseconds = None if math.isinf(timeout) else math.ceil(max(timeout, 0) * 1000)
    return bool(poll.poll(milliseconds))
