"""A RabbitMQ in a root folder of its own: any Debian release's, whatever this machine runs.

`debootstrap` unpacks a small Debian with the package `rabbitmq-server` into the cache, once for
each version. Brokers run in it in a private mount namespace, so nothing is mounted on the machine
itself and the kernel clears the mounts when the last process ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests import machine
from tests.cluster import folders

RELEASES = {"3.10": "bookworm", "4.0": "trixie", "4.3": "sid"}
"""The Debian release that has a RabbitMQ version. sid moves; the others do not."""

# $1 is the root, $2 the folder of clusters, seen inside under the same path as outside.
_ENTER = """
mount --bind /proc "$1/proc" && mount --rbind /dev "$1/dev" && mount --bind "$2" "$1$2" || exit 1
root=$1; shift 2; exec chroot "$root" "$@"
"""


def available() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def ensure(version: str) -> Path:
    """The root folder with this RabbitMQ version, made if it is not there yet."""
    root = folders.cache() / "roots" / version
    if root.exists():
        return root
    machine.ensure_command("debootstrap", "debootstrap", "a broker in its own root folder")
    root.parent.mkdir(parents=True, exist_ok=True)
    with folders.locked(f"root-{version}"):
        if root.exists():  # made while we waited for the lock
            return root
        unfinished = root.with_name(f".{version}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        machine.say(f"RabbitMQ {version}: making its root folder (once; 370 MB, about a minute)")
        _debootstrap(RELEASES[version], unfinished)
        unfinished.rename(root)
    return root


def enter(root: Path, argv: list[str]) -> list[str]:
    """The command that runs `argv` inside `root`."""
    clusters = folders.clusters_folder()
    (root / clusters.relative_to("/")).mkdir(parents=True, exist_ok=True)
    inside = ["/bin/sh", "-c", _ENTER, "sh", str(root), str(clusters), *argv]
    return ["unshare", "--mount", "--propagation", "private", "--", *inside]


def _debootstrap(release: str, target: Path) -> None:
    mirror = os.environ.get("WARREN_DEBIAN_MIRROR")
    command = ["debootstrap", "--variant=minbase", "--include=rabbitmq-server", release]
    log = target.with_suffix(".log")
    with log.open("w") as output:
        done = subprocess.run(
            [*command, str(target), *([mirror] if mirror else [])],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    if done.returncode:
        raise machine.Missing(
            f"debootstrap of Debian {release} failed ({log.read_text().strip().splitlines()[-1]}); "
            "set WARREN_DEBIAN_MIRROR to a mirror reachable from here, or install Docker"
        )
    log.unlink()
    # Downloaded packages are a third of the folder and never needed again.
    shutil.rmtree(target / "var/cache/apt/archives", ignore_errors=True)
