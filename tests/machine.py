"""Make this machine ready: the virtual environment, Java, and packages of the system.

Runs under the machine's own Python, before anything is installed, so it uses the standard library
only. Each step first looks whether its work is done; a second run does nothing.

    python3 tests/machine.py        the virtual environment with all extras, and Java
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
VENV = PROJECT / ".venv"
EXTRAS = "aio,stream,arrow,spark,cli,dev"
OLDEST_PYTHON = (3, 11)
OLDEST_JAVA = 17


class Missing(RuntimeError):
    """Something can't be had here; the message says what to install."""


def main() -> None:
    try:
        ensure_venv()
        ensure_java()
    except Missing as missing:
        sys.exit(f"warren: {missing}")


def ensure_venv() -> None:
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        raise Missing(
            f"Python 3.11 or later is needed, this is {found}; try make PYTHON=python3.12"
        )
    stamp = VENV / "ready"
    wanted = hashlib.sha256((PROJECT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say("making .venv with all extras (once; PySpark alone is 450 MB)")
    if not stamp.exists():
        # Nothing that an interrupted run left is taken over: pip counts a package as installed
        # before it has written its commands.
        _create_venv()
    stamp.unlink(missing_ok=True)
    pip = [str(VENV / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, "--editable", f"{PROJECT}[{EXTRAS}]"]).returncode:
        raise Missing("pip could not install the packages in pyproject.toml; its words are above")
    stamp.write_text(wanted)


def _create_venv() -> None:
    create = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if subprocess.run(create, capture_output=True).returncode == 0:
        return
    # Debian ships Python without ensurepip; its own package adds it.
    apt_install("python3-venv", why="python3 can't make virtual environments")
    if subprocess.run(create).returncode:
        raise Missing(f"{sys.executable} -m venv fails; install the venv module of this Python")


def ensure_java() -> None:
    if (java_version() or 0) < OLDEST_JAVA:
        apt_install("default-jre-headless", why=f"Spark needs Java {OLDEST_JAVA} or later")
        if (java_version() or 0) < OLDEST_JAVA:
            raise Missing(f"Spark needs Java {OLDEST_JAVA} or later; install it and set JAVA_HOME")


def java_version() -> int | None:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(f"{home}/bin/java" if home else "java")
    if java is None:
        return None
    said = subprocess.run([java, "-version"], capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)', said)
    return int(found[1]) if found else None


def ensure_command(command: str, package: str, why: str) -> str:
    """The path of `command`, installed with apt if it is not there."""
    path = shutil.which(command)
    if path is None:
        _check_apt(package, why=why)
        with _one_at_a_time():
            if shutil.which(command) is None:  # not installed while we waited
                _apt_install(package, why=why)
        path = shutil.which(command)
    if path is None:
        raise Missing(f"{why}; {package} was installed, but there is no {command} on the PATH")
    return path


def apt_install(*packages: str, why: str) -> None:
    """Install packages with apt, without letting them start services of their own."""
    _check_apt(*packages, why=why)
    with _one_at_a_time():
        _apt_install(*packages, why=why)


def _check_apt(*packages: str, why: str) -> None:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise Missing(f"{why}; install {' '.join(packages)} (needs root and apt, not had here)")


def _apt_install(*packages: str, why: str) -> None:
    say(f"{why}: installing {' '.join(packages)} with apt")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _no_services():
        for step in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            done = subprocess.run(
                ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600", *step],
                env=quiet,
                capture_output=True,
                text=True,
            )
            # A third-party list that fails to update does not matter if the install works.
            if done.returncode and step[0] == "install":
                raise Missing(f"{why}; apt-get install {' '.join(packages)} failed: {done.stderr}")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """dpkg locks out a second one with an error; let it wait instead."""
    with (Path(tempfile.gettempdir()) / "warren-apt.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """Tell Debian's maintainer scripts, in their own way, not to start daemons.

    A machine's own policy is left alone; one that a killed run of ours left is taken over.
    """
    policy = Path("/usr/sbin/policy-rc.d")
    ours = "#!/bin/sh\n# Warren's, for the time of an installation\nexit 101\n"
    if policy.exists() and policy.read_text() != ours:
        yield
        return
    policy.write_text(ours)
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)


def say(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
