"""`warren topology`: the shards of a name, once or again and again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from sharding.cluster_commands import LOCAL_BROKER, ManagementUrls
from sharding.commands import AsJson, app, printable
from sharding.doctor_command import StreamUrls
from sharding.errors import InvalidInput, WarrenError
from sharding.members import ClusterView
from sharding.sight import View, queue_view, stream_view
from sharding.sight.rendering import as_table, as_tree
from sharding.stream import StreamEnvironment
from sharding.stream.uris import StreamUri
from sharding.topology import Topology, TopologyOptions
from sharding.urls import amqp_parameters, management_api

Look = Callable[[], View | None]

ANSWER_TIMEOUT = 5.0
"""For each question: a node that is down must not hold up what the others say. Brokers take 3 s to
refuse a password."""
START_TIMEOUT = 10.0


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
    with ExitStack() as opened:
        looks: list[Look] = []
        if kind is not Kind.STREAM and queue_urls:
            options = TopologyOptions(start_timeout=START_TIMEOUT, answer_timeout=ANSWER_TIMEOUT)
            plane = opened.enter_context(
                Topology(*queue_urls, management_urls=management, options=options)
            )
            looks.append(lambda: queue_view(plane, name, api, ANSWER_TIMEOUT))
        if kind is not Kind.QUEUE and stream_url:
            environment = opened.enter_context(
                StreamEnvironment(
                    *stream_url, connect_timeout=ANSWER_TIMEOUT, request_timeout=ANSWER_TIMEOUT
                )
            )
            vhost, groups = StreamUri.parse(stream_url[0]).vhost, group or []
            looks.append(lambda: stream_view(environment, name, groups, api, vhost, ANSWER_TIMEOUT))
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
        _console().print(_drawn(view, tree))


def _watch(look: Callable[[], View], interval: float, tree: bool, as_json: bool) -> None:
    """Redraw in place on a terminal; elsewhere one after the other, as JSON one to a line."""
    console = _console()
    with suppress(KeyboardInterrupt):
        if as_json:
            for view in views(look, interval):
                if isinstance(view, View):
                    typer.echo(json.dumps(view.to_json()))
        elif not console.is_terminal:
            for view in views(look, interval):
                console.print(_drawn(view, tree))
        else:
            with Live(console=console, auto_refresh=False) as live:
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


def _console() -> Console:
    # Rich takes a pipe for 80 columns wide and would fold names that scripts want whole.
    width = None if sys.stdout.isatty() else 10_000
    return Console(width=width, markup=False, highlight=False, emoji=False)
