"""`warren adopt` and `warren forget`: take over the plugin's queues, and give them back."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

import typer

from sharding.adopt import FoundShards
from sharding.cluster_commands import (
    LOCAL_BROKER,
    Logical,
    ManagementUrls,
    Urls,
    connected,
    report,
)
from sharding.commands import app, printable
from sharding.errors import InvalidInput
from sharding.topology import Topology

# The management API's counts are up to five seconds old, so a queue that it calls empty may not be.
QUIET_SECONDS = 6.0


@app.command()
def adopt(
    logical: Logical,
    drain: Annotated[
        bool, typer.Option("--drain", help="First wait until the plugin's shards are empty.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Take them over although they hold messages.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="How long --drain may wait, in seconds.")] = 3600,
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006 - typer copies it
) -> None:
    """Take over the queues that the sharding plugin made, with their names and messages."""
    if not management:
        raise InvalidInput("--management", "must be given: the plugin's queues are found there", "")
    with connected(url, management) as plane:
        found = found_now(plane, logical)
        typer.echo(_what_changes(found))
        if drain:
            found = _drained(plane, logical, timeout)
        elif found.messages and not yes:
            raise InvalidInput(
                "messages",
                "must be drained (--drain) or accepted where they are (--yes)",
                found.messages,
            )
        report(plane.adopt(found))
        typer.echo(
            "The plugin's exchange is untouched. When no client publishes to it any more, delete "
            f"it and its policy and run: warren shards ensure {printable(logical)}"
        )


@app.command()
def forget(
    logical: Logical,
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006
) -> None:
    """Stop routing a logical queue. Queues, messages and exchanges stay as they are."""
    with connected(url, management) as plane:
        shard_map = plane.shard_map(logical)
        if shard_map is None:
            raise InvalidInput("logical queue", "must be one that is sharded", logical)
        plane.forget(logical)
        typer.echo(f"{printable(logical)} is not sharded any more; its queues stay")
        if shard_map.exchange == logical:
            typer.echo(
                f"  what is published to the exchange {printable(logical)} now reaches no queue; "
                "delete it, so that publishers see that"
            )
        policy = plane.policy_for(logical)
        if policy is not None:
            typer.echo(
                f"  the policy {printable(policy.name)} still matches it: whoever declares the "
                "exchange shards it again. 'warren policy clear' removes a policy"
            )


def found_now(plane: Topology, logical: str) -> FoundShards:
    """The shards, with the greater of two counts of their messages.

    The management API's is some seconds old; the queues' own leaves out what consumers have in
    hand.
    """
    found = plane.find_shards(logical)
    seen = plane.look_at(shard.name for shard in found.shards).values()
    return replace(found, messages=max(found.messages, sum(s.messages for s in seen if s)))


def _what_changes(found: FoundShards) -> str:
    return (
        f"{len(found.shards)} shards of {printable(found.logical)}, {found.messages} messages.\n"
        "Names and messages stay. Keys change: the plugin takes phash2 of the routing key modulo "
        "the number of queues, Warren murmur3 over slots, so a key's new messages go to another "
        "shard than those already queued. Where order per key matters, stop publishing and drain "
        "first."
    )


def _drained(plane: Topology, logical: str, timeout: float) -> FoundShards:
    """Wait until the shards are empty, and have been for as long as counts may be old."""
    deadline = time.monotonic() + timeout
    empty_since: float | None = None
    while True:
        found, now = found_now(plane, logical), time.monotonic()
        if found.messages:
            empty_since = None
            if now > deadline:
                raise InvalidInput("messages", f"must be gone within {timeout:g} s", found.messages)
            typer.echo(f"waiting for {found.messages} messages to be consumed", err=True)
        elif empty_since is None:
            empty_since = now
            typer.echo(f"empty; looking for {QUIET_SECONDS:g} s more", err=True)
        elif now - empty_since > QUIET_SECONDS:
            return found
        time.sleep(1)
