"""A broker with TLS, for tests that look at who is trusted."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sharding.stream.protocol import Broker
from tests.certificates import Authority
from tests.cluster import Cluster, sources
from tests.cluster.folders import clusters_folder

NAME = "broker.test"
CONFIG = """
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


@contextmanager
def secured_broker(version: str, folder: Path) -> Iterator[Secured]:
    """One node; who trusts whom is kept in `folder`."""
    if sources.choose(version) in ("docker", "environment"):
        pytest.skip("the broker can't be given the certificates of the test")
    authority = Authority(folder)
    # The node's address is not known yet, but it is one of these.
    addresses = ",".join(f"IP:127.0.{block}.1" for block in range(1, 120))
    server = authority.sign("server", f"DNS:{NAME},{addresses}")
    shown = [
        _shown_to_broker(path) for path in (authority.certificate, server.certificate, server.key)
    ]
    config = CONFIG.format(authority=shown[0], certificate=shown[1], key=shown[2])
    anonymous = "" if version == "3.10" else "auth_mechanisms.3 = ANONYMOUS\n"
    try:
        with Cluster.start(
            nodes=1,
            version=version,
            plugins=["rabbitmq_auth_mechanism_ssl"],
            config=config + anonymous,
            extra_ports=("stream_tls",),
        ) as cluster:
            endpoint = cluster.nodes[0].endpoint
            yield Secured(
                Broker(endpoint.address, endpoint.ports["stream"]),
                Broker(endpoint.address, endpoint.ports["stream_tls"]),
                endpoint.amqp_url,
                authority,
                version,
            )
    finally:
        for path in shown:
            path.unlink()


def _shown_to_broker(path: Path) -> Path:
    """A copy where a broker in a root folder of its own sees it."""
    copy = clusters_folder() / f".{secrets.token_hex(4)}-{path.name}"
    shutil.copy(path, copy)
    return copy
