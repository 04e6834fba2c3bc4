"""Where clusters keep their things on this machine, and who owns which cluster.

Everything lives under one cache folder (`WARREN_CACHE`, else `~/.cache/warren`):

    roots/<version>/       a Debian root folder with a RabbitMQ in it, made once, kept
    clusters/<name>/       one running cluster: its record, node folders, logs; gone after stop
    clusters/.<name>/      no cluster, but files that brokers must see (`pool`)

A cluster started by a test belongs to that process: when the process is dead, the next start takes
the cluster down. One started by `make up` belongs to nobody and stays until `make down`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster import processes

_FIRST_PORT, _PORTS_OF_A_BLOCK, _BLOCKS = 20_000, 100, 119
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,40}")


def cache() -> Path:
    chosen = os.environ.get("WARREN_CACHE")
    if chosen:
        return Path(chosen).resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).resolve() / "warren"


def clusters_folder() -> Path:
    folder = cache() / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cluster_folder(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ValueError(f"a cluster's name is lower-case letters, digits and -_., not {name!r}")
    return clusters_folder() / name


@dataclass
class Record:
    """What another process needs to know to find a cluster again."""

    name: str
    version: str
    source: str
    block: int
    """The nodes are at 127.0.<block>.1 and up, so clusters side by side never share an address."""
    owner: list[int] | None
    """The pid and start time of the process it dies with."""
    plugins: list[str]
    config: str
    extra_ports: list[str]
    one_core_each: bool = False
    nodes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ports(self) -> range:
        """Ports that no other cluster takes, below the range that outgoing connections use."""
        first = _FIRST_PORT + _PORTS_OF_A_BLOCK * (self.block - 1)
        return range(first, first + _PORTS_OF_A_BLOCK)

    @property
    def epmd_port(self) -> int:
        return self.ports[-1]

    def save(self) -> None:
        path = cluster_folder(self.name) / "cluster.json"
        written = path.with_suffix(".new")
        written.write_text(json.dumps(asdict(self), indent=1))
        written.replace(path)

    @classmethod
    def load(cls, name: str) -> Record:
        return cls(**json.loads((cluster_folder(name) / "cluster.json").read_text()))


@contextlib.contextmanager
def locked(name: str, folder: Path | None = None) -> Iterator[None]:
    """Keep other processes out of a piece of work; the lock lies in `folder`, else in the cache."""
    there = folder or cache()
    there.mkdir(parents=True, exist_ok=True)
    with (there / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def names() -> list[str]:
    return sorted(
        folder.name
        for folder in clusters_folder().iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
    )


def records() -> list[Record]:
    found = []
    for name in names():
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            found.append(Record.load(name))
    return found


def kept() -> list[str]:
    """Clusters that belong to nobody: those of `make up`."""
    return [record.name for record in records() if record.owner is None]


def abandoned() -> list[str]:
    """Clusters whose owner is dead, or whose record never got written."""
    kept = {record.name for record in records() if _wanted(record)}
    return [name for name in names() if name not in kept]


def _wanted(record: Record) -> bool:
    return record.owner is None or processes.alive(*record.owner)


def reserve(name: str, make_record: Any) -> Record:
    """Create the folder and the record of a new cluster, at addresses no other cluster has."""
    with locked("clusters"):
        for left_over in abandoned():
            remove(left_over)
        folder = cluster_folder(name)
        if folder.exists():
            raise FileExistsError(f"cluster {name!r} is running already; make down stops it")
        taken = {record.block for record in records()}
        block = next(number for number in range(1, _BLOCKS + 1) if number not in taken)
        folder.mkdir(parents=True)
        record: Record = make_record(block)
        record.save()
        return record


def remove(name: str) -> None:
    """End every process of a cluster and delete its folder. Mounts end with the processes."""
    folder = cluster_folder(name)
    processes.kill_all(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # a process that was just dying may have written once more
        processes.kill_all(folder)
        shutil.rmtree(folder)
