"""Proof that streams work on every node of a cluster, beyond every node answering.

A cluster can look whole and be maimed. All streams are led by one Raft group, the brokers' stream
coordinator. It is made with the first stream, and a node writes down that it has a member of it
only when its table of Raft members was left alone for half a second (`names.dets`, auto_save 500).
A node that is killed before comes back without its member, for good, and says nothing of it
(4.0.5): the others still count it, so with the next node that is taken there is no majority and no
stream has a leader; and whoever asks the node itself is told that no stream has one.

So the proof looks at the members by name, and then at what they are for: a stream of its own gets
a replica on every node, and what is stored in it is read from every one of them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from sharding.amqp.addresses import connection_parameters
from sharding.amqp.session import Message, Session
from sharding.cluster.management import NoAnswer
from sharding.errors import WarrenError
from tests.cluster.cluster import Cluster, Node

PAYLOAD = "alive"
PAUSE = 0.2

# Of each node: the members of the coordinator as its leader names them, asked through the node's
# own member (`'none'` if it has none, nothing if that knows no leader). A member that is there is
# written down, so that it is there after a kill too.
_COORDINATOR = """
[{Node, case rpc:call(Node, ra, members, [{rabbit_stream_coordinator, Node}, 2000]) of
    {ok, Members, _Leader} ->
        #{names := #{directory_rev := Table}} = rpc:call(Node, ra_system, fetch, [coordination]),
        rpc:call(Node, dets, sync, [Table]),
        [Member || {_, Member} <- Members];
    {error, noproc} -> ['none'];
    _ -> []
  end} || Node <- [%s]]
"""


class Unhealthy(RuntimeError):
    """What a cluster lacks to serve streams."""


class Maimed(Unhealthy):
    """It will not come by waiting either."""


def prove_health(cluster: Cluster, timeout: float = 60) -> None:
    """Return when streams are proved to work on all nodes of the cluster, or raise `Unhealthy`.

    What only takes its time is waited for, up to `timeout`. On a healthy cluster it is done in one
    to three seconds.
    """
    for node in cluster.nodes:
        if not node.driver.running():
            raise Unhealthy(f"{node.name} is not running")
    deadline = time.monotonic() + timeout
    through = cluster.nodes[0]
    stream = f"health-{secrets.token_hex(4)}"
    try:
        _retry(deadline, lambda: _declare(through, stream, len(cluster.nodes)))
        _retry(deadline, lambda: _see_coordinator(cluster))
        _retry(deadline, lambda: _store(through, stream))
        for node in cluster.nodes:
            _retry(deadline, lambda node=node: _read_at(node, stream, deadline))  # type: ignore[misc]
        _retry(deadline, lambda: _delete(through, stream))
    except BaseException:
        with suppress(NoAnswer):
            _delete(through, stream)
        raise


def _retry(deadline: float, step: Callable[[], None]) -> None:
    """Take a step until it succeeds; when the time is up, its last reason is the verdict."""
    while True:
        try:
            return step()
        except Maimed:
            raise
        except (Unhealthy, WarrenError) as reason:
            if time.monotonic() > deadline:
                raise Unhealthy(str(reason)) from None
        time.sleep(PAUSE)


def _declare(through: Node, stream: str, replicas: int) -> None:
    arguments = {"x-queue-type": "stream", "x-initial-cluster-size": replicas}
    body = {"durable": True, "arguments": arguments}
    through.management.call("PUT", "queues", through.endpoint.vhost, stream, body=body)


def _see_coordinator(cluster: Cluster) -> None:
    names = {node.name for node in cluster.nodes}
    quoted = ",".join(f"'{name}'" for name in sorted(names))
    said = "".join(cluster.nodes[0].driver.ask_cluster(_COORDINATOR % quoted).split())
    seen = {
        node: set(re.findall(r"'?([^',]+)'?", members))
        for node, members in re.findall(r"\{'([^']+)',\[([^]]*)\]\}", said)
    }
    without = {name for name in names if seen.get(name) == {"none"}}
    counted = set().union(*seen.values())
    for name in sorted(without & counted):
        raise Maimed(f"{name} has lost its member of the stream coordinator: {said}")
    for name in sorted(names):
        if name in without:
            raise Unhealthy(f"{name} has no member of the stream coordinator yet")
        if not seen.get(name):
            raise Unhealthy(f"{name} knows no leader of the stream coordinator")
        if missing := names - seen[name]:
            raise Unhealthy(f"{name} does not find {sorted(missing)} in the stream coordinator")


def _store(through: Node, stream: str) -> None:
    """Publish a message; the API answers when it is confirmed."""
    body = {
        "routing_key": stream,
        "payload": PAYLOAD,
        "payload_encoding": "string",
        "properties": {},
    }
    answer = through.management.call(
        "POST", "exchanges", through.endpoint.vhost, "amq.default", "publish", body=body
    )
    if not answer["routed"]:
        raise Unhealthy(f"{through.name} does not route to {stream}")


def _read_at(node: Node, stream: str, deadline: float) -> None:
    """Read the message from the node's own replica: over AMQP a node reads from no other."""

    async def read() -> None:
        left = max(1.0, deadline - time.monotonic())
        session = await Session.open(connection_parameters(node.endpoint.amqp_url), left)
        try:
            channel = await session.channel()
            await channel.qos(1)
            found: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            offset = {"x-stream-offset": "first"}
            await channel.consume(stream, found.set_result, arguments=offset)
            message = await found
            if message.body != PAYLOAD.encode():
                raise Unhealthy(f"{node.name} hands out {message.body!r} from {stream}")
        finally:
            await session.close()

    async def in_time() -> None:
        async with asyncio.timeout(max(1.0, deadline - time.monotonic())):
            await read()

    try:
        asyncio.run(in_time())
    except TimeoutError:
        raise Unhealthy(f"{node.name} does not hand out what is stored in {stream}") from None
    except WarrenError as error:
        raise Unhealthy(f"{node.name}: {error}") from None


def _delete(through: Node, stream: str) -> None:
    through.management.call("DELETE", "queues", through.endpoint.vhost, stream)
