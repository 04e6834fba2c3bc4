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
from io import FileIO
from pathlib import Path

MARK = "WARREN_CLUSTER_PART"


def marked(folder: Path) -> list[int]:
    """The living processes that belong to `folder` or to a folder below it."""
    return [pid for pid, _ in parts_below(folder)]


def parts_below(folder: Path) -> list[tuple[int, Path]]:
    """Those processes, each with the folder that it belongs to.

    While a node boots this is asked several times a second, of every process of the machine, so
    files are read without detours.
    """
    mark = f"{MARK}=".encode()
    below = mark + os.fsencode(folder)
    found = [
        (int(entry.name), Path(os.fsdecode(item.removeprefix(mark))))
        for entry in os.scandir("/proc")
        if entry.name.isdigit() and below in (environment := _environment(entry.path))
        for item in environment.split(b"\0")
        if item.startswith(below)
    ]
    return [(pid, part) for pid, part in found if part.is_relative_to(folder)]


def _environment(process: str) -> bytes:
    """The environment of a process; empty if it ended, or is not ours to read.

    One that execs meanwhile seems to have none, or half of one, for some milliseconds where the
    machine is busy: there is no new environment yet, or the old one can't be read on. So what was
    read counts only if the environment ended at the same place before and after, since each program
    has its own; kernel threads and zombies have no program at all.
    """
    try:
        while True:
            end = _end_of_environment(process)
            content = _read(f"{process}/environ")
            if end != b"0" and end == _end_of_environment(process):
                return content
            Path(f"{process}/exe").readlink()
            time.sleep(0.001)
    except OSError:
        return b""


def _end_of_environment(process: str) -> bytes:
    """`env_end` of proc(5), which is 0 while a process has none yet."""
    return _read(f"{process}/stat").rpartition(b")")[2].split()[51 - 3]


def _read(path: str) -> bytes:
    with FileIO(path) as file:
        return file.readall()


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
    no zombie to reap when it dies. Its process group is its own, so that Ctrl-C does not reach it,
    but not its session: Linux deals cores out to sessions first (sched_autogroup), and `nice` would
    say nothing about processes of another one.
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
            process_group=0,
            check=True,
        )


def worked(pid: int, *, with_ended_children: bool = False) -> float:
    """The seconds that a process had a core."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    last = 17 if with_ended_children else 15  # fields 14 to 17 of proc(5)
    ticks = sum(map(int, after_name[14 - 3 : last - 3 + 1]))
    return ticks / os.sysconf("SC_CLK_TCK")


def identity() -> list[int]:
    """This process as an owner: pids are used again, a pid with its start time is not."""
    return [os.getpid(), started_at(os.getpid())]


def alive(pid: int, start_time: int) -> bool:
    try:
        return started_at(pid) == start_time
    except OSError:
        return False


def started_at(pid: int) -> int:
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
