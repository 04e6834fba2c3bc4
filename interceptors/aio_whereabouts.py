"""Which node an aio-pika channel is on."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiormq
import aiormq.abc

from sharding.amqp.connected_node import REPLY_TO, node_at, node_with_token
from sharding.cluster.topology import Topology
from sharding.errors import Unreachable


class AioWhereabouts:
    """Remembers the node of a connection, and finds it anew when a robust one made another.

    Waits for the broker; the deadline is the caller's.
    """

    def __init__(self, topology: Topology, given: str | None) -> None:
        self._topology = topology
        self._given = given
        self._found: tuple[aiormq.abc.AbstractConnection, str] | None = None
        self._finding = asyncio.Lock()

    async def node_of(self, channel: Any) -> str:
        if self._given is not None:
            return self._given
        async with self._finding:
            connection = (await channel.get_underlay_channel()).connection
            if self._found is None or self._found[0] is not connection:
                self._found = (connection, await self._find(connection))
            return self._found[1]

    async def _find(self, connection: aiormq.abc.AbstractConnection) -> str:
        nodes = self._topology.nodes()
        # In a thread, because it resolves the nodes' host names.
        node = await asyncio.to_thread(node_at, await _peer_of(connection), nodes)
        node = node or node_with_token(await _reply_to(connection), nodes)
        if node is None:
            raise Unreachable("the node of this connection is in no shard map; give node=…")
        return node


async def _peer_of(connection: aiormq.abc.AbstractConnection) -> tuple[str, int] | None:
    """The address that the connection's URL leads to, if it is one: aiormq shows no socket."""
    url = connection.url
    if url.host is None or url.port is None:
        return None
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = {str(entry[4][0]) for entry in found}
    return (addresses.pop(), url.port) if len(addresses) == 1 else None


async def _reply_to(connection: aiormq.abc.AbstractConnection) -> str:
    """What the node writes into a reply-to; asked on a channel of its own."""

    async def ignore(_: Any) -> None: ...

    # With confirms, because aiormq drops what is returned on a channel without.
    channel = await connection.channel(publisher_confirms=True, on_return_raises=False)
    try:
        await channel.basic_consume(REPLY_TO, ignore, no_ack=True)
        properties = aiormq.spec.Basic.Properties(reply_to=REPLY_TO)
        returned: Any = await channel.basic_publish(
            b"", routing_key="warren.nobody", properties=properties, mandatory=True
        )
    finally:
        await channel.close()
    reply_to = returned.header.properties.reply_to
    if reply_to is None:
        raise Unreachable("the broker did not say which node it is; give node=…")
    return str(reply_to)
