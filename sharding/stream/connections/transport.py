"""A non-blocking socket, plain or TLS, that two threads may use at the same time.

One thread receives, others send (one at a time: the caller's lock sees to that). Nothing here waits
but `wait`. Two threads must not be inside OpenSSL with the same session (CPython lets them until
3.13), so TLS calls share a lock; they never block, so nobody waits long for it.

A socket is ended in two steps, because a closed file descriptor may at once be somebody else's:
`shut_down` wakes every thread that waits, and `close` follows when no thread uses it any more.
"""

from __future__ import annotations

import math
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol, TypeAlias

from sharding.errors import Unreachable
from sharding.stream.errors import ConnectionLost, PeerNotTrusted
from sharding.stream.protocol.constants import Broker

Buffer: TypeAlias = bytes | bytearray | memoryview

MOST_BUFFERS = 512  # for one sendmsg; the kernel takes 1024


class Transport(Protocol):
    """What the client needs of a connection to its peer."""

    keeps_what_it_refused: ClassVar[bool]
    """Whether bytes that were offered and not taken must be the first of the next `send`."""

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

    keeps_what_it_refused: ClassVar[bool] = False

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

    # OpenSSL has made a record of them, and sends that, whatever it is given next.
    keeps_what_it_refused: ClassVar[bool] = True

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
        # One record, not one for each small buffer.
        data = b"".join(buffers[:MOST_BUFFERS])
        try:
            with self._session:
                return self._socket.send(data)
        except ssl.SSLWantWriteError:
            return 0
        except ssl.SSLWantReadError as error:
            raise ConnectionLost("the peer wants to negotiate TLS again: not supported") from error
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


_Address: TypeAlias = tuple[socket.AddressFamily, Any]
"""A family, and what it wants to be connected to."""
_Clock: TypeAlias = Callable[[], float]


def dial(
    address: Broker,
    deadline: float,
    tls: ssl.SSLContext | None,
    server_name: str | None,
    clock: _Clock = time.monotonic,
) -> Transport:
    """A connection, over TLS if a context is given; `deadline` is a time of the `clock`.

    The certificate is checked against `server_name`, or else the host dialled. `PeerNotTrusted` if
    that fails, `Unreachable` otherwise.
    """
    sock = _connected(address, deadline, clock)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return PlainTransport(sock)
        sock = tls.wrap_socket(
            sock, server_hostname=server_name or address.host, do_handshake_on_connect=False
        )
        _shake_hands(sock, address, deadline, clock)
        return TlsTransport(sock)
    except BaseException:
        sock.close()
        raise


def _connected(address: Broker, deadline: float, clock: _Clock) -> socket.socket:
    """Tries every address of the name; one that hangs leaves the others their share of time."""
    candidates = resolved(address, deadline, clock)
    failures: list[str] = []
    for left, (family, where) in zip(range(len(candidates), 0, -1), candidates, strict=True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max((deadline - clock()) / left, 0.001))
            sock.connect(where)
        except OSError as error:
            sock.close()
            failures.append(f"{where[0]}: {error}")
        else:
            return sock
    raise Unreachable(f"no connection to {address}: {'; '.join(failures)}")


def resolved(address: Broker, deadline: float, clock: _Clock = time.monotonic) -> list[_Address]:
    """The addresses of a name. The system's resolver takes no deadline, so a thread asks it."""
    if numeric := _numeric(address):
        return numeric
    answers: queue.SimpleQueue[list[_Address] | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            answers.put([(family, where) for family, _, _, _, where in found])
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, name=f"warren-resolve-{address.host}", daemon=True).start()
    try:
        answer = answers.get(timeout=max(deadline - clock(), 0.001))
    except queue.Empty:
        raise Unreachable(f"the name {address.host!r} was not resolved in time") from None
    if isinstance(answer, Exception):
        raise Unreachable(f"the name {address.host!r} was not resolved: {answer}") from answer
    return answer


def _numeric(address: Broker) -> list[_Address]:
    """What needs no resolver, and so no thread that a busy machine may start late."""
    try:
        found = socket.getaddrinfo(
            *address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError):
        return []
    return [(family, where) for family, _, _, _, where in found]


def _shake_hands(sock: ssl.SSLSocket, address: Broker, deadline: float, clock: _Clock) -> None:
    sock.settimeout(max(deadline - clock(), 0.001))  # for the whole of it
    try:
        sock.do_handshake()
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message
        raise PeerNotTrusted(f"the certificate of {address} is not accepted: {reason}") from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise Unreachable(f"{address} ended the connection during the TLS handshake") from error
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        raise PeerNotTrusted(f"no TLS with {address}: {reason}; is it a TLS port?") from error
    except OSError as error:
        raise Unreachable(f"no TLS with {address} in time: {error}") from error
