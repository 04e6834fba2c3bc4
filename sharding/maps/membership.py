"""Which nodes a cluster has, from what is said of it: pure decisions.

* A node is known by its token, a hash of its name, which it tells everybody whom it lets in. Who
  met it without the management API knows its token and not its name, and gives it one. That name
  stays where a map has it, also for those who learn the true one: a node with another name would
  be another node, and its shards would be taken for those of one that has left.
* Of itself a node is believed. Of the others counts what most management APIs say: one that is cut
  off calls all others down. On a tie a node is there and runs; asking it tells soon enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sharding.maps.naming import token_in_name
from sharding.maps.planning import Member
from sharding.maps.shard_map import Node


def token_of(node: Node) -> str:
    return node.reply_token or token_in_name(node.name)


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
