"""Is an address a balancer's, and does it lead to every node.

It is one if connections to it end at several nodes, or at a node that gives another address as its
own. Stream clients connect through one again and again until they have the node they want, so a
node that it never leads to can't be used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sharding.doctor.findings import Finding, ok, problem, warning
from sharding.doctor.places import Place

TRIES_PER_NODE = 8  # dealt at random, one of ten nodes is missed once in 500 times
FEW_TRIES = 3


@dataclass(frozen=True)
class Dealt:
    """Where connections to one place ended."""

    place: Place
    seen: Counter[str] = field(default_factory=Counter)
    is_own_address: bool | None = None
    """Whether the place is the address of the node that answered; None if that is not known."""


def deal(nodes: int, connect: Callable[[], str]) -> Counter[str]:
    """Connect until every node was reached, or so often that one which was not never will be.

    `connect` returns the node that answered, or "" if none did.
    """
    seen: Counter[str] = Counter()
    tries = 0
    while tries < max(FEW_TRIES, nodes * TRIES_PER_NODE) and len(seen) < max(nodes, 2):
        tries += 1
        seen.update(filter(None, [connect()]))
        if tries >= FEW_TRIES and not seen:
            break
    return seen


def judge(dealt: Dealt, nodes: int) -> list[Finding]:
    """`nodes` is how many run; 0 where that is not known."""
    subject, seen = str(dealt.place), dealt.seen
    if not seen:
        return []
    is_balancer = len(seen) > 1 or dealt.is_own_address is False
    if not is_balancer:
        found = "it is the node's own address" if dealt.is_own_address else "one node answers"
        return [ok("balancer", subject, "a way to the node", found)]
    wanted = "a balancer that leads to every node"
    reached = ", ".join(f"{node} {times}×" for node, times in seen.most_common())
    fix = (
        "Add every node to the balancer's backends and deal connections out in turn "
        "(HAProxy: balance roundrobin); or give the URLs of the nodes themselves."
    )
    if nodes and len(seen) < nodes:
        found = f"it led to {len(seen)} of {nodes} nodes in {seen.total()} connections: {reached}"
        return [problem("balancer", subject, wanted, found, fix)]
    if not nodes and len(seen) == 1:
        found = f"it led to {reached}; how many nodes there are is not known"
        return [warning("balancer", subject, wanted, found, fix)]
    found = f"it led to {len(seen)} nodes: {reached}"
    return [ok("balancer", subject, wanted, found)]
