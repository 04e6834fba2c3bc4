"""A broker with TLS, for tests that look at who is trusted."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from sharding.stream.protocol.constants import Broker
from tests.cluster.cluster import Cluster
from tests.support.certificates import Authority

NAME = "broker.test"

_CONFIGURATION = """
ssl_options.cacertfile = {authority}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {key}
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = false
ssl_cert_login_from = common_name
stream.listeners.ssl.1 = $address:$stream_tls
stream.advertised_tls_host = $address
stream.advertised_tls_port = $stream_tls
auth_mechanisms.1 = PLAIN
auth_mechanisms.2 = EXTERNAL
"""


@dataclass(frozen=True)
class Secured:
    """A node with a TLS listener, and who is trusted there."""

    plain: Broker
    tls: Broker
    amqp_url: str
    authority: Authority
    version: str

    @classmethod
    def of(cls, cluster: Cluster, version: str, made: Path, folder: Path) -> Secured:
        """The node of a cluster whose `configuration` was made in the folder `made`.

        What it signs lies in `folder`: several processes may use one broker.
        """
        authority = shutil.copytree(made / f"authority-{version}", folder / "authority")
        endpoint = cluster.nodes[0].endpoint
        return cls(
            Broker(endpoint.address, endpoint.ports["stream"]),
            Broker(endpoint.address, endpoint.ports["stream_tls"]),
            endpoint.amqp_url,
            Authority(authority),
            version,
        )


def configuration(folder: Path, version: str) -> str:
    """What makes a node such a broker; its certificates are put into the folder."""
    files = folder / f"authority-{version}"
    files.mkdir()
    authority = Authority(files)
    # The node's address is not known yet, but it is one of these.
    addresses = ",".join(f"IP:127.0.{block}.1" for block in range(1, 120))
    server = authority.sign("server", f"DNS:{NAME},{addresses}")
    anonymous = "" if version == "3.10" else "auth_mechanisms.3 = ANONYMOUS\n"
    return anonymous + _CONFIGURATION.format(
        authority=authority.certificate, certificate=server.certificate, key=server.key
    )
