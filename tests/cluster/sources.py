"""Where a broker of a wanted version comes from: the first source that has it.

1. brokers named in the environment (`foreign`),
2. Docker, where an engine answers (`docker`),
3. a `rabbitmq-server` on the PATH,
4. a Debian root folder made by debootstrap (`debian_root`),
5. the distribution's own `rabbitmq-server`, installed with apt.

`WARREN_BROKER_SOURCE` (environment, docker, path, root, apt) asks for one of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests import machine
from tests.cluster import debian_root, docker, foreign

DEFAULT_VERSION = "4.0"
SOURCES = ("environment", "docker", "path", "root", "apt")

_INSTALLED = re.compile(r"rabbitmq_server-(?P<version>[0-9.]+)")


@dataclass(frozen=True)
class Installation:
    """A RabbitMQ on this machine's disk, and how to run its commands."""

    version: str
    sbin: Path
    root: Path | None = None

    def command(self, name: str, *arguments: str) -> list[str]:
        argv = [str(self.sbin / name), *arguments]
        return argv if self.root is None else debian_root.enter(self.root, argv)

    def erlang(self, name: str, *arguments: str) -> list[str]:
        """A program of the Erlang that runs this RabbitMQ, `epmd` say."""
        top = self.root or Path("/")
        found = sorted(top.glob(f"usr/lib/erlang/erts-*/bin/{name}"))
        path = str(Path("/") / found[-1].relative_to(top)) if found else name
        return (
            [path, *arguments]
            if self.root is None
            else debian_root.enter(self.root, [path, *arguments])
        )


def choose(version: str) -> str:
    """The name of the source to take a broker of `version` from."""
    asked = os.environ.get("WARREN_BROKER_SOURCE")
    if asked is not None:
        if asked not in SOURCES:
            raise machine.Missing(
                f"WARREN_BROKER_SOURCE must be one of {', '.join(SOURCES)}, not {asked!r}"
            )
        return asked
    if foreign.named():
        return "environment"
    if docker.engine_answers():
        return "docker"
    if _serves(on_path(), version):
        return "path"
    if version in debian_root.RELEASES and debian_root.available():
        return "root"
    if version == DEFAULT_VERSION or _distribution_has(version):
        return "apt"
    raise machine.Missing(f"no RabbitMQ {version} here; install Docker, or use root on Debian")


def installation(source: str, version: str) -> Installation:
    """The RabbitMQ on disk for one of the sources `path`, `root` and `apt`."""
    if source == "root":
        if version not in debian_root.RELEASES:
            known = ", ".join(debian_root.RELEASES)
            raise machine.Missing(f"there is no Debian with RabbitMQ {version}; known: {known}")
        root = debian_root.ensure(version)
        return _installed_below(root, root)
    if source == "apt" and on_path() is None:
        machine.apt_install("rabbitmq-server", why="the tests need a RabbitMQ")
    found = on_path()
    if found is None:
        raise machine.Missing(
            "no rabbitmq-server on the PATH; install it, Docker, or be root on Debian"
        )
    if source == "path" and not _serves(found, version):
        raise machine.Missing(f"the rabbitmq-server on the PATH is {found.version}, not {version}")
    return found


def on_path() -> Installation | None:
    """The machine's own RabbitMQ."""
    command = shutil.which("rabbitmq-server")
    if command is None:
        return None
    sbin = Path(command).resolve().parent
    if match := _INSTALLED.search(str(sbin)):
        return Installation(match["version"], sbin)
    # Debian puts a wrapper on the PATH that insists on a user; the scripts lie in its lib folder.
    return _installed_below(Path("/"), None)


def _installed_below(top: Path, root: Path | None) -> Installation:
    found = sorted(top.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin"))
    if not found:
        raise machine.Missing(f"no RabbitMQ below {top}; remove that folder and start again")
    match = _INSTALLED.search(str(found[-1]))
    assert match is not None  # the glob asked for it
    return Installation(match["version"], Path("/") / found[-1].relative_to(top), root)


def _serves(found: Installation | None, version: str) -> bool:
    if found is None:
        return False
    major_minor = ".".join(found.version.split(".")[:2])
    newer_default = version == DEFAULT_VERSION and int(found.version.split(".")[0]) >= 4
    return major_minor == version or newer_default


def _distribution_has(version: str) -> bool:
    if shutil.which("apt-cache") is None:
        return False
    said = subprocess.run(
        ["apt-cache", "policy", "rabbitmq-server"], capture_output=True, text=True
    )
    return f"Candidate: {version}." in said.stdout
