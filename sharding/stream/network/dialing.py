"""How a connection to an address is made: name, TCP, TLS, all before one deadline."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from sharding.errors import Unreachable
from sharding.stream.errors import PeerNotTrusted
from sharding.stream.network.transport import PlainTransport, TlsTransport, Transport
from sharding.stream.protocol import Broker

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
