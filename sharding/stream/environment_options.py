"""What can be asked of an environment."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sharding.errors import InvalidInput
from sharding.stream.protocol import Broker, Limits
from sharding.stream.routes.rules import RouteOptions

Mechanism = Literal["PLAIN", "EXTERNAL", "ANONYMOUS"]
AddressResolver = Callable[[Broker], Broker]


@dataclass(frozen=True)
class EnvironmentOptions:
    """Everything has a default that works for a cluster that can be reached node by node."""

    load_balancer: bool = False
    """The addresses lead to a load balancer: connections are made until the wanted node answers."""
    address_resolver: AddressResolver | None = None
    """From the address that a node advertises to the one to dial, where they differ. With a load
    balancer the default is the first address of the environment."""
    tls: ssl.SSLContext | None = None
    """How to check certificates; the default for +tls addresses trusts the system's authorities."""
    server_name: str | None = None
    """The name that certificates must have, if not the host that is dialled."""
    mechanism: Mechanism = "PLAIN"
    own_hosts: frozenset[str] = field(default_factory=lambda: frozenset({socket.gethostname()}))
    """Names and addresses of this host, as nodes on it advertise themselves."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """From hosts, the own ones included, to zones; consumers prefer replicas in their own."""
    amqp_url: str | None = field(default=None, repr=False)
    """Where super streams are made on brokers before 3.13."""
    limits: Limits = Limits()
    routes: RouteOptions = RouteOptions()
    heartbeat: float = 60.0
    """Seconds; a connection that is silent for twice as long is dead."""
    connect_timeout: float = 5.0
    """For one connection: address look-up, TCP, TLS and login."""
    request_timeout: float = 10.0
    """For one answer of a broker."""
    idle_timeout: float = 30.0
    """After which a connection that nobody uses is closed."""
    tries_per_node: int = 10
    """How often a load balancer is asked for a node, for each node of the cluster."""
    connection_name: str = "warren"
    """What the broker's management shows."""

    def __post_init__(self) -> None:
        for name in ("heartbeat", "connect_timeout", "request_timeout", "tries_per_node"):
            if not getattr(self, name) > 0:
                raise InvalidInput(name, "must be more than 0", getattr(self, name))
        if self.mechanism not in ("PLAIN", "EXTERNAL", "ANONYMOUS"):
            raise InvalidInput("mechanism", "must be PLAIN, EXTERNAL or ANONYMOUS", self.mechanism)
        if isinstance(self.own_hosts, str):
            raise InvalidInput("own_hosts", "must be a set of names", self.own_hosts)
