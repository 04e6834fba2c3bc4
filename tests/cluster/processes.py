"""The processes of a cluster, found by a mark in their environment.

A broker forks helpers that leave its process group, and another Python process may have started
it. The mark `WARREN_CLUSTER_PART=<folder>` is inherited by all of them and by nothing else, so only
processes that we started are ever signalled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

MARK = "WARREN_CLUSTER_PART"


def marked(folder: Path) -> list[int]:
    """The living processes that belong to `folder` or to a folder below it."""
    exact = f"{MARK}={folder}".encode()
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and any(item == exact or item.startswith(exact + b"/") for item in _environment(entry))
    ]


def _environment(process: Path) -> list[bytes]:
    """The environment of a process; empty if it ended, or is not ours to read.

    One that execs meanwhile seems to have none, or half of one, for some milliseconds where the
    machine is busy: there is no new environment yet, or the old one can't be read on. So what was
    read counts only if the environment ended at the same place before and after, since each program
    has its own; kernel threads and zombies have no program at all.
    """
    try:
        while True:
            end = _end_of_environment(process)
            content = (process / "environ").read_bytes()
            if end and end == _end_of_environment(process):
                return content.split(b"\0")
            (process / "exe").readlink()
            time.sleep(0.001)
    except OSError:
        return []


def _end_of_environment(process: Path) -> int:
    """`env_end` of proc(5), which is 0 while a process has none yet."""
    after_name = (process / "stat").read_text().rpartition(")")[2].split()
    return int(after_name[51 - 3])


def send(folder: Path, number: signal.Signals) -> int:
    """Signal every process of `folder`; returns how many there were."""
    pids = marked(folder)
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    return len(pids)


def kill_all(folder: Path, timeout: float = 20) -> None:
    """Kill -9 until no process is left: one may fork while another is being killed."""
    deadline = time.monotonic() + timeout
    while send(folder, signal.SIGKILL):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {marked(folder)} survive kill -9")
        time.sleep(0.05)


def wait_until_gone(folder: Path, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while marked(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def all_stopped(folder: Path) -> bool:
    """Whether every thread of every process of `folder` is stopped by a signal."""
    return all(
        _state(thread) == "T"
        for pid in marked(folder)
        for thread in Path(f"/proc/{pid}/task").glob("*/stat")
    )


def beam(folder: Path) -> list[int]:
    """The Erlang virtual machines among the processes of `folder`."""
    return [pid for pid in marked(folder) if _name(pid) == "beam.smp"]


def spawn(argv: list[str], environment: dict[str, str], folder: Path, log: Path) -> None:
    """Start a marked process that outlives this one; its output goes to `log`.

    The shell in between ends at once, so that the process is init's child and not ours: there is
    no zombie to reap when it dies.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *argv],
            env={**environment, MARK: str(folder)},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            check=True,
        )


def identity() -> list[int]:
    """This process as an owner: pids are used again, a pid with its start time is not."""
    return [os.getpid(), _start_time(os.getpid())]


def alive(pid: int, start_time: int) -> bool:
    try:
        return _start_time(pid) == start_time
    except OSError:
        return False


def _start_time(pid: int) -> int:
    # Field 22; the second field, the name in parentheses, may hold spaces.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "T"  # it has ended


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
