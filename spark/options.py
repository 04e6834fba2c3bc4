"""How to reach the cluster: the options that reading and writing share.

| option | default | meaning |
|---|---|---|
| `uri` | `rabbitmq-stream://localhost:5552` | one or more addresses, with commas between, of one \
cluster; `rabbitmq-stream+tls://` for TLS; the path is the virtual host; never a user or password |
| `user`, `userFile` | `WARREN_USER`, else guest | see `credentials` |
| `password`, `passwordFile`, `passwordEnv` | `WARREN_PASSWORD`, else guest | see `credentials` |
| `mechanism` | `plain` | `plain`, `external` (a TLS certificate), `anonymous` |
| `loadBalancer` | `false` | the first address leads to a load balancer |
| `tlsCaFile` | the system's | the authorities to trust, a PEM file on each executor |
| `tlsCertificateFile`, `tlsKeyFile` | none | the client's own certificate and key |
| `tlsServerName` | the host dialled | the name that certificates must have |
| `zones` | none | a JSON object from hosts to zones, the executors' own hosts included |
| `connectTimeout` | `5s` | for one connection |
| `requestTimeout` | `10s` | for one answer of a broker |
| `heartbeat` | `60s` | a connection that is silent for twice as long is dead |

The own host is compared by its name; where that is not the name the nodes know (in containers),
the environment variable `WARREN_OWN_HOSTS` adds others, with commas between.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sharding.errors import LocalError
from spark.credentials import Credentials, uri_without_login
from spark.option_values import BadOption, OptionValues

if TYPE_CHECKING:
    from sharding.stream.environment import EnvironmentOptions

OWN_HOSTS_VARIABLE = "WARREN_OWN_HOSTS"
_DEFAULT_URI = "rabbitmq-stream://localhost:5552"
_PLAIN, _TLS = "rabbitmq-stream", "rabbitmq-stream+tls"

Mechanism = Literal["PLAIN", "EXTERNAL", "ANONYMOUS"]
_MECHANISMS: dict[str, Mechanism] = {
    "plain": "PLAIN",
    "external": "EXTERNAL",
    "anonymous": "ANONYMOUS",
}


@dataclass(frozen=True)
class Tls:
    """Where certificates are found, in the process that connects."""

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None

    def context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                # An encrypted key is refused: its password would be asked for at a terminal.
                context.load_cert_chain(self.certificate_file, self.key_file, password=_no_password)
        except (OSError, ValueError) as error:
            files = [self.ca_file, self.certificate_file, self.key_file]
            named = ", ".join(file for file in files if file)
            raise LocalError(
                f"options tlsCaFile, tlsCertificateFile, tlsKeyFile: {named} can't be used in this "
                f"process ({error}); every executor needs them"
            ) from None
        return context


@dataclass(frozen=True)
class ConnectOptions:
    """How to reach the cluster. Equal options share connections, so it can be a dict's key."""

    uris: tuple[str, ...] = (_DEFAULT_URI,)
    credentials: Credentials = field(default_factory=Credentials)
    mechanism: Mechanism = "PLAIN"
    load_balancer: bool = False
    tls: Tls | None = None
    zones: tuple[tuple[str, str], ...] = ()
    connect_timeout: float = 5.0
    request_timeout: float = 10.0
    heartbeat: float = 60.0

    @classmethod
    def parse(cls, values: OptionValues) -> ConnectOptions:
        uris = values.names("uri") or (_DEFAULT_URI,)
        schemes = {uri_without_login("uri", uri).scheme for uri in uris}
        if len(schemes) > 1 or not schemes <= {_PLAIN, _TLS}:
            raise BadOption("uri", f"must begin with {_PLAIN}:// or {_TLS}://", ", ".join(uris))
        return cls(
            uris=uris,
            credentials=Credentials.parse(values),
            mechanism=values.choice("mechanism", _MECHANISMS, "PLAIN"),
            load_balancer=values.boolean("loadBalancer", False),
            tls=_tls(values, _TLS in schemes),
            zones=_zones(values),
            connect_timeout=values.seconds("connectTimeout", 5.0),
            request_timeout=values.seconds("requestTimeout", 10.0),
            heartbeat=values.seconds("heartbeat", 60.0),
        )

    @property
    def vhost(self) -> str:
        from sharding.stream.uris import StreamUri

        return StreamUri.parse(self.uris[0]).vhost

    def environment_options(
        self, environment: Mapping[str, str] = os.environ
    ) -> EnvironmentOptions:
        """The stream client's options, for this process."""
        from sharding.stream.environment import EnvironmentOptions

        return EnvironmentOptions(
            load_balancer=self.load_balancer,
            tls=self.tls.context() if self.tls else None,
            server_name=self.tls.server_name if self.tls else None,
            mechanism=self.mechanism,
            own_hosts=own_hosts(environment),
            zones=dict(self.zones),
            connect_timeout=self.connect_timeout,
            request_timeout=self.request_timeout,
            heartbeat=self.heartbeat,
            connection_name="warren-spark",
        )


def own_hosts(environment: Mapping[str, str]) -> frozenset[str]:
    """The names of this host."""
    others = environment.get(OWN_HOSTS_VARIABLE, "").split(",")
    return frozenset({socket.gethostname(), *(name.strip() for name in others if name.strip())})


def _tls(values: OptionValues, wanted: bool) -> Tls | None:
    tls = Tls(
        ca_file=values.text("tlsCaFile"),
        certificate_file=values.text("tlsCertificateFile"),
        key_file=values.text("tlsKeyFile"),
        server_name=values.text("tlsServerName"),
    )
    if not wanted and tls != Tls():
        raise BadOption(
            "uri", f"must begin with {_TLS}:// for the tls… options", values.text("uri")
        )
    if tls.key_file is not None and tls.certificate_file is None:
        raise BadOption("tlsKeyFile", "needs tlsCertificateFile", tls.key_file)
    return tls if wanted else None


def _zones(values: OptionValues) -> tuple[tuple[str, str], ...]:
    zones = values.json_object("zones") or {}
    pairs = [(host, zone) for host, zone in sorted(zones.items()) if isinstance(zone, str)]
    if len(pairs) < len(zones):
        raise BadOption("zones", "must be a JSON object from hosts to zones, all text", zones)
    return tuple(pairs)


def _no_password() -> str:
    raise ValueError("the key needs a password")
