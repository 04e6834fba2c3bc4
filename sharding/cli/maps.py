"""The sub-commands of `warren` that talk to a cluster."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sharding.cli.options import (
    LOCAL_BROKER,
    AsJson,
    Logical,
    ManagementUrls,
    Urls,
    app,
    connected,
    print_table,
    printable,
)
from sharding.cluster.plugin_queues import FoundShards
from sharding.cluster.provisioner import Ensured, Forgotten
from sharding.cluster.topology import Topology
from sharding.errors import InvalidInput, LocalError, WarrenError
from sharding.maps import state_file
from sharding.maps.differences import difference
from sharding.maps.naming import ShardName, unrouted
from sharding.maps.policy import OnUnavailable, Policy
from sharding.maps.shard_map import ShardMap
from sharding.publishing.unrouted import bring_unrouted

policies = typer.Typer(no_args_is_help=True, help="Which logical queues are sharded, and how.")
shards = typer.Typer(no_args_is_help=True, help="Keep shards in step with policies and nodes.")
states = typer.Typer(no_args_is_help=True, help="All policies and maps: save, restore, rebuild.")
app.add_typer(policies, name="policy")
app.add_typer(states, name="maps")
app.add_typer(shards, name="shards")


@policies.command("set")
def set_policy(
    logical: Logical,
    shards_per_node: Annotated[int, typer.Option(help="Shards on each node.")],
    pattern: Annotated[
        str | None, typer.Option(help="A regular expression; NAME then only names the policy.")
    ] = None,
    priority: Annotated[int, typer.Option(help="The highest that matches is in force.")] = 0,
    routing_key: Annotated[str | None, typer.Option(help="The plugin's; bound nowhere.")] = None,
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
        names = logical or sorted(topology.state.maps)
        has_failed = False
        for name in names:
            try:
                ensuring = topology.futures.ensure(name, only_sharded=not logical)
                report(topology.result(ensuring))
                _bring(topology, name)
            except Forgotten as error:
                typer.echo(printable(str(error)))
            except WarrenError as error:
                if len(names) == 1:
                    raise
                has_failed = True
                typer.echo(f"warren: {printable(f'{name}: {error}')}", err=True)
        if has_failed:
            raise typer.Exit(1)


@shards.command()
def watch(
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 5.0,
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006
) -> None:
    """Follow nodes that join, leave, fall and return, and bring what is unrouted to its shards,
    until interrupted."""
    with connected(url, management) as topology:
        known = dict(topology.state.maps)
        fruitless: dict[str, int] = {}  # how many there were when none of them could be brought
        typer.echo(f"watching {', '.join(sorted(known)) or 'for logical queues'}")
        while True:
            try:
                names = sorted(topology.state.maps)
            except WarrenError as error:
                typer.echo(f"warren: {printable(str(error))}; trying again", err=True)
                names = []
            for name in names:  # each by itself: one that fails holds up no other
                try:
                    ensured = topology.result(topology.futures.ensure(name, only_sharded=True))
                    if ensured.made_again or ensured.kept != fruitless.get(name, 0):
                        fruitless[name] = 0 if _bring(topology, name) else ensured.kept
                    if known.get(name) != ensured.shard_map:
                        report(ensured, known.get(name))
                        known[name] = ensured.shard_map
                except Forgotten:
                    continue
                except WarrenError as error:
                    typer.echo(f"warren: {printable(f'{name}: {error}')}; trying again", err=True)
            time.sleep(interval)


def _bring(topology: Topology, logical: str) -> int:
    brought = topology.result(bring_unrouted(topology, logical))
    if brought:
        typer.echo(f"  {brought} messages that were unrouted are in their shards now")
    return brought


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
                f"  what is published to the exchange {printable(logical)} now is kept in "
                f"{printable(unrouted(logical))}; delete the exchange, so that publishers see that"
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


StateFile = Annotated[Path, typer.Argument(metavar="FILE", help="As 'warren maps export' writes.")]


@states.command("export")
def export_maps(
    path: StateFile,
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006 - typer copies it
) -> None:
    """Write all policies and maps that are in force to a file."""
    with connected(url, management) as topology:
        topology.refresh(topology.options.start_timeout)
        state = topology.state
    if not (state.policies or state.maps) and path.exists():
        why = "it is left as it is: the map log is empty, and it may be all that is left of another"
        raise UnusableFile(f"{path}: {why}")
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_text(state_file.dumps(state))
        beside.replace(path)  # at once, or not at all
    except OSError as error:
        raise UnusableFile(f"{path}: {error.strerror}") from None
    typer.echo(f"{len(state.policies)} policies and {len(state.maps)} maps")


@states.command("import")
def import_maps(
    path: StateFile,
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006
) -> None:
    """Put the policies and maps of a file into a map log that is new."""
    try:
        held = state_file.loads(path.read_bytes())
    except OSError as error:
        raise UnusableFile(f"{path}: {error.strerror}") from None
    except WarrenError as error:
        raise UnusableFile(f"{path}: {error}") from None
    with connected(url, management) as topology:
        count = topology.take_in(held)
    passed_over = len(held.entries()) - count
    there = f"; {passed_over} were there already" if passed_over else ""
    typer.echo(f"{count} policies and maps are in the log{there}")
    typer.echo(
        "  queues and bindings are as they were; 'warren shards ensure' makes what is missing"
    )


@states.command("rebuild")
def rebuild_maps(
    yes: Annotated[bool, typer.Option("--yes", help="Write the maps; else only tell.")] = False,
    url: Urls = LOCAL_BROKER,
    management: ManagementUrls = [],  # noqa: B006
) -> None:
    """Make maps again from the queues and bindings in the broker, after the log was lost."""
    if not management:
        raise InvalidInput("--management", "must be given: queues and bindings are found there", "")
    with connected(url, management) as topology:
        topology.refresh(topology.options.start_timeout)
        known = topology.state.maps
        sharded = topology.find_sharded()
        for logical, why in sharded.left.items():
            if logical not in known:
                typer.echo(f"{printable(logical)}: left alone, {printable(why)}")
        found = [each for each in sharded.found if each.logical not in known]
        for each in found:
            if yes:
                report(topology.adopt(each))
            else:
                typer.echo(_what_is_there(each))
    typer.echo(WHAT_IS_NOT_KNOWN if found else "there is nothing to rebuild")
    if found and not yes:
        typer.echo("Nothing was written; with --yes it is.")


WHAT_IS_NOT_KNOWN = (
    "Not known any more: patterns and priorities (each name has a policy of its own now), "
    "--on-unavailable (it is 'fail'), arguments that differ among the shards of a name, and names "
    "that were forgotten while their exchange stayed ('warren forget' them again)."
)


def _what_is_there(found: FoundShards) -> str:
    nodes = len({shard.node for shard in found.shards})
    arguments = json.dumps(dict(found.queue_arguments)) if found.queue_arguments else "none"
    return (
        f"{printable(found.logical)}: {len(found.shards)} shards on {nodes} nodes, "
        f"{found.shards_per_node} per node, queue arguments {printable(arguments)}"
    )


MapFile = Annotated[Path, typer.Argument(help="A shard map, as ShardMap.dumps() writes it.")]


class UnusableFile(LocalError):
    """A file that the command was given can't be read, or is not what it should be."""


@app.command()
def explain(
    map_file: MapFile,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Routing keys.")],
    as_json: AsJson = False,
) -> None:
    """Say which shard each key belongs to, and why."""
    shard_map = read_map(map_file)
    routes = [{"key": key, **asdict(shard_map.route(key))} for key in keys]
    if as_json:
        typer.echo(json.dumps(routes, indent=1))
    else:
        print_table(("key", "slot", "shard", "node", "epoch"), routes)


@app.command()
def diff(
    old_file: MapFile,
    new_file: MapFile,
) -> None:
    """Say in words what changed between two maps of one logical queue."""
    changes = difference(read_map(old_file), read_map(new_file))
    for line in changes or ["no difference"]:
        typer.echo(printable(line))


def read_map(path: Path) -> ShardMap:
    """The map in a file; errors name the file."""
    try:
        return ShardMap.loads(path.read_bytes())
    except OSError as error:
        raise UnusableFile(f"{path}: {error.strerror}") from None
    except WarrenError as error:
        raise UnusableFile(f"{path}: {error}") from None
