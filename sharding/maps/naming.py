"""Names of logical queues, nodes and shards: how they are made, read and checked, and the token
that a node's name gives.

The shard names are the sharding plugin's own, `sharding: <logical> - <node> - <index>`, so that
queues it made can be taken over as they are. A logical name may itself contain " - "; a node name
can't contain a space, so reading from the right is unambiguous.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sharding.errors import InvalidInput
from sharding.maps.json_fields import is_text, is_whole

MAX_NAME_BYTES = 255
"""AMQP 0-9-1 sends names as short strings: one length byte."""

_SHARD_NAME = re.compile(
    r"sharding: (?P<logical>.+) - (?P<node>\S+@\S+) - (?P<index>0|[1-9][0-9]*)", re.DOTALL
)
_NODE_NAME = re.compile(r"[^\s@]+@[^\s@]+")
_INVENTED = re.compile(r"node-([0-9]+)@")


@dataclass(frozen=True, slots=True)
class ShardName:
    """What the name of a shard queue says."""

    logical: str
    node: str
    index: int

    def __post_init__(self) -> None:
        check_logical_name(self.logical)
        check_node_name(self.node)
        _check_index(self.index)
        check_name("shard name", str(self))

    def __str__(self) -> str:
        """
        >>> str(ShardName("images", "rabbit@rmq0", 1))
        'sharding: images - rabbit@rmq0 - 1'
        """
        return f"sharding: {self.logical} - {self.node} - {self.index}"

    @classmethod
    def parse(cls, name: str) -> ShardName | None:
        """Read a queue's name; None if it is not the name of a shard.

        >>> ShardName.parse("sharding: a - b - rabbit@rmq0 - 1")
        ShardName(logical='a - b', node='rabbit@rmq0', index=1)
        """
        match = _SHARD_NAME.fullmatch(name)
        if match is None:
            return None
        try:
            return cls(match["logical"], match["node"], int(match["index"]))
        except ValueError:
            return None


def is_shard_of(name: str, logical: str) -> bool:
    """Whether a name is that of a shard of `logical`, in whatever map, or in none any more.

    >>> is_shard_of("sharding: images - rabbit@rmq0 - 1", "images")
    True
    """
    parsed = ShardName.parse(name) if name.startswith("sharding: ") else None
    return parsed is not None and parsed.logical == logical


SHARDS_KEY = "warren.shards"
"""Leads from the exchange of a logical queue to that of its shards. Every message of ours has it,
so that what reaches no shard is returned; what does not have it is somebody else's, and is kept."""


def shards_exchange(logical: str) -> str:
    """The exchange that shards are bound to, behind the one that is published to."""
    return check_name("exchange of shards", f"{logical}.shards")


def unrouted(logical: str) -> str:
    """The queue, and the exchange before it, of what is published to a name and reaches no shard.

    >>> unrouted("images")
    'images.unrouted'
    """
    return check_name("queue of unrouted messages", f"{logical}.unrouted")


REFUSED = "warren.refused"
"""The exchange behind that of unrouted messages, and what its queues are named after: each refuses
all that it gets, so that what can't be kept is nacked."""


def refusing(node: str) -> str:
    """The queue on a node that refuses all that it gets."""
    return check_name("queue that refuses", f"{REFUSED} - {check_node_name(node)}")


def partition_name(super_stream: str, index: int) -> str:
    """The stream that is partition `index` of a super stream, as RabbitMQ's own tools name it."""
    check_logical_name(super_stream)
    _check_index(index)
    return check_name("partition name", f"{super_stream}-{index}")


def check_logical_name(name: str) -> str:
    """Return `name` if it can name a logical queue, else raise."""
    check_name("logical queue", name)
    if name.startswith("amq."):
        raise InvalidInput("logical queue", "must not start with 'amq.', which is reserved", name)
    return name


def check_node_name(name: str) -> str:
    """Return `name` if it can name a RabbitMQ node, else raise."""
    check_name("node", name)
    if not _NODE_NAME.fullmatch(name):
        raise InvalidInput("node", "must look like 'rabbit@host'", name)
    return name


def check_name(field: str, name: str) -> str:
    """Return `name` if AMQP can carry it as a name, else raise an error that speaks of `field`."""
    if not isinstance(name, str):
        raise InvalidInput(field, "must be text", name)
    if not name:
        raise InvalidInput(field, "must not be empty", name)
    if "\0" in name:
        raise InvalidInput(field, "must not contain NUL", name)
    if "\n" in name or "\r" in name:  # or pika waits for the answer to another name
        raise InvalidInput(field, "must not contain line breaks, which RabbitMQ takes out", name)
    if not is_text(name):
        raise InvalidInput(field, "must be text that UTF-8 can express", name)
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        raise InvalidInput(field, f"must be at most {MAX_NAME_BYTES} bytes, not {size}", name)
    return name


def _check_index(index: int) -> int:
    if not is_whole(index) or index < 0:
        raise InvalidInput("index", "must be a whole number from 0", index)
    return index


def token_of_node(name: str) -> str:
    """The token of a node by its name: Erlang's `phash2` of it, as direct reply-to has it.

    >>> token_of_node("rmq1@127.0.4.1")
    'reply@106440401'
    """
    value = 0
    for byte in b"".join(bytes([ord(c)]) if ord(c) < 256 else c.encode() for c in name):
        value = (value << 4) + byte
        if high := value & 0xF0000000:
            value ^= high >> 24
            value ^= high
    return f"reply@{value % (1 << 27)}"


def token_in_name(name: str) -> str:
    """The same for a name that may be one of `name_for`."""
    invented = _INVENTED.match(name)
    return f"reply@{invented[1]}" if invented else token_of_node(name)


def name_for(token: str, host: str, cluster_name: str) -> str:
    """A name for a node of which only the token is known: the true one, if it can be guessed.

    Unless somebody named the cluster, each node tells its own name for it; and nodes of a cluster
    mostly have names that differ in the host alone.
    """
    prefix, _, first_host = cluster_name.partition("@")
    guesses = [cluster_name, f"{prefix}@{host}", f"rabbit@{host}", f"rabbit@{first_host}"]
    for guess in guesses:
        if token_of_node(guess) == token:
            return guess
    return f"node-{token.removeprefix('reply@')}@{host}"
