"""The sub-commands of `warren` that talk to a cluster."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from sharding.commands import AsJson, app, print_table, printable
from sharding.errors import InvalidInput, WarrenError
from sharding.manager import Ensured
from sharding.map_difference import difference
from sharding.naming import ShardName
from sharding.policy import OnUnavailable, Policy
from sharding.topology import Topology

policies = typer.Typer(no_args_is_help=True, help="Which logical queues are sharded, and how.")
shards = typer.Typer(no_args_is_help=True, help="Keep shards in step with policies and nodes.")
app.add_typer(policies, name="policy")
app.add_typer(shards, name="shards")

Urls = Annotated[
    list[str],
    typer.Option(
        "--url",
        envvar="WARREN_URL",
        show_envvar=True,
        help="AMQP URL of a node; several times, for failover.",
    ),
]
ManagementUrls = Annotated[
    list[str],
    typer.Option(
        "--management",
        envvar="WARREN_MANAGEMENT_URL",
        show_envvar=True,
        help="URL of the management API; needed to see which nodes there are.",
    ),
]
Logical = Annotated[str, typer.Argument(metavar="NAME", help="The logical queue.")]

LOCAL_BROKER = ["amqp://guest:guest@localhost:5672/"]


@contextmanager
def connected(urls: list[str], management: list[str]) -> Iterator[Topology]:
    # What the manager notes is in the report; without a handler logging would print it as well.
    logging.getLogger("warren.manager").addHandler(logging.NullHandler())
    with Topology(*urls, management_urls=management) as topology:
        yield topology


@policies.command("set")
def set_policy(
    logical: Logical,
    shards_per_node: Annotated[int, typer.Option(help="Shards on each node.")],
    pattern: Annotated[
        str | None, typer.Option(help="A regular expression; NAME then only names the policy.")
    ] = None,
    priority: Annotated[int, typer.Option(help="The highest that matches is in force.")] = 0,
    routing_key: Annotated[str | None, typer.Option(help="Bind shards with this as well.")] = None,
    durable: Annotated[bool, typer.Option(help="Shards survive a restart of their node.")] = True,
    argument: Annotated[
        list[str] | None, typer.Option(help="A queue argument, as name=JSON value.")
    ] = None,
    on_unavailable: Annotated[
        OnUnavailable, typer.Option(help="Keys of a shard that is away fail, or move.")
    ] = OnUnavailable.FAIL,
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006 - typer copies it
) -> None:
    """Set the policy of a logical queue and make its shards."""
    exact = Policy.exactly(logical, shards_per_node, name=logical)
    policy = Policy(
        name=logical,
        pattern=pattern or exact.pattern,
        shards_per_node=shards_per_node,
        priority=priority,
        routing_key=routing_key,
        durable=durable,
        queue_arguments=dict(map(_argument, argument or [])),
        on_unavailable=on_unavailable,
    )
    with connected(url, management) as topology:
        topology.set_policy(policy)
        names = {logical} if pattern is None else set()
        names |= {name for name in topology.state.maps if policy.matches(name)}
        for name in sorted(names):
            report(topology.ensure(name))
            in_force = topology.policy_for(name)
            if in_force is not None and in_force != policy:
                typer.echo(
                    f"  the policy '{printable(in_force.name)}' outranks this one, which changes "
                    f"nothing; give --priority {in_force.priority + 1}, or clear the other"
                )


@policies.command("list")
def list_policies(
    as_json: AsJson = False,
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006
) -> None:
    """Show the policies in the map log."""
    with connected(url, management) as topology:
        rows = [policy.to_json() for policy in topology.state.policies.values()]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        print_table(("name", "pattern", "shards_per_node", "priority", "on_unavailable"), rows)


@policies.command("clear")
def clear_policy(
    name: Annotated[str, typer.Argument(help="The policy's name.")],
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006
) -> None:
    """Remove a policy. Shards that it made stay, with their messages."""
    with connected(url, management) as topology:
        if name not in topology.state.policies:
            raise InvalidInput("policy", "must be one that 'warren policy list' shows", name)
        topology.clear_policy(name)
    typer.echo(f"policy {printable(name)} is gone; its shards stay")


@shards.command()
def ensure(
    logical: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None,
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006
) -> None:
    """Make the shards of these logical queues, or of all, be what the policies say."""
    with connected(url, management) as topology:
        for name in logical or sorted(topology.state.maps):
            report(topology.ensure(name))


@shards.command()
def watch(
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 5.0,
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006
) -> None:
    """Follow nodes that join, leave, fall and return, until interrupted."""
    with connected(url, management) as topology:
        known = dict(topology.state.maps)
        typer.echo(f"watching {', '.join(sorted(known)) or 'for logical queues'}")
        while True:
            try:
                for ensured in topology.ensure_all():
                    name = ensured.shard_map.logical
                    if known.get(name) != ensured.shard_map:
                        report(ensured, known.get(name))
                        known[name] = ensured.shard_map
            except WarrenError as error:
                typer.echo(f"warren: {printable(str(error))}; trying again", err=True)
            time.sleep(interval)


def report(ensured: Ensured, before: Any = None) -> None:
    """Say what is in force now, and what the operator should know."""
    shard_map = ensured.shard_map
    nodes = len({shard.node for shard in shard_map.shards})
    typer.echo(
        f"{printable(shard_map.logical)}: {len(shard_map.shards)} shards on {nodes} nodes, "
        f"epoch {shard_map.epoch}"
    )
    lines = [*(difference(before, shard_map) if before else []), *ensured.notes]
    wanted = shard_map.policy.shards_per_node
    names = (ShardName.parse(shard.name) for shard in shard_map.shards)
    if surplus := sum(name.index >= wanted for name in names if name is not None):
        lines.append(f"{surplus} shards above {wanted} per node stay, with their keys and messages")
    for line in lines:
        typer.echo(f"  {printable(line)}")


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput("--argument", "must look like name=value", text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
