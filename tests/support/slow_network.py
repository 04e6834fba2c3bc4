"""A way to a broker that can hold back what clients send, for as long as a test likes."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self


class SlowNetwork:
    """Leads to one address. What is held back arrives when it is let go, also where the client has
    gone meanwhile, as packets do."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self._ways: list[_Way] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.close()
        self.let_go()

    def hold(self) -> None:
        """Hold back what comes from now on over the connections that there are."""
        for way in self._ways:
            way.is_clear.clear()

    def let_go(self) -> None:
        for way in self._ways:
            way.is_clear.set()

    @property
    def is_holding(self) -> bool:
        """Whether something is on its way that has not arrived."""
        return any(way.is_holding for way in self._ways)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._ways.append(_Way(client, socket.create_connection(self._target)))


class _Way:
    """One connection."""

    def __init__(self, client: socket.socket, broker: socket.socket) -> None:
        self.is_clear = threading.Event()
        self.is_clear.set()
        self.is_holding = False
        self._client, self._broker = client, broker
        for carry in (self._there, self._back):
            threading.Thread(target=carry, daemon=True).start()

    def _there(self) -> None:
        with self._broker:
            while data := _received(self._client):
                self.is_holding = not self.is_clear.is_set()
                self.is_clear.wait()
                self.is_holding = False
                if not _sent(self._broker, data):
                    return

    def _back(self) -> None:
        with self._client:
            while (data := _received(self._broker)) and _sent(self._client, data):
                pass


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65_536)
    except OSError:
        return b""


def _sent(connection: socket.socket, data: bytes) -> bool:
    try:
        connection.sendall(data)
    except OSError:
        return False
    return True
