"""A process of a cluster is found whatever it is doing at the moment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.cluster import processes

# Runs itself again so many times, in one process, as the scripts that start a broker do.
AGAIN = 'if [ $1 -gt 0 ]; then exec /bin/sh -c "$0" "$0" $(($1 - 1)); fi; read line'


def test_a_process_is_found_while_it_execs(tmp_path: Path) -> None:
    environment = {processes.MARK: str(tmp_path), "PATH": os.environ["PATH"], "FILL": "x" * 20_000}
    running = subprocess.Popen(
        ["/bin/sh", "-c", AGAIN, AGAIN, "300"], env=environment, stdin=subprocess.PIPE
    )
    place = Path(f"/proc/{running.pid}")
    mark = f"{processes.MARK}={tmp_path}".encode()
    try:
        looks = [mark in processes._environment(str(place)).split(b"\0")]
        while not (place / "cmdline").read_bytes().endswith(b"\x000\x00"):
            looks.append(mark in processes._environment(str(place)).split(b"\0"))
    finally:
        running.communicate(b"\n")
    assert len(looks) > 10
    assert all(looks), f"{looks.count(False)} of {len(looks)} looks missed it"
    assert processes._environment(str(place)) == b""
