"""`make up`, `make down`, `make status`: a local cluster for trying things.

python -m tests.cluster up [NAME] [--nodes 3] [--version 4.0] [--plugin rabbitmq_sharding]
python -m tests.cluster down [NAME]         one cluster, or all that were started with up
python -m tests.cluster status

`python3 -m tests.cluster.prepare` installs beforehand what a start would.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from tests import machine
from tests.cluster import DEFAULT_VERSION, Cluster, folders
from tests.cluster.display import cluster_table, exports

DEFAULT_NAME = "warren"


def main() -> None:
    arguments = _parser().parse_args()
    console = Console()
    try:
        if arguments.command == "up":
            _up(arguments, console)
        elif arguments.command == "down":
            _down(arguments.name, console)
        else:
            _status(console)
    except (machine.Missing, OSError, ValueError, RuntimeError) as problem:
        sys.exit(f"warren: {problem}")


def _up(arguments: argparse.Namespace, console: Console) -> None:
    with console.status(f"{arguments.name}: starting") as status:
        cluster = Cluster.start(
            arguments.name,
            nodes=arguments.nodes,
            version=arguments.version,
            plugins=arguments.plugin,
            keep=True,
            progress=status.update,
        )
    console.print(cluster_table(cluster))
    console.print(exports(cluster), soft_wrap=True, highlight=False)
    if arguments.balancer:
        front = cluster.balancer().endpoint
        console.print(f"HAProxy in front: {front.amqp_url} {front.stream_url}")


def _down(name: str | None, console: Console) -> None:
    wanted = [name] if name else folders.kept() + folders.abandoned()
    for each in wanted:
        if each not in folders.names():
            raise ValueError(f"there is no cluster {each!r}; make status lists them")
        try:
            Cluster.attach(each).stop()
        except (FileNotFoundError, TypeError, ValueError, machine.Missing):
            folders.remove(each)  # its record was never finished, or its source is gone
        console.print(f"{each}: stopped, nothing left")
    if not wanted:
        console.print("no cluster is up")


def _status(console: Console) -> None:
    if not folders.names():
        console.print("no cluster is up; make up starts one")
    for record in folders.records():
        if not record.nodes:  # it is being made
            continue
        try:
            cluster = Cluster.attach(record.name)
        except FileNotFoundError:  # it ended while others were shown
            continue
        console.print(cluster_table(cluster))
        console.print(exports(cluster), soft_wrap=True, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster that stays until it is taken down")
    up.add_argument("name", nargs="?", default=DEFAULT_NAME)
    up.add_argument("--nodes", type=int, default=3)
    up.add_argument("--version", default=DEFAULT_VERSION)
    up.add_argument("--plugin", action="append", default=[])
    up.add_argument("--balancer", action="store_true", help="with HAProxy in front")
    down = commands.add_parser("down", help="stop one cluster, or all")
    down.add_argument("name", nargs="?")
    commands.add_parser("status", help="show what is up")
    return parser


if __name__ == "__main__":
    main()
