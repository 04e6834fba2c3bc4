"""A frozen node costs the streams that it leads, and no others (s12)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from sharding.stream import Broker, Producer, StreamEnvironment
from tests.cluster import Cluster, wait_until
from tests.cluster.waiting import PATIENCE
from tests.support import patient
from tests.support.streams import await_replicas, environment_of, fresh_stream, stream_address

pytestmark = pytest.mark.cluster


class Freezer:
    """A proxy for each node. From `freeze` on it takes nothing from who is connected to one."""

    def __init__(self) -> None:
        self._ports: dict[Broker, int] = {}
        self._sockets: list[socket.socket] = []
        self._frozen: Broker | None = None
        self._thawed = threading.Event()

    def resolve(self, node: Broker) -> Broker:
        if node not in self._ports:
            server = socket.create_server(("127.0.0.1", 0))
            self._sockets.append(server)
            self._ports[node] = server.getsockname()[1]
            threading.Thread(target=self._serve, args=(server, node), daemon=True).start()
        return Broker("127.0.0.1", self._ports[node])

    def freeze(self, node: Broker) -> None:
        self._frozen = node

    def close(self) -> None:
        self._frozen = None
        self._thawed.set()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _serve(self, server: socket.socket, node: Broker) -> None:
        with suppress(OSError):
            while True:
                here, _ = server.accept()
                there = socket.create_connection(node)
                self._sockets += (here, there)
                for ends in ((here, there), (there, here)):
                    threading.Thread(target=self._copy, args=(*ends, node), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, node: Broker) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if node == self._frozen:
                    self._thawed.wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    made = Freezer()
    yield made
    made.close()


def is_stuck(producer: Producer) -> bool:
    """Whether it has been writing one batch for a while."""
    (writer,) = producer._writers
    flying = list(writer._outbox._flying)
    since = flying[-1].sent_at if flying and writer._is_writing else None
    return since is not None and time.monotonic() - since > 1


def test_producers_of_healthy_nodes_go_on(cluster: Cluster, freezer: Freezer) -> None:
    led: dict[str, Broker] = {}
    with environment_of(cluster, **patient.STREAMS) as direct:
        for node in (*[cluster.nodes[0]] * 3, cluster.nodes[1]):
            name = fresh_stream()
            with StreamEnvironment(node.endpoint.stream_url, **patient.STREAMS) as there:
                there.create_stream(name)  # led by the node that is asked
            led[name] = Broker(*stream_address(node))
            await_replicas(direct, name)
        *ill, healthy = led
        with environment_of(
            cluster, address_resolver=freezer.resolve, **patient.STREAMS
        ) as through:
            good = through.producer(healthy)
            producers = [through.producer(stream, send_timeout=600) for stream in ill]
            freezer.freeze(led[ill[0]])
            # More than the sockets hold: the write waits for as long as this test lasts.
            large = [bytes(100_000)] * 300
            flooding = threading.Thread(target=producers[0].send_many, args=(large,), daemon=True)
            flooding.start()
            wait_until(lambda: is_stuck(producers[0]))
            for each in producers[1:]:  # a small one, which is written when it has lingered
                each.send(b"small")
            wait_until(lambda: any(map(is_stuck, producers[1:])))
            for _ in range(20):
                good.send(b"x")
                good.flush(PATIENCE).raise_for_failures()
            good.close()
            freezer.close()
            flooding.join(PATIENCE)
        for name in led:
            direct.delete_stream(name)
