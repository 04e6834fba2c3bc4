"""`warren topology` and `warren doctor`: what there is, and what keeps it from being used."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from sharding.amqp.addresses import amqp_parameters
from sharding.cli.options import (
    LOCAL_BROKER,
    AsJson,
    ManagementUrls,
    StreamUrls,
    app,
    console,
    given,
    printable,
    topology_options,
)
from sharding.cluster.management import ClusterView, management_api
from sharding.cluster.topology import Topology
from sharding.doctor import Finding, Verdict, examine, places_from
from sharding.doctor.findings import summary
from sharding.doctor.roles import Role
from sharding.errors import InvalidInput, WarrenError
from sharding.inspection.asking import queue_view, stream_view
from sharding.inspection.views import ShardState, ShardView, View, ViewKind
from sharding.stream import StreamEnvironment
from sharding.stream.uris import StreamUri

_STYLES = {ShardState.UP: "green", ShardState.AWAY: "red", ShardState.MISSING: "red"}
_UNKNOWN = "–"


def heading(view: View) -> str:
    parts = [str(view.kind)]
    if view.kind is ViewKind.QUEUE:
        parts = [f"epoch {view.epoch}", f"exchange {view.exchange}"]
    parts.append(f"{len(view.shards)} shard{'s' * (len(view.shards) != 1)}")
    away = sum(shard.state is not ShardState.UP for shard in view.shards)
    if away:
        parts.append(f"{away} not up")
    if view.unrouted:
        parts.append(f"{view.unrouted} messages unrouted")
    return printable(f"{view.name}: {', '.join(parts)}")


def as_table(view: View) -> RenderableType:
    table = Table()
    columns = _columns(view)
    for name in columns:
        is_text = name in ("shard", "leader", "node", "replicas", "state")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return Group(Text(heading(view)), table, *_notes(view))


def as_tree(view: View) -> RenderableType:
    tree = Tree(Text(heading(view)))
    for node, shards in view.by_leader.items():
        branch = tree.add(_text(node or "no leader known"))
        for shard in shards:
            leaf = branch.add(_line(shard))
            for group in shard.groups:
                consumers = "" if group.consumers is None else f", {_consumers(group.consumers)}"
                stored = "nothing stored" if group.stored is None else f"stored {group.stored}"
                leaf.add(
                    _text(f"group {group.group}: lag {_shown(group.lag)}, {stored}{consumers}")
                )
    return Group(tree, *_notes(view))


def _columns(view: View) -> dict[str, Sequence[Text]]:
    shards = view.shards
    replicas = [_text(", ".join(shard.replicas)) for shard in shards]
    columns: dict[str, Sequence[Text]] = {"shard": [_text(shard.name) for shard in shards]}
    columns["node" if view.kind is ViewKind.QUEUE else "leader"] = [
        _text(shard.leader or _UNKNOWN) for shard in shards
    ]
    if any(replicas):
        columns["replicas"] = replicas
    columns["state"] = [Text(shard.state, _STYLES[shard.state]) for shard in shards]
    if view.kind is ViewKind.QUEUE:
        columns["messages"] = [_number(shard.messages) for shard in shards]
        columns["consumers"] = [_number(shard.consumers) for shard in shards]
        columns["slots"] = [_number(shard.slots) for shard in shards]
        return columns
    columns["first"] = [_number(shard.first) for shard in shards]
    columns["last"] = [_number(shard.last) for shard in shards]
    if any(shard.consumers is not None for shard in shards):
        columns["consumers"] = [_number(shard.consumers) for shard in shards]
    for group in view.groups:
        lags = [{each.group: each.lag for each in shard.groups}.get(group) for shard in shards]
        columns[printable(f"lag of {group}")] = list(map(_number, lags))
    return columns


def _line(shard: ShardView) -> Text:
    parts: list[str] = []
    if shard.messages is not None:
        parts.append(f"{shard.messages} messages")
    if shard.first is not None:
        parts.append(f"offsets {shard.first} to {shard.last}")
    elif shard.state is ShardState.UP and shard.messages is None:
        parts.append("empty")
    if shard.consumers is not None:
        parts.append(_consumers(shard.consumers))
    if shard.slots is not None:
        parts.append(f"{shard.slots} slots")
    if shard.replicas:
        parts.append(f"replicas {', '.join(shard.replicas)}")
    line = _text(f"{shard.name}  ")
    line.append(shard.state, _STYLES[shard.state])
    return line.append(printable(f"  {', '.join(parts)}") if parts else "")


def _consumers(count: int) -> str:
    return f"{count} consumer{'s' * (count != 1)}"


def _notes(view: View) -> list[Text]:
    notes = [_text(f"{shard.name}: {shard.note}") for shard in view.shards if shard.note]
    if view.unrouted:
        notes.append(
            _text(
                f"{view.unrouted} messages were published to {view.exchange} without Warren, and "
                f"are kept; 'warren shards ensure {view.name}' brings them to their shards"
            )
        )
    return notes


def _number(value: int | None) -> Text:
    return Text(_shown(value))


def _shown(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def _text(text: str) -> Text:
    return Text(printable(text))


Look = Callable[[], View | None]


class Kind(StrEnum):
    QUEUE = "queue"
    STREAM = "stream"


@app.command()
def topology(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A logical queue, a stream or a super stream.")
    ],
    as_json: AsJson = False,
    tree: Annotated[bool, typer.Option("--tree/--table", help="By node, or one by one.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, until interrupted.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    group: Annotated[
        list[str] | None,
        typer.Option(help="A name under which offsets of a stream are stored; several times."),
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option(help="What NAME is, where that is not clear.")
    ] = None,
    url: Annotated[
        list[str],
        typer.Option(
            "--url", envvar="WARREN_URL", show_envvar=True, help="AMQP URL; for logical queues."
        ),
    ] = [],  # noqa: B006 - typer copies it
    management: ManagementUrls = [],  # noqa: B006
    stream_url: StreamUrls = [],  # noqa: B006
) -> None:
    """Show shards, nodes, leaders, replicas, consumers, depth or offsets, and lag."""
    if kind is Kind.STREAM and not stream_url:
        raise InvalidInput("--stream-url", "must be given: streams are asked for there", "")
    queue_urls = url if url or stream_url else LOCAL_BROKER
    first_amqp = [amqp_parameters(each) for each in queue_urls[:1]]
    api = ClusterView([management_api(each, *first_amqp) for each in management])
    each = given.answer_timeout
    with ExitStack() as opened:
        looks: list[Look] = []
        if kind is not Kind.STREAM and queue_urls:
            options = replace(topology_options(), start_timeout=2 * each)
            plane = opened.enter_context(
                Topology(*queue_urls, management_urls=management, options=options)
            )
            looks.append(lambda: queue_view(plane, name, api, each))
        if kind is not Kind.QUEUE and stream_url:
            environment = opened.enter_context(
                StreamEnvironment(*stream_url, connect_timeout=each, request_timeout=each)
            )
            vhost, groups = StreamUri.parse(stream_url[0]).vhost, group or []
            looks.append(lambda: stream_view(environment, name, groups, api, vhost, each))
        look = _first_of(looks, name)
        if watch:
            _watch(look, interval, tree, as_json)
        else:
            _show(look(), tree, as_json)


def _first_of(looks: list[Look], name: str) -> Callable[[], View]:
    """The look that knows the name, which it then is for every later one."""

    def look() -> View:
        for each in list(looks):
            view = each()
            if view is not None:
                looks[:] = [each]
                return view
        rule = "must be one that is sharded, or the name of a stream (--stream-url)"
        raise InvalidInput("logical queue", rule, name)

    return look


def _show(view: View, tree: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(view.to_json(), indent=1))
    else:
        console().print(_drawn(view, tree))


def _watch(look: Callable[[], View], interval: float, tree: bool, as_json: bool) -> None:
    """Redraw in place on a terminal; elsewhere one after the other, as JSON one to a line."""
    screen = console()
    with suppress(KeyboardInterrupt):
        if as_json:
            for view in views(look, interval):
                if isinstance(view, View):
                    typer.echo(json.dumps(view.to_json()))
        elif not screen.is_terminal:
            for view in views(look, interval):
                screen.print(_drawn(view, tree))
        else:
            with Live(console=screen, auto_refresh=False) as live:
                for view in views(look, interval):
                    live.update(_drawn(view, tree), refresh=True)


def views(
    look: Callable[[], View], interval: float, pause: Callable[[float], None] = time.sleep
) -> Iterator[View | WarrenError]:
    """What is seen, for ever. Who can't be asked at first is not waited for; later it is."""
    yield look()
    while True:
        pause(interval)
        try:
            yield look()
        except WarrenError as error:
            yield error


def _drawn(view: View | WarrenError, tree: bool) -> RenderableType:
    if isinstance(view, WarrenError):
        return Text(f"{printable(str(view))}; trying again")
    return as_tree(view) if tree else as_table(view)


_MARKS = {Verdict.OK: "ok     ", Verdict.WARNING: "warning", Verdict.PROBLEM: "problem"}


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each question.")] = 5.0,
    scratch: Annotated[
        str, typer.Option(help="What the names that are made and removed again begin with.")
    ] = "warren.doctor",
    role: Annotated[
        Role | None,
        typer.Option(help="Look whether the user has the rights of this role, on these names."),
    ] = None,
    queue: Annotated[
        list[str], typer.Option("--queue", help="A logical queue of the role; several times.")
    ] = [],  # noqa: B006
    stream: Annotated[
        list[str], typer.Option("--stream", help="A stream or super stream; several times.")
    ] = [],  # noqa: B006
    url: Annotated[
        list[str],
        typer.Option(
            "--url", envvar="WARREN_URL", show_envvar=True, help="AMQP URL; several times, each."
        ),
    ] = [],  # noqa: B006 - typer copies it
    management: ManagementUrls = [],  # noqa: B006
    stream_url: StreamUrls = [],  # noqa: B006
) -> None:
    """Look at addresses, versions, nodes, balancers and permissions; exit code 1 for a problem."""
    anything = url or management or stream_url
    places = places_from(url if anything else LOCAL_BROKER, management, stream_url)
    findings = examine(
        places, timeout=timeout, scratch=scratch, role=role, queues=queue, streams=stream
    )
    if as_json:
        typer.echo(json.dumps([finding.to_json() for finding in findings], indent=1))
    else:
        typer.echo(report(findings))
    if any(finding.verdict is Verdict.PROBLEM for finding in findings):
        raise typer.Exit(1)


def report(findings: Sequence[Finding]) -> str:
    """One line for what is well, three for what is not."""
    lines: list[str] = []
    for finding in findings:
        mark, check = _MARKS[finding.verdict], f"{finding.check}, {finding.subject}"
        if finding.verdict is Verdict.OK:
            lines.append(f"{mark}  {check}: {finding.found}")
            continue
        lines.append(f"{mark}  {check}: {finding.found}")
        lines.append(f"           wanted: {finding.wanted}")
        lines.append(f"           {finding.fix}")
    return os.linesep.join([*map(printable, lines), summary(findings)])
