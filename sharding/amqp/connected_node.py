"""Which node a connection is on.

The peer's address says it where clients connect to nodes directly. Behind a load balancer it does
not, and the node is asked for its reply-to token, on a channel of its own.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from sharding.maps.shard_map import Node


def node_at(peer: tuple[str, int] | None, nodes: Iterable[Node]) -> str | None:
    """The node that listens at the address a socket is connected to.

    None also if several are known there: then it is a balancer's.
    """
    if peer is None:
        return None
    found = {
        node.name
        for node in nodes
        for address in node.addresses
        if address.port == peer[1] and peer[0] in _numeric(address.host)
    }
    return found.pop() if len(found) == 1 else None


def node_with_token(reply_to: str, nodes: Iterable[Node]) -> str | None:
    token = node_token(reply_to)
    return next((node.name for node in nodes if node.reply_token == token), None)


def peer_of(connection: Any) -> tuple[str, int] | None:
    """The address at the other end of a pika connection's socket."""
    transport: Any = getattr(connection, "_transport", None)
    sock = getattr(transport, "_sock", None)
    if sock is None and hasattr(transport, "get_extra_info"):
        sock = transport.get_extra_info("socket")
    if sock is None:
        return None
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return None
    return str(host), int(port)


@lru_cache(maxsize=1024)
def _numeric(host: str) -> frozenset[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return frozenset({host})
    return frozenset({host, *(str(entry[4][0]) for entry in found)})


def node_token(reply_to: str) -> str:
    """The part of a direct reply-to address that names the node, the same for all connections.

    The address is `amq.rabbitmq.reply-to.<encoded pid>.<key>`, and the pid's node is
    `reply@<hash of the node's name>`, so the token also outlives a restart of the node.
    """
    pid = base64.b64decode(reply_to.removeprefix(f"{REPLY_TO}.").partition(".")[0])
    start = pid.index(b"reply@")
    length = int.from_bytes(pid[start - 2 : start])
    return pid[start : start + length].decode()


REPLY_TO = "amq.rabbitmq.reply-to"
