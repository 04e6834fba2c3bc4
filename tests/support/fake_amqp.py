"""A peer that greets as a broker of any version, and opens connections; nothing else works."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pika.frame
import pika.spec
from pika.exceptions import AMQPError

from tests.cluster.waiting import PATIENCE


class FakeAmqp:
    """Listens on loopback until the `with` block ends."""

    def __init__(self, version: str) -> None:
        self._properties: dict[str, Any] = {
            "product": "RabbitMQ",
            "version": version,
            "capabilities": {},
        }
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self._listener.getsockname()[1]}/"

    def __enter__(self) -> FakeAmqp:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(PATIENCE)
                try:
                    self._greet(connection)
                except (OSError, AMQPError):
                    continue

    def _greet(self, connection: socket.socket) -> None:
        connection.recv(8)
        _send(connection, pika.spec.Connection.Start(server_properties=self._properties))
        received = b""
        while data := connection.recv(4096):
            received += data
            while True:
                consumed, frame = pika.frame.decode_frame(received)
                if frame is None:
                    break
                received = received[consumed:]
                answer = _answer(frame)
                if answer is None:
                    return
                _send(connection, answer)


def _answer(frame: Any) -> Any:
    asked = type(frame.method)
    if asked is pika.spec.Connection.StartOk:
        return pika.spec.Connection.Tune(channel_max=10, frame_max=131_072, heartbeat=0)
    if asked is pika.spec.Connection.Open:
        return pika.spec.Connection.OpenOk()
    return () if asked is pika.spec.Connection.TuneOk else None


def _send(connection: socket.socket, method: Any) -> None:
    if method:
        connection.sendall(pika.frame.Method(0, method).marshal())
