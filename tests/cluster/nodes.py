"""What can be done with one node, however it is run."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

if TYPE_CHECKING:
    from sharding.cluster.management import Management

LISTENERS = ("amqp", "management", "stream")


class NotOurs(RuntimeError):
    """The cluster is run by somebody else: it can be used, but not stopped, cut or killed."""


@dataclass(frozen=True)
class Endpoint:
    """A node as clients see it."""

    name: str
    """The Erlang node name, `rmq1@127.0.1.1`."""
    address: str
    ports: dict[str, int]
    user: str = "guest"
    password: str = "guest"
    vhost: str = "/"

    @property
    def amqp_url(self) -> str:
        return self.url("amqp", f"{self.user}:{self.password}@")

    @property
    def stream_url(self) -> str:
        return self.url("stream", f"{self.user}:{self.password}@")

    def url(self, listener: str, login: str = "") -> str:
        """The address of the virtual host at one of the listeners `amqp` and `stream`."""
        scheme = {"amqp": "amqp", "stream": "rabbitmq-stream"}[listener]
        path = "" if self.vhost == "/" else quote(self.vhost, safe="")
        return f"{scheme}://{login}{self.address}:{self.ports[listener]}/{path}"

    @property
    def management(self) -> Management:
        # Not at the top: `prepare` imports this module where no package is installed yet.
        from tests.cluster.patient_management import PatientManagement

        url = f"http://{self.address}:{self.ports['management']}"
        return PatientManagement(url, self.user, self.password)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "address": self.address, "ports": self.ports}


class Driver(Protocol):
    """How one kind of source runs a node. Every method returns when the thing has happened."""

    def start(self) -> None:
        """Start the process; it is not waited for until it serves."""

    def stop(self) -> None:
        """Stop it as an operator would, with its data kept."""

    def kill(self) -> None:
        """Kill -9."""

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def running(self) -> bool: ...

    def remove(self) -> None:
        """Kill it and delete its data."""

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl against the node."""

    def ask_cluster(self, expression: str) -> str:
        """What an Erlang expression gives on a member of the node's cluster that may be another."""

    def has_booted(self) -> bool:
        """Whether it says that its start is complete: listeners answer some time before."""

    def last_words(self) -> str:
        """What its log complains of, for an error message."""


def ends_with_a_boot(log: str) -> bool:
    """Whether the newest start that a broker's log tells of is complete."""
    return log.rfind("Server startup complete") > log.rfind(" Starting RabbitMQ ")


def answers_tcp(host: str, port: int, greeting: bytes = b"") -> bool:
    """Whether a listener accepts, and answers the greeting if one is given."""
    try:
        with socket.create_connection((host, port), timeout=2) as connection:
            if not greeting:
                return True
            connection.sendall(greeting)
            return bool(connection.recv(1))
    except OSError:
        return False


def serves(endpoint: Endpoint) -> bool:
    """Whether every listener of the node answers, AMQP with its first frame."""
    return all(
        answers_tcp(endpoint.address, port, b"AMQP\0\0\x09\x01" if name == "amqp" else b"")
        for name, port in endpoint.ports.items()
        if name in LISTENERS
    )
