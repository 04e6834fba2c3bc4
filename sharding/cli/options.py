"""What the sub-commands of `warren` share: the app they join, options, tables, a connection.

Each command raises `WarrenError` when it fails; `main` reports it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sharding import __version__
from sharding.cluster.topology import Topology, TopologyOptions

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Logical = Annotated[str, typer.Argument(metavar="NAME", help="The logical queue.")]
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
StreamUrls = Annotated[
    list[str],
    typer.Option(
        "--stream-url",
        envvar="WARREN_STREAM_URL",
        show_envvar=True,
        help="Stream URL of a node or a balancer; several times, for failover.",
    ),
]

LOCAL_BROKER = ["amqp://guest:guest@localhost:5672/"]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"warren {__version__}")
        raise typer.Exit


@dataclass
class Given:
    """What stands on the command line before the sub-command, for all of them."""

    answer_timeout: float = 5.0
    """A node that is down must not hold up what the others say. Brokers take 3 s to refuse a
    password."""
    trusted_hosts: list[str] = field(default_factory=list)


given = Given()


@app.callback()
def warren(
    answer_timeout: Annotated[
        float,
        typer.Option(
            "--answer-timeout",
            min=0.1,
            envvar="WARREN_ANSWER_TIMEOUT",
            show_envvar=True,
            help="Seconds that a broker may take to connect, and to answer one question.",
        ),
    ] = Given.answer_timeout,
    trusted_host: Annotated[
        list[str],
        typer.Option(
            "--trusted-host",
            envvar="WARREN_TRUSTED_HOSTS",
            show_envvar=True,
            help="Hosts that may get the login though only a map names them: *.example.com.",
        ),
    ] = [],  # noqa: B006
    version: Annotated[  # noqa: ARG001 - its callback prints it
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Many RabbitMQ queues on many nodes behave as one."""
    given.answer_timeout = answer_timeout
    given.trusted_hosts = trusted_host


def print_table(columns: tuple[str, ...], rows: list[dict[str, object]]) -> None:
    """A table of these columns; values are printed as they are and never cut."""
    table = Table(*columns)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*(printable(str(row[column])) for column in columns))
    console().print(table)


def console() -> Console:
    # Rich takes a pipe for 80 columns wide and would fold names that scripts want whole.
    width = None if sys.stdout.isatty() else 10_000
    return Console(width=width, markup=False, highlight=False, emoji=False)


def printable(text: str) -> str:
    """`text` on one line and without control characters, which a terminal might obey."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


@contextmanager
def connected(urls: list[str], management: list[str]) -> Iterator[Topology]:
    # What the manager notes is in the report; without a handler logging would print it as well.
    logging.getLogger("warren.manager").addHandler(logging.NullHandler())
    with Topology(*urls, management_urls=management, options=topology_options()) as topology:
        yield topology


def topology_options() -> TopologyOptions:
    """For a command that is given so long for each answer; all of its work takes many."""
    each = given.answer_timeout
    usual = TopologyOptions()
    return TopologyOptions(
        connect_timeout=each,
        answer_timeout=each,
        management_timeout=each,
        start_timeout=max(usual.start_timeout, each),
        change_timeout=max(usual.change_timeout, 2 * each),
        trusted_hosts=given.trusted_hosts,
    )
