"""Which nodes a cluster has, from what is said of it: pure decisions.

* A node is known by its token, a hash of its name, which it tells everybody whom it lets in. Who
  met it without the management API knows its token and not its name, and gives it one. That name
  stays where a map has it, also for those who learn the true one: a node with another name would
  be another node, and its shards would be taken for those of one that has left.
* Of itself a node is believed. Of the others counts what most management APIs say: one that is cut
  off calls all others down. On a tie a node is there and runs; asking it tells soon enough.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sharding.maps.planning import Member
from sharding.maps.shard_map import Node

_RANGE = 1 << 27
_INVENTED = re.compile(r"node-([0-9]+)@")


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
    return f"reply@{value % _RANGE}"


def token_of(node: Node) -> str:
    """By its name also if that is one of ours."""
    invented = _INVENTED.match(node.name)
    by_name = f"reply@{invented[1]}" if invented else token_of_node(node.name)
    return node.reply_token or by_name


def name_for(token: str, host: str, cluster_name: str) -> str:
    """A name for a node of which only the token is known: the true one, if it can be guessed.

    A cluster is called after its first node unless somebody named it, and nodes of a cluster mostly
    have names that differ in the host alone.
    """
    prefix, _, first_host = cluster_name.partition("@")
    guesses = [cluster_name, f"{prefix}@{host}", f"rabbit@{host}", f"rabbit@{first_host}"]
    for guess in guesses:
        if token_of_node(guess) == token:
            return guess
    return f"node-{token.removeprefix('reply@')}@{host}"  # see _INVENTED


def known_as(members: Iterable[Member], known: Iterable[Node]) -> list[Member]:
    """The members under the names that they are known by; the first of `known` decides."""
    members = list(members)
    names: dict[str, str] = {}
    for node in known:
        names.setdefault(token_of(node), node.name)
    tokens = Counter(token_of(member.node) for member in members)

    def renamed(member: Member) -> Member:
        token = token_of(member.node)
        if tokens[token] > 1:  # two names with one hash: only the names tell them apart
            return member
        name = names.get(token, member.name)
        return replace(member, node=replace(member.node, name=name, reply_token=token))

    return sorted(map(renamed, members), key=lambda member: member.name)


def names_of(members: Iterable[Member], known: Iterable[Node]) -> set[str]:
    """Every name that maps have for these members."""
    tokens = {token_of(member.node): member.name for member in members}
    return {*tokens.values(), *(node.name for node in known if token_of(node) in tokens)}


def voted(reports: Sequence[Sequence[Member]]) -> list[Member]:
    """The members by what most reports say."""
    said: dict[str, list[Member]] = {}
    for report in reports:
        for member in report:
            said.setdefault(member.name, []).append(member)
    return [_agreed(said[name]) for name in sorted(said) if 2 * len(said[name]) >= len(reports)]


def _agreed(said: Sequence[Member]) -> Member:
    runs = 2 * sum(member.running for member in said) >= len(said)
    agreeing = [member for member in said if member.running == runs]
    return next((member for member in agreeing if member.node.addresses), agreeing[0])
