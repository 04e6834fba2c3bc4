"""What changed in routes, in words, for logs: pure."""

from __future__ import annotations

from collections.abc import Sequence

from sharding.routes import Finding, Missing, Partitions, StreamRoute

MOST_TOLD = 5
"""A node that led a thousand streams and ended must not write a thousand lines."""

Change = tuple[Finding, Finding]


def told(changes: Sequence[Change]) -> list[str]:
    """A sentence for each change; where there are many, for a few, and how many more.

    Changes of leaders come first: publishing waits for them.
    """
    first = sorted(changes, key=_keeps_its_leader)[:MOST_TOLD]
    sentences = [route_difference(before, after) for before, after in first]
    more = len(changes) - len(sentences)
    return [*sentences, f"{more} more routes changed at the same time"] if more else sentences


def _keeps_its_leader(change: Change) -> bool:
    before, after = change
    if isinstance(before, StreamRoute) and isinstance(after, StreamRoute):
        return before.leader == after.leader
    return False


def route_difference(before: Finding, after: Finding) -> str:
    if isinstance(after, Missing):
        return f"{after.name!r} is gone"
    if isinstance(after, Partitions):
        return f"{after.super_stream!r} {_partitions(before, after)}"
    return f"{after.stream!r} {_route(before, after)}"


def _partitions(before: Finding, after: Partitions) -> str:
    if not isinstance(before, Partitions):
        return f"exists now, of {len(after.streams)} partitions"
    joined = [name for name in after.streams if name not in before.streams]
    left = [name for name in before.streams if name not in after.streams]
    parts = [f"has lost {', '.join(map(repr, left))}"] if left else []
    parts += [f"has {', '.join(map(repr, joined))} as well"] if joined else []
    return ", ".join(parts) or "has its partitions in another order"


def _route(before: Finding, after: StreamRoute) -> str:
    leader = "has no leader now" if after.leader is None else f"is led by {after.leader}"
    if not isinstance(before, StreamRoute):
        return f"exists now, and {leader}"
    parts: list[str] = []
    if before.leader != after.leader:
        parts.append(f"{leader} (before: {before.leader or 'none'})")
    others = {before.leader, after.leader}
    joined = sorted(str(each) for each in after.replicas if each not in before.replicas)
    left = sorted(str(each) for each in {*before.replicas} - {*after.replicas} - others)
    if joined and before.leader == after.leader:
        parts.append(f"has a replica on {', '.join(joined)} as well")
    if left:
        parts.append(f"has no replica on {', '.join(left)} any more")
    return ", ".join(parts) or "has its replicas in another order"
