"""A peer that does what a test tells it, on a real socket: well-behaved until then.

with FakeBroker() as broker:
    broker.on_connect = lambda peer: peer.open()
    client = connect(broker.address, ConnectOptions())
    broker.peer.send(b"rubbish")
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from types import TracebackType

from sharding.stream.protocol.constants import Broker, Key
from tests.cluster.waiting import PATIENCE
from tests.support.stream_frames import handshake


class Peer:
    """The broker's side of one connection. Everything that arrives is kept in `bytes_seen`."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.bytes_seen = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
            self.bytes_seen += more
        return data

    def next_frame(self) -> tuple[int, bytes]:
        """Key and what follows the version."""
        content = self.receive(struct.unpack(">I", self.receive(4))[0])
        key: int = struct.unpack_from(">H", content)[0]
        return key, content[4:]

    def next_frame_with(self, *keys: int) -> bytes:
        """The first frame with one of these keys; others are passed over."""
        while True:
            key, body = self.next_frame()
            if key in keys:
                return body

    def open(self, version: str = "4.0.5", *, until: int | None = None) -> None:
        """Do the broker's part of the handshake, or the first steps of it."""
        for number, data in enumerate(handshake(version)):
            if number == until:
                return
            self.next_frame()
            if number == 3:
                self.next_frame()  # Tune came first
            self.send(data)

    def answer_close(self) -> None:
        body = self.next_frame_with(Key.CLOSE)
        self.send(struct.pack(">IHH4sH", 10, 0x8000 | Key.CLOSE, 1, body[:4], 1))

    def drain(self) -> bytes:
        """Read until the other side ends the connection; all that ever came."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self.receive(1)
        return self.bytes_seen


class FakeBroker:
    """Listens, and runs `on_connect` in a thread for each connection."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.on_connect: Callable[[Peer], None] = Peer.open
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._tls = tls
        self._peers: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._serving: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._served: list[Peer] = []
        self.address = Broker(*self._listener.getsockname()[:2])

    @property
    def peer(self) -> Peer:
        """The next connection, when its `on_connect` has ended."""
        return self._peers.get(timeout=PATIENCE)

    def everything_seen(self) -> bytes:
        """What came over all connections, once both sides are done with them; over TLS, what came
        after its handshake."""
        for thread in self._serving:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "somebody still reads"
        return b"".join(peer.bytes_seen for peer in self._served)

    def __enter__(self) -> FakeBroker:
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(PATIENCE)  # after that no connection is added any more
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._serving:
            thread.join(PATIENCE)
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(PATIENCE)
                self._sockets.append(sock)
                serving = threading.Thread(target=self._serve, args=(sock,), daemon=True)
                self._serving.append(serving)
                serving.start()

    def _serve(self, sock: socket.socket) -> None:
        if self._tls is not None:
            try:
                sock = self._tls.wrap_socket(sock, server_side=True)
            except OSError:
                return
            self._sockets.append(sock)
        peer = Peer(sock)
        self._served.append(peer)
        # The other side is expected to leave in the middle of what a test does to it.
        with contextlib.suppress(EOFError, OSError):
            self.on_connect(peer)
        self._peers.put(peer)
