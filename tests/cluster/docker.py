"""A node as a Docker container, through testcontainers.

Containers publish their ports at the same loopback addresses that native nodes use, so whatever
talks to a cluster need not know which kind it is. Each carries the cluster's folder as a label, by
which any process finds it again.
"""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tests.cluster import folders
from tests.cluster.configuration import configuration
from tests.cluster.nodes import Endpoint, ends_with_a_boot

LABEL = "warren.cluster"
_INSIDE = {"amqp": 5672, "management": 15672, "stream": 5552}


@cache
def engine_answers() -> bool:
    """Ask whether an engine is there, without the client: it leaks sockets when there is none."""
    host = urlsplit(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
    try:
        with _connect(host) as connection:
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
            return b" 200 " in connection.recv(256)
    except (OSError, ValueError):
        return False


def _connect(host: SplitResult) -> socket.socket:
    if host.scheme == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(5)
        try:
            connection.connect(host.path)
        except OSError:
            connection.close()
            raise
        return connection
    return socket.create_connection((host.hostname or "localhost", host.port or 2375), timeout=5)


def name_inside(endpoint_address: str) -> str:
    """The node's name on the cluster's own network: addresses of the host mean nothing there."""
    return "rabbit@rmq" + endpoint_address.rpartition(".")[2]


def remove_cluster(name: str) -> None:
    """Remove what the engine still holds of a cluster."""
    for container in _engine().containers.list(all=True, filters={"label": f"{LABEL}={name}"}):
        container.remove(force=True, v=True)
    for network in _engine().networks.list(names=[_network(name)]):
        network.remove()


@dataclass(frozen=True)
class DockerNode:
    record: folders.Record
    endpoint: Endpoint

    @property
    def folder(self) -> Path:
        return folders.cluster_folder(self.record.name) / self.endpoint.address

    def start(self) -> None:
        existing = self._container()
        if existing is not None:
            existing.start()
            return
        self._write_files()
        self._create()

    def stop(self) -> None:
        self.thaw()
        self._here().stop(timeout=60)

    def kill(self) -> None:
        self._here().kill()

    def freeze(self) -> None:
        self._here().pause()

    def thaw(self) -> None:
        if self._here().status == "paused":
            self._here().unpause()

    def running(self) -> bool:
        container = self._container()
        return container is not None and container.status in ("running", "paused")

    def remove(self) -> None:
        container = self._container()
        if container is not None:
            container.remove(force=True, v=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def ctl(self, *arguments: str) -> str:
        code, output = self._here().exec_run(["rabbitmqctl", *arguments])
        if code:
            raise RuntimeError(f"rabbitmqctl {arguments[0]}: {output.decode()}")
        return str(output.decode())

    def ask_cluster(self, expression: str) -> str:
        return self.ctl("eval", f"{expression}.")

    def has_booted(self) -> bool:
        container = self._container()
        return container is not None and ends_with_a_boot(container.logs().decode())

    def last_words(self) -> str:
        container = self._container()
        return container.logs(tail=25).decode() if container is not None else "no container"

    def _write_files(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        inside = _INSIDE | {port: self.endpoint.ports[port] for port in self.record.extra_ports}
        (self.folder / "enabled_plugins").write_text(f"[{','.join(self.record.plugins)}].\n")
        (self.folder / "rabbitmq.conf").write_text(
            configuration(self.record, self.endpoint, "0.0.0.0", inside)
        )

    def _create(self) -> None:
        from testcontainers.core.config import testcontainers_config
        from testcontainers.core.container import DockerContainer

        # Its reaper would end what `make up` means to keep; our own label does the cleaning.
        testcontainers_config.ryuk_disabled = True
        host = self.endpoint.name.partition("@")[2]
        if not _engine().networks.list(names=[_network(self.record.name)]):
            _engine().networks.create(_network(self.record.name), labels={LABEL: self.record.name})
        published = {
            f"{_INSIDE.get(name, port)}/tcp": (self.endpoint.address, port)
            for name, port in self.endpoint.ports.items()
            if name != "distribution"
        }
        container = DockerContainer(f"rabbitmq:{self.record.version}-management")
        container.with_name(self._container_name())
        container.with_env("RABBITMQ_NODENAME", self.endpoint.name)
        container.with_env("RABBITMQ_ERLANG_COOKIE", f"warren-{self.record.name}")
        for file in ("rabbitmq.conf", "enabled_plugins"):
            container.with_volume_mapping(str(self.folder / file), f"/etc/rabbitmq/{file}")
        container.with_kwargs(
            hostname=host,
            network=_network(self.record.name),
            labels={LABEL: self.record.name},
            ports=published,
        )
        container.start()

    def _container_name(self) -> str:
        return f"warren-{self.record.name}-{self.endpoint.address}"

    def _container(self) -> Any | None:
        import docker.errors

        try:
            return _engine().containers.get(self._container_name())
        except docker.errors.NotFound:
            return None

    def _here(self) -> Any:
        container = self._container()
        if container is None:
            raise RuntimeError(f"node {self.endpoint.name} has no container")
        return container


def _engine() -> Any:
    import docker

    return docker.from_env(timeout=60)


def _network(cluster: str) -> str:
    return f"warren-{cluster}"
