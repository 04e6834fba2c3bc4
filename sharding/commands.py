"""The sub-commands of `warren`. Each raises `WarrenError` when it fails; `cli` reports it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sharding import __version__
from sharding.errors import LocalError, WarrenError
from sharding.map_difference import difference
from sharding.shard_map import ShardMap

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

MapFile = Annotated[Path, typer.Argument(help="A shard map, as ShardMap.dumps() writes it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class UnusableFile(LocalError):
    """A file that the command was given can't be read, or is not what it should be."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"warren {__version__}")
        raise typer.Exit


@app.callback()
def warren(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Many RabbitMQ queues on many nodes behave as one."""


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


def print_table(columns: tuple[str, ...], rows: list[dict[str, object]]) -> None:
    """A table of these columns; values are printed as they are and never cut."""
    table = Table(*columns)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*(printable(str(row[column])) for column in columns))
    # Rich takes a pipe for 80 columns wide and would fold names that scripts want whole.
    width = None if sys.stdout.isatty() else 10_000
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)


def printable(text: str) -> str:
    """`text` on one line and without control characters, which a terminal might obey."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
